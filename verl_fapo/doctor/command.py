"""Composes the config of a training command, and makes the checks that the command itself makes first."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_fapo.checks import CHECKS, joins_cluster, own_devices, pool_devices
from verl_fapo.doctor.findings import Composed, Finding, reason
from verl_fapo.errors import UsageError
from verl_fapo.settings import read_settings
from verl_fapo.templates import BUILT_IN, read_template

CONFIG_NAME = "ppo_trainer"


def examine(overrides: list[str]) -> Iterator[Finding | Composed]:
    """Every mistake in the settings, and then the config for the parts that come next."""
    try:
        config, environment = compose(overrides)
    except (HydraException, OmegaConfBaseException) as exc:
        yield Finding("settings", "problem", f"Hydra refuses the command: {reason(exc)}", "mend that argument")
        return
    if not isinstance(OmegaConf.select(config, "fapo"), DictConfig):
        what = "there is no FAPO recipe in this command, so veRL would train without it"
        yield Finding("settings", "problem", what, "add +recipe=fapo")
        return
    os.environ.update(environment)
    problems = list(failures("settings", config, "settings"))
    yield from problems or _summary(config)
    yield Composed(config_yaml=OmegaConf.to_yaml(config), environment=environment)


def compose(overrides: list[str]) -> tuple[DictConfig, dict[str, str]]:
    """The config that ``python -m verl.trainer.main_ppo OVERRIDES`` gets, and the variables that it sets."""
    import verl  # noqa: F401  (loads the plugin)

    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose(CONFIG_NAME, overrides, return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = config.hydra.run.dir
        HydraConfig.instance().set_config(config)
        environment = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
        config.pop("hydra")
    # Interpolations of Hydra's own are not there for those who read this later.
    OmegaConf.resolve(config)
    return config, {name: str(value) for name, value in environment.items()}


def failures(group: str, config: DictConfig, section: str) -> Iterator[Finding]:
    """What the checks of ``group`` refuse, each message once."""
    told = set()
    for check in CHECKS[group]:
        finding = attempt(lambda check=check: check(config), section)
        if finding and finding.what not in told:
            told.add(finding.what)
            yield finding


def attempt(check: Callable[[], Any], section: str) -> Finding | None:
    """A problem if the check refuses."""
    try:
        check()
    except UsageError as exc:
        what, _, way_out = str(exc).rpartition("; ")
        key = re.match(r"[\w.]*", str(exc)).group()
        return Finding(section, "problem", what or str(exc), way_out if what else f"correct {key}")
    except (OmegaConfBaseException, AttributeError, TypeError) as exc:
        what = f"a value of the config is none that veRL can take: {reason(exc)}"
        return Finding(section, "problem", what, "remove or correct that override")
    return None


def _summary(config: DictConfig) -> Iterator[Finding]:
    settings = read_settings(config)
    mode = config.trainer.v1.trainer_mode
    yield Finding("settings", "ok", f"{mode}, penalty {settings.penalty:g}, judge {settings.judge.model or 'none'}")
    if (name := settings.judge.template) not in BUILT_IN:
        if not re.search(r"\\(?:boxed|fbox)", read_template(name).text):
            what = f"{name} does not ask for \\boxed{{}}, without which there is no verdict"
            yield Finding("settings", "note", what, "say there that the index goes into \\boxed{}")
        headings = ", ".join(f"[{heading}]" for heading in read_template(name).headings) or "none"
        yield Finding("settings", "ok", f"{name} is a template for the judge; headings that are kept apart: {headings}")
    pools = ", ".join(f"{name} {count}" for name, count in pool_devices(config).items())
    if joins_cluster(config):
        return  # Ray is asked under 'ray'
    devices = own_devices(config)
    if devices is not None:
        yield Finding("settings", "ok", f"devices: {pools}; Ray will have {devices:g}")
    elif not find_spec("torch_npu"):
        yield Finding(
            "settings", "problem", f"devices: {pools}; torch sees none here",
            "add +recipe/device=cpu, or join a cluster by RAY_ADDRESS",
        )  # fmt: skip

"""Whether verl_fapo is active inside veRL, and its recipes visible to Hydra.

veRL logs a plugin that fails at DEBUG only, and Hydra composes ``recipe: fapo`` as a plain value where it does not
find the group: both say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import entry_points

from omegaconf import DictConfig, OmegaConf

from verl_fapo.checks import TRAINER_MODES
from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.doctor.imports import hint

REINSTALL = "pip install --force-reinstall --no-deps verl-fapo (in a clone: pip install --no-deps .)"

# Groups of entry points, and the variables that restrict which of them are loaded.
ENTRY_POINTS = {"verl.plugins": "VERL_USE_EXTERNAL_PLUGINS", "vllm.general_plugins": "VLLM_PLUGINS"}


def examine() -> Iterator[Finding]:
    """The entry points, the registries, and the recipe."""
    yield from _entry_points()
    try:
        import verl  # noqa: F401

        # Already there if veRL could load it; if not, this shows why.
        import_module("verl_fapo.plugin")
        registered = _registered()
    except Exception as exc:  # whatever a package's import raises
        said = reason(exc)
        yield Finding("plugin", "problem", f"the plugin cannot be loaded: {said}", hint(said, "mend that import"))
        return
    for name, known in registered.items():
        if known:
            yield Finding("plugin", "ok", f"veRL knows {name}")
        else:
            yield Finding("plugin", "problem", f"veRL does not know {name}", REINSTALL)
    yield from _recipe()


def _entry_points() -> Iterator[Finding]:
    for group, variable in ENTRY_POINTS.items():
        names = {point.name for point in entry_points(group=group) if point.module.startswith("verl_fapo.")}
        if not names:
            yield Finding("plugin", "problem", f"no entry point of {group} is verl_fapo's", REINSTALL)
        allowed = os.environ.get(variable, "auto").strip()
        if allowed.lower() != "auto" and not names & {name.strip() for name in allowed.split(",")}:
            what = f"{variable}={allowed!r} keeps verl_fapo from being loaded"
            yield Finding("plugin", "problem", what, f"unset {variable}")


def _registered() -> dict[str, bool]:
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    import_module("verl.experimental.reward_loop.reward_manager")
    import_module("verl.trainer.ppo.v1")
    return {
        "the reward managers fapo and fapo_genrm": {"fapo", "fapo_genrm"} <= set(REWARD_MANAGER),
        f"the trainers {', '.join(TRAINER_MODES)}": set(TRAINER_MODES) <= set(TRAINER_REGISTRY),
    }


def _recipe() -> Iterator[Finding]:
    import hydra

    try:
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            config = hydra.compose("ppo_trainer", ["+recipe=fapo", "+recipe/device=cpu"])
        found = {
            "+recipe=fapo": isinstance(OmegaConf.select(config, "fapo.judge"), DictConfig),
            "+recipe/device=cpu": config.trainer.device == "cpu",
        }
    except Exception as exc:  # Hydra passes on what the search path plugin raises
        yield Finding("plugin", "problem", f"+recipe=fapo cannot be composed: {reason(exc)}", REINSTALL)
        return
    for flag, works in found.items():
        if works:
            yield Finding("plugin", "ok", f"Hydra knows {flag}")
        else:
            what = f"Hydra does not know the recipe of {flag}, and would take it for a plain value"
            yield Finding("plugin", "problem", what, REINSTALL)

"""Everything about a config that can be known to be wrong before Ray starts."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from huggingface_hub import constants, try_to_load_from_cache
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf
from ray._private.utils import read_ray_address

from verl_fapo.errors import DataError, ModelError, SettingsError
from verl_fapo.settings import FAPOSettings, read_settings
from verl_fapo.templates import BUILT_IN, read_template

SUPPORTED_VERL = "0.9."
POLICY_SIZES = {None: (None, "gpu", "cpu"), "7b": (None, "gpu"), "32b": (None, "gpu"), "tiny": (None, "gpu", "cpu")}
RECIPES: dict[str, dict[str | None, tuple[str | None, ...]]] = {
    "fapo": POLICY_SIZES,
    "baseline": POLICY_SIZES,
    "fapo_genrm": {None: (None, "gpu", "cpu"), "genrm_4b": (None, "gpu"), "tiny": (None, "gpu", "cpu")},
}
"""The devices of each size of each recipe; None where the command names none."""

REWARD_MANAGERS = ("fapo", "fapo_genrm")
NEUTRAL_ESTIMATORS = ("grpo", "rloo")
"""Those whose advantages compare a rollout with others of its group, and need nothing else."""

TRAINER_MODES = ("fapo_sync", "fapo_colocate_async", "fapo_separate_async")
LEGACY_KEYS = {
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.model.path": "fapo.judge.model",
    "reward_model.enable": "fapo.judge.model",
    "reward_model.n_gpus_per_node": "fapo.genrm.n_gpus_per_node",
    "reward_model": "reward.reward_model",
    "custom_reward_function": "reward.custom_reward_function",
    "sandbox_fusion": "reward.sandbox_fusion",
}
MODEL_FILES = {
    "weights": {"config.json": ["config.json"], "weights (*.safetensors or *.bin)": ["*.safetensors", "*.bin"]},
    "tokenizer": {
        "a tokenizer (tokenizer.json, tokenizer.model or vocab.json)": [
            "tokenizer.json",
            "tokenizer.model",
            "vocab.json",
        ]
    },
    "chat template": {},
}
CLUSTER_COUNTS = ("ray_kwargs.ray_init.num_cpus", "ray_kwargs.ray_init.num_gpus")
DATA_KEYS = ("data.train_files", "data.val_files")
ANSWER_KINDS = (
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
    pyarrow.types.is_integer,
    pyarrow.types.is_floating,
    pyarrow.types.is_dictionary,
)
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_config(config: DictConfig) -> FAPOSettings:
    """Check a composed veRL config with a FAPO recipe in it.

    Raises:
        UsageError: what is wrong, in one line with the key, the value and the way out.
    """
    for checks in CHECKS.values():
        for check in checks:
            check(config)
    return read_settings(config)


def check_verl(config: DictConfig) -> None:
    check_verl_version(importlib.metadata.version("verl"))


def check_verl_version(version: str) -> None:
    if not version.startswith(SUPPORTED_VERL):
        raise SettingsError(f"veRL {version} is installed, expected {SUPPORTED_VERL}*; pip install 'verl>=0.9,<0.10'")


def check_recipe(config: DictConfig) -> None:
    """The recipe, size and device that the command names must be made for each other; another's recipe is its own."""
    choices = HydraConfig.get().runtime.choices if HydraConfig.initialized() else {}
    recipe, size, device = (choices.get(group) for group in ("recipe", "recipe/size", "recipe/device"))
    if size and not recipe:
        fitting = [f"+recipe={name}" for name, sizes in RECIPES.items() if size in sizes]
        way_out = f"add {_either(fitting)}" if fitting else "remove it, as it is a part of other sizes"
        raise SettingsError(f"recipe/size={size} without a recipe trains without FAPO; {way_out}")
    sizes = RECIPES.get(recipe)
    if sizes is None:
        return
    if size not in sizes:
        raise SettingsError(f"recipe/size={size} is none of recipe={recipe}; set it to {_either(filter(None, sizes))}")
    if device not in sizes[size]:
        raise SettingsError(
            f"recipe/device={device} is none of recipe/size={size}; set it to {_either(filter(None, sizes[size]))}, "
            f"or the size to {_either(name for name, devices in sizes.items() if name and device in devices)}"
        )


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)


def check_legacy_keys(config: DictConfig) -> None:
    """Old names, which veRL's ``main_ppo`` accepts and ignores."""
    for key, value in _leaves(config, {name.partition(".")[0] for name in LEGACY_KEYS}):
        if value is not None:
            old = next(name for name in LEGACY_KEYS if key == name or key.startswith(name + "."))
            new = LEGACY_KEYS[old] + key.removeprefix(old)
            raise SettingsError(f"{key}={value!r}: veRL ignores this old name; the setting is {new}")


def check_trainer(config: DictConfig) -> None:
    if not config.trainer.use_v1:
        raise SettingsError("trainer.use_v1=False: FAPO runs on veRL's V1 trainer; leave it True")
    mode = config.trainer.v1.trainer_mode
    if mode not in TRAINER_MODES:
        twin = f"fapo_{mode}" if f"fapo_{mode}" in TRAINER_MODES else " or ".join(TRAINER_MODES)
        raise SettingsError(f"trainer.v1.trainer_mode={mode!r} trains without FAPO; set trainer.v1.trainer_mode={twin}")


def check_reward(config: DictConfig) -> None:
    manager = config.reward.reward_manager
    if manager.name not in REWARD_MANAGERS or manager.source != "register":
        raise SettingsError(
            f"reward.reward_manager is {manager.name!r} (source {manager.source!r}), expected "
            f"{' or '.join(map(repr, REWARD_MANAGERS))} (source 'register'); remove the override"
        )
    settings = read_settings(config)
    if manager.name == "fapo_genrm" and settings.genrm.placement != "none":
        raise SettingsError(
            f"fapo.genrm.placement={settings.genrm.placement!r}: who trains a judge has none; set it to none, and "
            "fapo.penalty to 0"
        )
    if config.reward.reward_model.enable:
        raise SettingsError(
            "reward.reward_model.enable=True: veRL would bypass the reward manager; name the judge in fapo.judge.model"
        )
    if (path := config.reward.custom_reward_function.path) is not None:
        raise SettingsError(
            f"reward.custom_reward_function.path={path!r}: FAPO verifies the boxed answer itself; remove the override"
        )


def check_advantages(config: DictConfig) -> None:
    """``neutral`` takes rollouts out of their group, where an advantage is made from the group and nothing else."""
    estimator = config.algorithm.adv_estimator
    if read_settings(config).judge.on_unknown == "neutral" and estimator not in NEUTRAL_ESTIMATORS:
        raise SettingsError(
            f"fapo.judge.on_unknown='neutral' is not defined for algorithm.adv_estimator={estimator!r}, only for "
            f"{' and '.join(NEUTRAL_ESTIMATORS)}; set fapo.judge.on_unknown to keep or penalise"
        )


def joins_cluster(config: DictConfig) -> bool:
    """Whether ``ray.init`` will join a cluster that runs, rather than start its own."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return address != "local" and bool(address or read_ray_address())


def check_cluster(config: DictConfig) -> None:
    """On a cluster, devices are counted already, and each process has a working directory of its own."""
    if not joins_cluster(config):
        return
    for key in CLUSTER_COUNTS:
        if (count := OmegaConf.select(config, key)) is not None:
            raise SettingsError(
                f"{key}={count!r}, but this command joins a Ray cluster, which has counted its own; set {key}=null"
            )
    folders = {
        "trainer.default_local_dir": config.trainer.default_local_dir,
        "fapo.run_dir": read_settings(config).run_dir,
    }
    if path := read_settings(config).memory.path:
        folders["fapo.memory.path"] = path
    if (template := read_settings(config).judge.template) not in BUILT_IN:
        folders["fapo.judge.template"] = template
    for key, path in folders.items():
        if not Path(path).is_absolute():
            raise SettingsError(
                f"{key}={path!r} is relative, but this command joins a Ray cluster, whose processes run in other "
                "folders; name an absolute path that every node sees"
            )


def pool_devices(config: DictConfig) -> dict[str, int]:
    """Devices that each part of a training takes."""
    for key in ("nnodes", "n_gpus_per_node"):
        if not isinstance(config.trainer[key], int) or config.trainer[key] < 1:
            raise SettingsError(f"trainer.{key}={config.trainer[key]!r}: expected a whole number above 0")
    genrm = read_settings(config).genrm
    pools = {"trainer": config.trainer.nnodes * config.trainer.n_gpus_per_node, "GenRM": genrm.num_devices}
    if config.trainer.v1.trainer_mode == "fapo_separate_async":
        rollout = config.actor_rollout_ref.rollout
        pools["rollout"] = rollout.nnodes * rollout.n_gpus_per_node
    return pools


def check_devices(config: DictConfig) -> None:
    """Compare what the pools take with what a Ray started by this command will have."""
    if joins_cluster(config):
        return
    pools = pool_devices(config)
    devices = own_devices(config)
    needed = sum(pools.values())
    if devices is not None and needed > devices:
        shares = " + ".join(f"{name} {count}" for name, count in pools.items())
        raise SettingsError(
            f"{needed} devices are needed ({shares}) but Ray will have {devices:g}; use fewer in "
            "trainer.n_gpus_per_node or fapo.genrm.replicas, or on a CPU set "
            f"ray_kwargs.ray_init.num_gpus={needed}"
        )


def own_devices(config: DictConfig) -> float | None:
    """Devices of a Ray started by this command; None where only Ray can count them."""
    devices = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
    if devices is None and torch.cuda.is_available():
        return torch.cuda.device_count()
    return devices


def check_sizes(config: DictConfig) -> None:
    """What veRL finds out only after the first rollouts, or cuts without a word."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    total = config.trainer.nnodes * config.trainer.n_gpus_per_node
    devices, rest = divmod(total, actor.ulysses_sequence_parallel_size)
    if rest or not devices:
        raise SettingsError(
            f"ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size} does not divide the trainer's "
            f"{total} devices (trainer.nnodes x trainer.n_gpus_per_node); change one of them"
        )
    if actor.strategy.startswith("fsdp") and (actor.ppo_mini_batch_size * rollout.n) % devices:
        raise SettingsError(
            f"actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} times rollout.n={rollout.n} must be divisible by "
            f"the trainer's {devices} data-parallel devices; change one of the three"
        )
    buffer, longest = read_settings(config).overlong.buffer, config.data.max_response_length
    if buffer > longest:
        raise SettingsError(
            f"fapo.overlong.buffer={buffer} is more than data.max_response_length={longest}; lower it, or set it to 0"
        )
    model = config.actor_rollout_ref.model
    own = _read_json(Path(model.path, "config.json"), "actor_rollout_ref.model.path").get("max_position_embeddings")
    override = model.override_config.get("max_position_embeddings", own)
    needed = config.data.max_prompt_length + config.data.max_response_length
    if isinstance(override, int) and needed > override:
        raise SettingsError(
            f"data.max_prompt_length + data.max_response_length = {needed} is more than the policy's context "
            f"(max_position_embeddings={override}), and answers would be cut without a word; lower them"
        )
    if isinstance(own, int) and needed > own:
        raise SettingsError(
            f"actor_rollout_ref.model.override_config.max_position_embeddings={override} does not reach the rollouts' "
            f"engine, which reads {own} in {model.path}/config.json and refuses {needed} tokens; write {override} there"
        )


def check_policy(config: DictConfig) -> None:
    """Check the policy's checkpoint, whose tokenizer and chat template may be elsewhere."""
    model = config.actor_rollout_ref.model
    parts = {"weights": model.path, "tokenizer": model.tokenizer_path or model.path}
    for part, path in parts.items():
        key = "actor_rollout_ref.model." + ("path" if path == model.path else "tokenizer_path")
        check_model(path, key, parts=(part,))
    if not model.custom_chat_template:
        check_model(parts["tokenizer"], key, parts=("chat template",))


def check_model(path: str, key: str, *, parts: tuple[str, ...] = ("weights", "tokenizer", "chat template")) -> None:
    """A folder must hold the parts of a checkpoint; a hub name must be reachable.

    Paths are taken as veRL takes them: ``~`` is not expanded.
    """
    if not isinstance(path, str):
        raise ModelError(f"{key}={path!r}: expected the path of a checkpoint")
    if "://" in path:
        return
    if Path(path).is_dir():
        if path.endswith("/"):
            raise ModelError(f"{key}={path!r}: veRL refuses a path that ends with a slash; leave it off")
        _check_model_folder(Path(path), key, parts)
    elif not HUB_NAME.fullmatch(path):
        raise ModelError(f"{key}={path!r}: no such folder; name a checkpoint in Hugging Face format")
    elif constants.HF_HUB_OFFLINE and not isinstance(try_to_load_from_cache(path, "config.json"), str):
        raise ModelError(f"{key}={path!r}: not in the hub cache, and HF_HUB_OFFLINE is set; download it or unset that")


def _check_model_folder(folder: Path, key: str, parts: tuple[str, ...]) -> None:
    for part in parts:
        for what, patterns in MODEL_FILES[part].items():
            if not any(True for pattern in patterns for _ in folder.glob(pattern)):
                raise ModelError(
                    f"{key}={str(folder)!r}: the folder lacks {what}; name a whole Hugging Face checkpoint"
                )
    if "weights" in parts:
        _read_json(folder / "config.json", key)
    template_needed = "chat template" in parts and not (folder / "chat_template.jinja").exists()
    if template_needed and not _read_json(folder / "tokenizer_config.json", key).get("chat_template"):
        raise ModelError(
            f"{key}={str(folder)!r}: the tokenizer has no chat template; put one into {folder}/chat_template.jinja"
        )


def check_template(config: DictConfig) -> None:
    """Read the judge's template, which every reward worker will read again."""
    read_template(read_settings(config).judge.template)


def check_judge(config: DictConfig) -> None:
    """Check the judge's checkpoint, where it is served here.

    A critique of full length must fit its context, or every request would be refused.
    """
    settings = read_settings(config)
    if settings.genrm.placement != "standalone":
        return
    check_model(settings.judge.model, "fapo.judge.model")
    for name, limit in judge_contexts(config, settings).items():
        if settings.judge.max_tokens >= limit:
            raise SettingsError(
                f"fapo.judge.max_tokens={settings.judge.max_tokens} leaves no room for a prompt in the judge's context "
                f"({name}={limit}); lower fapo.judge.max_tokens"
            )


def judge_contexts(config: DictConfig, settings: FAPOSettings) -> dict[str, int]:
    """The limits of the judge's context that are known, by the name of the setting."""
    model_config = _read_json(Path(settings.judge.model, "config.json"), "fapo.judge.model")
    text_config = model_config.get("text_config")
    text_config = text_config if isinstance(text_config, dict) else model_config
    limits = {
        "max_position_embeddings": text_config.get("max_position_embeddings"),
        "reward.reward_model.rollout.max_model_len": config.reward.reward_model.rollout.max_model_len,
    }
    return {name: limit for name, limit in limits.items() if isinstance(limit, int)}


def _read_json(path: Path, key: str) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return content | {}
    except (OSError, ValueError, TypeError, RecursionError) as exc:
        raise ModelError(f"{key}: {path} is no JSON object ({exc}); copy the checkpoint again") from exc


def check_files(config: DictConfig) -> None:
    """Check every data file."""
    for key in DATA_KEYS:
        for path in data_paths(config, key):
            check_data(path, key, config.data)


def data_paths(config: DictConfig, key: str) -> list[str]:
    """The files that ``key`` names."""
    files = OmegaConf.select(config, key)
    paths = list(files) if isinstance(files, ListConfig) else [files]
    if not paths or not all(isinstance(path, str) and path for path in paths):
        raise DataError(f"{key}={paths if paths else '[]'}: expected the path of a file, or a list of paths")
    return paths


def check_data(path: str, key: str, data: DictConfig) -> None:
    """A file must hold ``prompt``, ``data_source`` and ``reward_model.ground_truth``."""
    if "://" in path:
        return
    if not Path(path).expanduser().is_file():
        raise DataError(f"{key}={path!r}: no such file")
    if not path.endswith(".parquet"):
        return
    try:
        metadata = pyarrow.parquet.read_metadata(Path(path).expanduser())
    except (pyarrow.ArrowException, OSError) as exc:
        reason = str(exc).splitlines()[0]
        raise DataError(f"{key}={path!r}: no readable parquet file ({reason})") from exc
    schema = metadata.schema.to_arrow_schema()
    if not metadata.num_rows:
        raise DataError(f"{key}={path!r}: the file has no rows")
    for column in (data.prompt_key, data.reward_fn_key, "reward_model"):
        if column not in schema.names:
            raise DataError(f"{key}={path!r}: no column {column!r}; the file has {', '.join(schema.names)}")
    if not _has_field(schema.field("reward_model").type, "ground_truth"):
        raise DataError(f"{key}={path!r}: column 'reward_model' has no field 'ground_truth', the reference answer")
    kind = schema.field("reward_model").type.field("ground_truth").type
    if not any(is_kind(kind) for is_kind in ANSWER_KINDS):
        raise DataError(f"{key}={path!r}: reward_model.ground_truth is {kind}, expected text or a number")


def _has_field(kind: pyarrow.DataType, name: str) -> bool:
    return pyarrow.types.is_struct(kind) and kind.get_field_index(name) >= 0


def _leaves(config: Any, roots: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in sorted(roots & set(config)) if not prefix else config:
        value = config[name]
        if isinstance(value, DictConfig):
            yield from _leaves(value, roots, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# In the order in which a command makes them, by what they look at; each raises a UsageError.
CHECKS: dict[str, tuple[Callable[[DictConfig], object], ...]] = {
    "settings": (
        check_verl,
        check_recipe,
        check_legacy_keys,
        check_trainer,
        check_reward,
        check_advantages,
        read_settings,
        check_template,
        check_cluster,
        check_devices,
    ),
    "policy": (check_policy, check_sizes),
    "judge": (check_judge,),
    "data": (check_files,),
}

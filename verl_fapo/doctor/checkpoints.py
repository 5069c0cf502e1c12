"""The checkpoints of policy and judge, opened as training will open them, a tensor's data excepted."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open

from verl_fapo.doctor.command import failures
from verl_fapo.doctor.endpoints import ask_endpoints
from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.errors import ModelError, SettingsError
from verl_fapo.settings import read_settings

MARK = "What is 3 + 4?"
PICKLE = b"\x80"
INDEX = "model.safetensors.index.json"


def examine(config_yaml: str, role: str) -> Iterator[Finding]:
    """The checkpoint of ``policy`` or ``judge``; of a judge that is served elsewhere, its servers."""
    config = OmegaConf.create(config_yaml)
    problems = list(failures(role, config, role))
    yield from problems
    try:
        path, tokenizer_path = model_paths(config, role)
    except SettingsError:  # told under 'settings'
        return
    if path is None:
        settings = read_settings(config)
        yield from ask_endpoints(settings.genrm.endpoints, settings.judge)
        return
    if not isinstance(path, str) or not Path(path).is_dir():
        if not problems:
            yield Finding(role, "note", f"{path}: not a folder here, so what is in it was not examined")
        return
    yield from check_weights(Path(path), role)
    if not problems:
        yield from check_tokenizer(config, role, path, tokenizer_path)


def model_paths(config: DictConfig, role: str) -> tuple[str | None, str | None]:
    """Where the weights and the tokenizer are; None for a judge that is served elsewhere."""
    if role == "policy":
        model = config.actor_rollout_ref.model
        return model.path, model.tokenizer_path or model.path
    settings = read_settings(config)
    path = settings.judge.model if settings.genrm.placement == "standalone" else None
    return path, path


def load_tokenizer(config: DictConfig, role: str, path: str) -> Any:
    """The tokenizer, with the chat template that training will use.

    Raises:
        ModelError: it cannot be loaded, or cannot render a message.
    """
    from transformers import AutoTokenizer

    model = config.actor_rollout_ref.model if role == "policy" else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=bool(model.get("trust_remote_code")), local_files_only=True
        )
    except Exception as exc:  # the tokenizers library raises plain Exception at a damaged file
        raise ModelError(f"the tokenizer in {path} cannot be loaded: {reason(exc)}") from exc
    if template := model.get("custom_chat_template"):
        tokenizer.chat_template = template
    try:
        rendered = render(tokenizer, [{"role": "user", "content": MARK}])
    except Exception as exc:  # a template is a program
        raise ModelError(f"the chat template in {path} cannot render a user's message: {reason(exc)}") from exc
    if MARK not in rendered:
        raise ModelError(f"the chat template in {path} loses the user's message")
    return tokenizer


def render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    """A conversation as the text that the model is given."""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def count_tokens(tokenizer: Any, text: str) -> int:
    """Tokens of a rendered text."""
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def check_tokenizer(config: DictConfig, role: str, path: str, tokenizer_path: str) -> Iterator[Finding]:
    """Load model config and tokenizer, and compare their sizes."""
    from transformers import AutoConfig

    again = f"copy the checkpoint again: {path}"
    try:
        model_config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=_trusted(config, role))
    except Exception as exc:  # transformers raises what it likes at a config that is none
        yield Finding(role, "problem", f"{path}/config.json cannot be loaded: {reason(exc)}", again)
        return
    try:
        tokenizer = load_tokenizer(config, role, tokenizer_path)
    except ModelError as exc:
        yield Finding(role, "problem", str(exc), f"copy the tokenizer's files and chat_template.jinja again: {path}")
        return
    vocabulary = getattr(model_config.get_text_config(), "vocab_size", None)
    if vocabulary is not None and len(tokenizer) > vocabulary:
        what = (
            f"the tokenizer in {tokenizer_path} has {len(tokenizer)} tokens, the model {vocabulary}: of another model"
        )
        yield Finding(role, "problem", what, again)
    else:
        yield Finding(role, "ok", f"{model_config.model_type}, {len(tokenizer)} tokens, chat template renders")


def _trusted(config: DictConfig, role: str) -> bool:
    return role == "policy" and bool(config.actor_rollout_ref.model.get("trust_remote_code"))


def check_weights(folder: Path, role: str) -> Iterator[Finding]:
    """Open every file of weights; one that was cut off, or is a Git LFS pointer, does not open."""
    damaged = {}
    tensors: set[str] = set()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(file, framework="numpy") as weights:
                tensors.update(weights.keys())
        except (SafetensorError, OSError) as exc:
            damaged[file.name] = reason(exc)
    for file in () if files else sorted(folder.glob("pytorch_model*.bin")):
        files.append(file)
        try:
            with file.open("rb") as content:
                if content.read(1) != PICKLE:  # as torch wrote before 1.6
                    zipfile.ZipFile(content).close()
        except (zipfile.BadZipFile, OSError) as exc:
            damaged[file.name] = reason(exc)
    way_out = f"copy the checkpoint again (git lfs pull, if that is where it is from): {folder}"
    for name, why in damaged.items():
        yield Finding(role, "problem", f"{folder / name} is damaged: {why}", way_out)
    if missing := missing_tensors(folder, tensors):
        if not damaged:
            yield Finding(role, "problem", f"{folder / INDEX} names {missing}", way_out)
    elif files and not damaged:
        size = sum(file.stat().st_size for file in files) / 1e9
        yield Finding(role, "ok", f"{folder}: weights whole, {size:.2f} GB")


def missing_tensors(folder: Path, tensors: set[str]) -> str | None:
    """What the index of the files of weights names that is not there."""
    index = folder / INDEX
    if not index.exists() or (folder / "model.safetensors").exists():  # which transformers prefers
        return None
    try:
        weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, LookupError, TypeError) as exc:
        return f"nothing that can be read ({reason(exc)})"
    if absent := sorted({name for name in weight_map.values() if not (folder / str(name)).exists()}):
        return f"{', '.join(map(str, absent))}, absent"
    if absent := sorted(set(weight_map) - tensors):
        return f"{len(absent)} tensors that are in no file, such as {absent[0]}"
    return None

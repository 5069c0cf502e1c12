"""The data files: their first rows read, rendered and measured as policy and judge will see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from omegaconf import DictConfig, OmegaConf

from verl_fapo.checks import DATA_KEYS, check_data, data_paths, judge_contexts
from verl_fapo.data import problem_text
from verl_fapo.doctor.checkpoints import count_tokens, load_tokenizer, model_paths, render
from verl_fapo.doctor.command import attempt
from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.errors import DataError, ModelError, SettingsError
from verl_fapo.settings import read_settings
from verl_fapo.templates import read_template

SAMPLE = 256
_NO_ANSWER = re.compile(r"\s*(?:####|(?:the |final )*answer\b\s*(?:is|[:=]))", re.IGNORECASE)


def examine(config_yaml: str) -> Iterator[Finding]:
    """Every file by itself, and then whether the longest problem fits the judge."""
    config = OmegaConf.create(config_yaml)
    tokenizer = _tokenizer(config, "policy")
    rows: list[dict[str, Any]] = []
    for key in DATA_KEYS:
        if finding := attempt(lambda key=key: data_paths(config, key), "data"):
            yield finding
            continue
        for path in data_paths(config, key):
            finding = attempt(lambda path=path, key=key: check_data(path, key, config.data), "data")
            if finding or not path.endswith(".parquet") or "://" in path:
                yield finding or Finding("data", "note", f"{path}: only local parquet files are examined")
                continue
            try:
                sample = read_sample(Path(path).expanduser(), prompt_key=config.data.prompt_key)
            except DataError as exc:
                yield Finding("data", "problem", f"{key}: {exc}", "write the file again, e.g. with verl-fapo prepare")
                continue
            rows += sample
            yield _prompts(sample, path, config, tokenizer)
    if rows:
        yield from _judge_context(rows, config)


def read_sample(path: Path, *, prompt_key: str, size: int = SAMPLE) -> list[dict[str, Any]]:
    """The first rows.

    Raises:
        DataError: they cannot be read, or one is no problem with an answer; with its number, from 0.
    """
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=size)
            rows = list(islice((row for batch in batches for row in batch.to_pylist()), size))
    except (pyarrow.ArrowException, OSError) as exc:
        raise DataError(f"{path}: the rows cannot be read ({reason(exc)})") from exc
    for number, row in enumerate(rows):
        if complaint := _complaint(row, prompt_key):
            raise DataError(f"{path}: row {number}: {complaint}")
    return rows


def _complaint(row: Mapping[str, Any], prompt_key: str) -> str | None:
    messages = row[prompt_key]
    if not isinstance(messages, list) or not messages:
        return f"{prompt_key} is {str(messages)[:60]!r}, expected a list of messages"
    for message in messages:
        if not isinstance(message, Mapping) or not message.get("role") or message.get("content") is None:
            return f"{prompt_key} holds {str(message)[:60]!r}, expected role and content"
    truth = (row["reward_model"] or {}).get("ground_truth")
    if not isinstance(truth, str | int | float) or truth != truth or truth == "":
        return f"reward_model.ground_truth is {truth!r}, expected text or a number"
    if isinstance(truth, str) and not (re.search(r"[^\W_]|\\", truth) and not _NO_ANSWER.match(truth)):
        return f"reward_model.ground_truth is {truth[:60]!r}, which no boxed answer equals; expected the bare answer"
    return None


def _tokenizer(config: DictConfig, role: str) -> Any:
    """None where it cannot be loaded, which is told elsewhere, or is not here."""
    try:
        _, path = model_paths(config, role)
        return load_tokenizer(config, role, path) if isinstance(path, str) else None
    except (ModelError, SettingsError):
        return None


def _prompts(rows: list[dict[str, Any]], path: str, config: DictConfig, tokenizer: Any) -> Finding:
    what = f"{path}: the first {len(rows)} rows are problems with answers"
    if tokenizer is None:
        return Finding("data", "ok", what)
    options = OmegaConf.to_container(config.data.get("apply_chat_template_kwargs") or OmegaConf.create())
    lengths = []
    for number, row in enumerate(rows):
        try:
            lengths.append(count_tokens(tokenizer, render(tokenizer, row[config.data.prompt_key], **options)))
        except Exception as exc:  # a template is a program
            what = f"{path}: row {number}: the policy's chat template cannot render the prompt: {reason(exc)}"
            return Finding("data", "problem", what, "change the roles in the prompt, or the chat template")
    what += f"; prompts of {min(lengths)} to {max(lengths)} tokens"
    limit = config.data.max_prompt_length
    long = sum(length > limit for length in lengths)
    if not long:
        return Finding("data", "ok", what)
    what += f", {long} of them longer than data.max_prompt_length={limit}"
    if not config.data.filter_overlong_prompts:
        way_out = f"data.max_prompt_length={max(lengths)}, or data.filter_overlong_prompts=True"
        return Finding("data", "problem", f"{what}: veRL cuts off their beginning", way_out)
    if long == len(rows):
        return Finding("data", "problem", f"{what}: none would be left", f"data.max_prompt_length={max(lengths)}")
    return Finding("data", "note", f"{what}: veRL leaves them out")


def _judge_context(rows: list[dict[str, Any]], config: DictConfig) -> Iterator[Finding]:
    """Prompt, a solution of full length and a critique of full length must fit the judge together."""
    tokenizer = _tokenizer(config, "judge")
    if tokenizer is None:
        return
    settings = read_settings(config)
    contexts = judge_contexts(config, settings)
    if not contexts:
        return
    name = min(contexts, key=contexts.get)
    prompt = max(count_tokens(tokenizer, _judge_text(row, config, tokenizer)) for row in rows)
    solution, critique = config.data.max_response_length, settings.judge.max_tokens
    needed = prompt + solution + critique
    what = (
        f"the judge's context: prompt {prompt} + solution {solution} + critique {critique} = {needed} tokens, "
        f"of {contexts[name]} ({name})"
    )
    if needed <= contexts[name]:
        yield Finding("judge", "ok", what)
    elif (left := contexts[name] - prompt - solution) > 0:
        way_out = f"fapo.judge.max_tokens={left}, or a lower data.max_response_length"
        yield Finding("judge", "problem", f"{what}; longer requests would be refused", way_out)
    else:
        yield Finding("judge", "problem", f"{what}; no room for a critique", "lower data.max_response_length")


def _judge_text(row: Mapping[str, Any], config: DictConfig, tokenizer: Any) -> str:
    problem = problem_text({**row, "raw_prompt": row[config.data.prompt_key]})
    reference = str(row["reward_model"]["ground_truth"])
    content = read_template(read_settings(config).judge.template).render(problem, reference, [""])
    return render(tokenizer, [{"role": "user", "content": content}])

"""Rows of problems, as veRL and the manager ``fapo`` read them, and where they come from.

A row::

    {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "..."}], "ability": "math",
     "reward_model": {"style": "rule", "ground_truth": "72"},
     "extra_info": {"split": "train", "index": 0, "question": "Natalia sold clips to 48 of her friends ..."}}
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from verl_fapo.errors import DataError

INSTRUCTION = "Reason step by step, one step a paragraph, and put the final answer in \\boxed{}."


def problem_row(
    question: str,
    ground_truth: str,
    *,
    data_source: str,
    split: str,
    index: int,
    examples: Iterable[tuple[str, str]] = (),
) -> dict[str, Any]:
    """One row. ``examples`` are questions and solutions shown to the policy before its own, and not to the judge."""
    messages = []
    for example, solution in examples:
        messages += [_message("user", _task(example)), _message("assistant", solution)]
    return {
        "data_source": data_source,
        "prompt": [*messages, _message("user", _task(question))],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "question": question},
    }


def gsm8k_rows(path: Path, *, split: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of GSM8K (arXiv:2110.14168), in the form of openai/grade-school-math.

    A line there: ``{"question": "Natalia sold ...", "answer": "... <<48/2=24>>24 clips in May. ...\\n#### 72"}``.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for index, line in enumerate(islice(filter(str.strip, file), limit)):
                yield _gsm8k_row(line, split=split, index=index)
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError) as exc:
        raise DataError(f"{path} is no GSM8K file: line with 'question' and 'answer' expected ({exc!r})") from exc


def _gsm8k_row(line: str, *, split: str, index: int) -> dict[str, Any]:
    item = json.loads(line)
    question, (_, mark, answer) = item["question"], str(item["answer"]).rpartition("####")
    answer = answer.strip().replace(",", "")
    if not isinstance(question, str) or not question or not mark or not answer:
        raise ValueError(f"line {index + 1} has no question, or no answer after ####")
    return problem_row(question, answer, data_source="gsm8k", split=split, index=index)


def critic_row(
    prompt: str, true_index: int, *, num_paragraphs: int, data_source: str, split: str, index: int
) -> dict[str, Any]:
    """One row for the manager ``fapo_genrm``: what a judge is asked, and the first wrong paragraph, -1 for none."""
    return {
        "data_source": data_source,
        "prompt": [_message("user", prompt)],
        "ability": "math_critic",
        "reward_model": {"style": "rule", "ground_truth": true_index},
        "extra_info": {"split": split, "index": index, "total_steps": num_paragraphs},
    }


def fapo_critic_rows(path: Path, *, split: str, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """Rows of FAPO-Critic (arXiv:2510.22543), JSON lines or parquet, for the manager ``fapo_genrm``.

    Each is made anew: only what is known of it is kept, and its label must be an index of its paragraphs, or -1.
    """
    try:
        for index, row in enumerate(islice(_rows(path), limit)):
            yield _fapo_critic_row(row, split=split, index=index)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, pyarrow.ArrowException) as exc:
        raise DataError(
            f"{path} is no FAPO-Critic file: rows with 'prompt', 'reward_model' and 'extra_info' expected ({exc!r})"
        ) from exc


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(256):
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, filter(str.strip, file))


def _fapo_critic_row(row: Mapping[str, Any], *, split: str, index: int) -> dict[str, Any]:
    prompt, label, total = (
        row["prompt"][-1]["content"],
        row["reward_model"]["ground_truth"],
        row["extra_info"]["total_steps"],
    )
    if not isinstance(prompt, str) or not prompt or len(row["prompt"]) > 1:
        raise ValueError(f"row {index + 1} has no prompt of one message")
    if type(label) is not int or type(total) is not int or not -1 <= label < total or total < 1:
        raise ValueError(f"row {index + 1}: ground_truth {label!r} is no index of its {total!r} paragraphs")
    return critic_row(prompt, label, num_paragraphs=total, data_source="fapo_critic", split=split, index=index)


def word_problem_rows(num: int, *, seed: int, split: str, num_examples: int = 2) -> Iterator[dict[str, Any]]:
    """Rows of short word problems from reasoning-gym's ``aiw`` ("Alice has 3 brothers and she also has 2 sisters. How
    many sisters does Alice's brother have?"), whose small answers are often right for wrong reasons.
    """
    examples = [(question, _counted(answer)) for question, answer in islice(_siblings(seed=0), num_examples)]
    for index, (question, answer) in enumerate(islice(_siblings(seed=seed), num)):
        yield problem_row(question, answer, data_source="aiw", split=split, index=index, examples=examples)


def _siblings(*, seed: int) -> Iterator[tuple[str, str]]:
    import reasoning_gym

    problems = reasoning_gym.create_dataset("aiw", size=10_000, seed=seed, task_type_weights=[1, 0, 0])
    return ((item["question"], item["answer"]) for item in map(problems.__getitem__, range(len(problems))))


def _counted(answer: str) -> str:
    return f"I count everybody that is asked for once.\n\nThat makes {answer}.\n\n\\boxed{{{answer}}}"


SOURCES = {"gsm8k": gsm8k_rows, "fapo_critic": fapo_critic_rows}


def write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """Write rows, whole or not at all; returns how many."""
    try:
        table = pyarrow.Table.from_pylist(list(rows))
    except (pyarrow.ArrowException, OverflowError, UnicodeError) as exc:
        raise DataError(f"{path}: parquet can not hold a value of these rows ({exc})") from exc
    if not len(table):
        raise DataError(f"no rows for {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    try:
        pyarrow.parquet.write_table(table, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return len(table)


def problem_text(row: Mapping[str, Any]) -> str:
    """The task as the judge sees it: ``extra_info.question``, or else the last message to the policy."""
    extra_info = row.get("extra_info")
    question = extra_info.get("question") if isinstance(extra_info, Mapping) else None
    if isinstance(question, str) and question:
        return question
    return str(list(row["raw_prompt"])[-1]["content"])


def _task(question: str) -> str:
    return f"{question}\n\n{INSTRUCTION}"


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}

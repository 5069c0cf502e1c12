"""How a rollout came to its reward, out of the run folder: the command ``verl-fapo explain``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from verl_fapo.critique import split_paragraphs
from verl_fapo.critique_view import harmless, marked
from verl_fapo.errors import DataError
from verl_fapo.run_folder import CONFIG, RunFolder

OF_EACH_KIND = 3
"""Rollouts that :func:`telling` lists."""

NAME_CHARS = 8
"""Of a uid in a list."""

NO_DIFFERENCE = 1e-9

Record = Mapping[str, Any]
"""A line of ``critiques.jsonl``, or of ``rollouts.jsonl``, which has no texts."""


def explain(root: Path, wanted: str, *, as_json: bool = False) -> Iterator[str]:
    """Lines about one rollout.

    Args:
        root: the run folder.
        wanted: ``uid_session``, or the beginning of the uid, with ``_session`` where that alone does not tell.
        as_json: one JSON object instead.

    Raises:
        DataError: ``root`` is no run folder, ``wanted`` is none or not one of its rollouts, or a file is damaged.
    """
    run = RunFolder.of_a_run(root)
    with run.damage_named():
        record = find(run, wanted)
        if record["judged"]:
            record = next((judged for judged in run.judged() if judged["id"] == record["id"]), record)
        record = {**record, "advantage": run.advantages().get(record["id"])}
        settings = _settings(run)
        paragraphs = _paragraphs(record, settings)
        if as_json:
            yield json.dumps({**record, "paragraphs": paragraphs})
        else:
            yield from show(record, paragraphs)


def telling(root: Path, *, as_json: bool = False) -> Iterator[str]:
    """The latest rollouts of each kind, a line each.

    Raises:
        DataError: ``root`` is no run folder, nothing is scored yet, or a file is damaged.
    """
    run = RunFolder.of_a_run(root)
    with run.damage_named():
        rows = latest_of_each_kind(run.scored())
        if not rows:
            raise DataError(f"{root}: no rollout is scored yet")
        advantages = run.advantages()
        rows = [{**row, "advantage": advantages.get(row["id"])} for row in rows]
        yield from map(json.dumps, rows) if as_json else _table(rows)
        if not as_json:
            yield "verl-fapo explain RUN ROLLOUT shows one of these, or any other of the run"


def find(run: RunFolder, wanted: str) -> Record:
    """The rollout that ``wanted`` names.

    Raises:
        DataError: it names none, or several.
    """
    found = {record["id"]: record for record in run.scored() if _is_wanted(record["id"], wanted)}
    if wanted in found or len(found) == 1:
        return found[wanted if wanted in found else next(iter(found))]
    if not found:
        raise DataError(f"{run.root} has no rollout {wanted!r}; verl-fapo explain {run.root} lists some")
    names = harmless(", ".join([*found][:4]) + (", ..." if len(found) > 4 else ""))
    raise DataError(f"{wanted!r} is the beginning of {len(found)} rollouts, expected one: {names}")


def _is_wanted(name: str, wanted: str) -> bool:
    uid, _, session = name.rpartition("_")
    beginning, _, wanted_session = wanted.rpartition("_")
    return name.startswith(wanted) or (bool(beginning) and uid.startswith(beginning) and session == wanted_session)


def latest_of_each_kind(records: Iterable[Record]) -> list[Record]:
    """By kind, then the latest first."""
    latest: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        kind = _kind(record)
        latest[kind] = nlargest(OF_EACH_KIND, [*latest[kind], record], key=itemgetter("time"))
    return [record for kind in sorted(latest) for record in latest[kind]]


def describe(record: Record) -> str:
    """What became of a rollout: ``right, flawed at 2``."""
    said = {"flawed": f"flawed at {record['index']}", "unknown": f"unknown ({record['reason']})"}
    verdict = said.get(record["verdict"], record["verdict"])
    if _of_judge_in_training(record):
        told = {"-1": "the solution is clean"}.get(record["ground_truth"], f"flawed at {record['ground_truth']}")
        return f"{'right' if record['correct'] else 'wrong'}: {verdict}, and {told}"
    if not record["judged"]:
        return "right, not judged" if record["correct"] else "wrong"
    return f"right, {verdict}"


def _kind(record: Record) -> str:
    kind = record["reason"] or record["verdict"] or ""
    return f"{record['validation']:d} {record['correct']:d} {kind}"


def _of_judge_in_training(record: Record) -> bool:
    return record["method"] == "verdict"


def _table(rows: Sequence[Record]) -> Iterator[str]:
    names = [harmless(_short(row["id"])) for row in rows]
    width = max(map(len, names))
    yield f"{'rollout':{width}}  {'step':>5}  {'reward':>7}  {'advantage':>9}"
    for name, row in zip(names, rows, strict=True):
        advantage = "-" if row["advantage"] is None else f"{row['advantage']:.3f}"
        where = "validation: " if row["validation"] else ""
        yield f"{name:{width}}  {row['step']:>5}  {row['reward']:>7.3f}  {advantage:>9}  {where}{describe(row)}"


def _short(name: str) -> str:
    uid, _, session = name.rpartition("_")
    return f"{uid[:NAME_CHARS]}_{session}"


def show(record: Record, paragraphs: Sequence[str] | None) -> Iterator[str]:
    """The lines that the command prints of one rollout."""
    where = "validation" if record["validation"] else "training"
    yield f"rollout    {harmless(record['id'])}, {where}, step {record['step']}"
    if paragraphs is None:
        yield "texts      none: the run folder keeps those of judged rollouts; trainer.rollout_data_dir keeps all"
    else:
        yield from _texts(record, paragraphs)
    yield f"answer     {_answer(record)}"
    yield f"verdict    {_verdict(record)}"
    yield f"reward     {_reward(record)}"
    yield f"advantage  {_advantage(record)}"


def _texts(record: Record, paragraphs: Sequence[str]) -> Iterator[str]:
    if record["problem"] is not None:
        yield "problem"
        yield from _indented(record["problem"])
    yield "solution"
    yield from marked(paragraphs, record["index"])
    yield "critique"
    yield from _indented(record["critique"])


def _indented(text: str) -> Iterator[str]:
    return (f"   {line}" for line in harmless(text).split("\n"))


def _answer(record: Record) -> str:
    answer = "none" if record["answer"] is None else harmless(record["answer"]).replace("\n", " ")
    truth = harmless(str(record["ground_truth"])).replace("\n", " ")
    return f"{answer}, expected {truth}: {'right' if record['correct'] else 'wrong'} (by {record['method']})"


def _verdict(record: Record) -> str:
    if not record["judged"]:
        return "none: only right answers are judged" if not record["correct"] else "none: not judged"
    if _of_judge_in_training(record):
        return describe(record)
    source = "from memory" if record["from_memory"] else f"after {record['judge_seconds']:g} s"
    return f"{describe(record).removeprefix('right, ')}, {source}"


def _reward(record: Record) -> str:
    reward, length, rule = record["reward"], record["reward_for_length"], 1 if record["correct"] else -1
    cause = "the distance" if _of_judge_in_training(record) else record["verdict"]
    parts = {cause: reward - length - rule, "its length": length}
    told = [f"{part:+g} for {name}" for name, part in parts.items() if abs(part) > NO_DIFFERENCE]
    answer = f"{rule:+d} as it is {'right' if record['correct'] else 'wrong'}"
    return ", ".join([f"{reward:g}: {answer}", *told]) if told else f"{reward:g}"


def _advantage(record: Record) -> str:
    if record["advantage"] is not None:
        return f"{record['advantage']:.4f}"
    return "none: validation" if record["validation"] else "none: no step was trained on it, or not yet"


def _settings(run: RunFolder) -> Mapping[str, Any]:
    """The ``fapo`` block of the run's config."""
    try:
        config = yaml.safe_load((run.root / CONFIG).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return {}
    block = config.get("fapo") if isinstance(config, dict) else None
    return block if isinstance(block, dict) else {}


def _paragraphs(record: Record, settings: Mapping[str, Any]) -> list[str] | None:
    """As they were judged; None where the folder has no solution."""
    if "solution" not in record:
        return None
    scope = "whole" if _of_judge_in_training(record) else (settings.get("judge") or {}).get("scope", "whole")
    return split_paragraphs(record["solution"], scope=scope)

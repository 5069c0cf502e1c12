"""The folder that a run writes itself into, readable at any moment and after any end.

config.yaml      the composed config
started_at.txt   when the command was started, in seconds since the epoch
metrics.jsonl    a line a training step, and one for the validation before the first
advantages.jsonl a line a training step: the mean advantage of each of its rollouts, by id
parts/*.jsonl    a line a scored rollout, a file per reward worker; merged at the end into
rollouts.jsonl   a line a scored rollout, without its texts, and
critiques.jsonl  a line a judged rollout, with them
failure.txt      why the run was stopped, where it was
summary.json     the counts of the whole run
verdicts.sqlite  what the judge said, which later runs in the folder need not ask again; stays where it is
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import IO, Any

from verl_fapo.errors import DataError

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
STARTED_AT = "started_at.txt"
METRICS = "metrics.jsonl"
ADVANTAGES = "advantages.jsonl"
PARTS = "parts"
MERGING = "parts.merging"
LOCK = "lock"
ROLLOUTS = "rollouts.jsonl"
CRITIQUES = "critiques.jsonl"
FAILURE = "failure.txt"
SUMMARY = "summary.json"
VERDICTS = "verdicts.sqlite"

FILES = (CONFIG, STARTED_AT, METRICS, ADVANTAGES, PARTS, MERGING, ROLLOUTS, CRITIQUES, FAILURE, SUMMARY)
TEXTS = ("problem", "solution", "critique")


class RolloutLog:
    """One reward worker's part of the record: a line a scored rollout."""

    def __init__(self, root: Path) -> None:
        self._path = root / PARTS / f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
        self._lock = Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one rollout, whose ``id`` is ``uid_session``; safe in threads."""
        line = _dump({**record, "time": time.time()})
        with self._lock:
            _append(self._path, line)


class RunFolder:
    """Reads and writes the folder of one run."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()

    @classmethod
    def of_a_run(cls, root: Path) -> RunFolder:
        """The folder that a run wrote itself into.

        Raises:
            DataError: ``root`` is none.
        """
        run = cls(root)
        if not (run.root / STARTED_AT).exists():
            raise DataError(f"{root} is no run folder (no {STARTED_AT} in it); name the folder that fapo.run_dir named")
        return run

    @contextlib.contextmanager
    def damage_named(self) -> Iterator[None]:
        """Turn what a record of another shape leads to into a line.

        Raises:
            DataError: in place of the errors that such a record causes.
        """
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as exc:
            raise DataError(f"{self.root}: a file of the run is damaged ({exc!r})") from exc

    def open(self, config_yaml: str, *, started_at: float, resumed: bool) -> None:
        """Make the folder ready, for a run that goes on where an earlier one stopped or for a fresh one."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not resumed:
            self.set_aside()
        for name in (SUMMARY, FAILURE):
            (self.root / name).unlink(missing_ok=True)
        _replace(self.root / STARTED_AT, [str(started_at)])
        _replace(self.root / CONFIG, [config_yaml.rstrip("\n")])

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder; it is given back with the process too.

        Raises:
            DataError: another process holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                raise DataError(
                    f"another run writes to {self.root}; wait for it, or name another fapo.run_dir"
                ) from exc
            except OSError:  # a file system without locks
                logger.warning("%s can not be locked: no other run may write to it", self.root)
            yield

    def set_aside(self) -> None:
        """Move what an earlier run left to ``earlier-N``; what is not a run's stays."""
        left = [self.root / name for name in FILES if (self.root / name).exists()]
        if left and not (self.root / STARTED_AT).exists():
            raise DataError(f"{left[0]} is there but is not of a run; name another folder in fapo.run_dir")
        if left:
            numbers = [int(path.name[8:]) for path in self.root.glob("earlier-*") if path.name[8:].isdigit()]
            earlier = self.root / f"earlier-{max(numbers, default=0) + 1}"
            earlier.mkdir()
            for path in left:
                path.rename(earlier / path.name)

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append the metrics of a step; what is no number is left out."""
        numbers = {key: number for key, value in metrics.items() if (number := _number(value)) is not None}
        _append(self.root / METRICS, _dump({"step": step, **numbers}))

    def log_advantages(self, step: int, advantages: Mapping[str, float]) -> None:
        """Append the advantages of a step's rollouts, by id."""
        finite = {key: number for key, value in advantages.items() if (number := _number(value)) is not None}
        _append(self.root / ADVANTAGES, _dump({"step": step, "advantages": finite}))

    def advantages(self) -> dict[str, float]:
        """The advantage of each rollout that was trained on, by id; of one trained on again, the last."""
        return {
            key: advantage
            for line in _read(self.root / ADVANTAGES, key="advantages")
            for key, advantage in line["advantages"].items()
        }

    def fail(self, cause: str) -> None:
        """Note why the run ends."""
        (self.root / FAILURE).write_text(cause + "\n", encoding="utf-8")

    @property
    def failure(self) -> str | None:
        """What :meth:`fail` noted."""
        path = self.root / FAILURE
        return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None

    def last_change(self) -> float:
        """Time of the latest step or scored rollout, in seconds since the epoch; 0 before the first."""
        paths = [self.root / METRICS, *(self.root / PARTS).glob("*.jsonl")]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    def metrics(self) -> list[dict[str, Any]]:
        """The logged steps. Of a step that was logged again, after a resume, each metric's last value counts."""
        steps: dict[int, dict[str, Any]] = {}
        for line in _read(self.root / METRICS, key="step"):
            steps.setdefault(line["step"], {}).update(line)
        return list(steps.values())

    def scored(self) -> Iterator[dict[str, Any]]:
        """All scored rollouts, merged or not, each once, without their texts."""
        for record in self._latest(ROLLOUTS):
            yield {key: value for key, value in record.items() if key not in TEXTS}

    def judged(self) -> Iterator[dict[str, Any]]:
        """All judged rollouts, merged or not, each once, with their texts."""
        return (record for record in self._latest(CRITIQUES) if record["judged"])

    def summarise(self, *, status: str, ended_at: float) -> dict[str, Any]:
        """What :meth:`finish` would write."""
        started_at = float((self.root / STARTED_AT).read_text())
        return {
            "status": status,
            "failure": self.failure,
            **count(self.metrics(), self.scored(), started_at=started_at, ended_at=max(started_at, ended_at)),
        }

    def finish(self, *, status: str, ended_at: float) -> None:
        """Merge the parts and write ``summary.json``; for a run that has ended. May be called again.

        Args:
            status: ``completed``, ``failed``, ``interrupted`` or ``killed``.
            ended_at: in seconds since the epoch.
        """
        self._merge()
        _replace(self.root / SUMMARY, [json.dumps(self.summarise(status=status, ended_at=ended_at), indent=2)])

    @property
    def summary(self) -> dict[str, Any] | None:
        """What :meth:`finish` wrote; None before."""
        path = self.root / SUMMARY
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def _parts(self) -> Iterator[dict[str, Any]]:
        for folder in (MERGING, PARTS):
            for path in sorted((self.root / folder).glob("*.jsonl")):
                yield from _read(path, key="id")

    def _latest(self, merged: str) -> Iterator[dict[str, Any]]:
        """Records of a merged file and of the parts; of an id that was scored again, after a resume, the last one."""
        times: dict[str, float] = {}
        for record in self._parts():
            times[record["id"]] = max(record["time"], times.get(record["id"], 0.0))
        yield from (record for record in _read(self.root / merged, key="id") if record["id"] not in times)
        for record in self._parts():
            if times.get(record["id"]) == record["time"]:
                del times[record["id"]]
                yield record

    def _merge(self) -> None:
        # Each file is replaced whole and the parts go last, so that a merge cut off anywhere can be done again. They
        # are put aside first, so that a worker that still writes begins a new one; what it was writing into counts too.
        (self.root / MERGING).mkdir(exist_ok=True)
        for path in (self.root / PARTS).glob("*.jsonl"):
            path.rename(self.root / MERGING / f"{uuid.uuid4().hex[:8]}-{path.name}")
        for path in (self.root / MERGING).iterdir():
            with path.open("ab") as file:  # who has it open writes its line now, or finds out that it was put aside
                _hold(file)
        sizes = None
        while sizes != (sizes := [path.stat().st_size for path in sorted((self.root / MERGING).iterdir())]):
            _replace(self.root / CRITIQUES, map(_dump, self.judged()))
            _replace(self.root / ROLLOUTS, map(_dump, self.scored()))
        shutil.rmtree(self.root / MERGING)
        with contextlib.suppress(OSError):  # not there, or not empty
            (self.root / PARTS).rmdir()


def count(
    metrics: list[dict[str, Any]], scored: Iterable[dict[str, Any]], *, started_at: float, ended_at: float
) -> dict[str, Any]:
    """Counts over the lines of ``metrics.jsonl`` and ``rollouts.jsonl``.

    All that was scored counts, also in steps that a resumed run did again. The accuracies are those of the first and
    of the last validation; the other counts, but for ``validation_rollouts``, are of the training rollouts alone.
    """
    counts = Counter(rollouts=0, correct=0, judged=0, flawed=0, unknown=0)
    validations: dict[int, list[bool]] = {}
    first_time = math.inf
    for rollout in scored:
        first_time = min(first_time, rollout["time"])
        if rollout["validation"]:
            validations.setdefault(rollout["step"], []).append(rollout["correct"])
            continue
        counts["rollouts"] += 1
        counts["correct"] += rollout["correct"]
        counts["judged"] += rollout["judged"]
        counts["flawed"] += rollout["verdict"] == "flawed"
        counts["unknown"] += rollout["verdict"] == "unknown"
    accuracies = [sum(validations[step]) / len(validations[step]) for step in sorted(validations)]
    return {
        "steps": sum(map(is_trained, metrics)),
        **counts,
        "validation_rollouts": sum(map(len, validations.values())),
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if len(accuracies) > 1 else None,
        "seconds_total": round(ended_at - started_at, 1),
        "seconds_to_first_rollout": round(first_time - started_at, 1) if math.isfinite(first_time) else None,
    }


def is_trained(line: Mapping[str, Any]) -> bool:
    """Whether a line of ``metrics.jsonl`` is of a training step, and not of the validation before one."""
    return "training/global_step" in line


def _append(path: Path, line: str) -> None:
    """Add a line, which is never glued to one that a crash or a full disk cut off, to the file that is there now."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("ab+") as file:
                _hold(file)
                if not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    continue
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read(1) == b"\n" else "\n" + line
                file.write(line.encode() + b"\n")
                return
        except FileNotFoundError:  # put aside by a merge since the line before
            continue


def _hold(file: IO[bytes]) -> None:
    """Wait until nobody else writes to an open file, and keep others out until it is closed."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(file, fcntl.LOCK_EX)


def _read(path: Path, *, key: str) -> Iterator[dict[str, Any]]:
    """Records of a JSON-lines file that have ``key``; none if it is not there.

    Lines that a crash or a full disk cut off are left out.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict) and key in record:
                    yield record


def _replace(path: Path, lines: Iterable[str]) -> None:
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
        temporary.replace(path)
    finally:  # what was written until the disk was full would take room
        temporary.unlink(missing_ok=True)


def _dump(record: Mapping[str, Any]) -> str:
    # ensure_ascii: model text may hold lone surrogates, which UTF-8 can not.
    return json.dumps(record, ensure_ascii=True, allow_nan=False)


def _number(value: Any) -> float | int | None:
    """A finite Python number of a metric's value, numpy's and torch's scalars included."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except (ValueError, RuntimeError):
        return None
    if isinstance(number, (bool, int)):
        return int(number)
    return number if isinstance(number, float) and math.isfinite(number) else None

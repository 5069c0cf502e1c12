"""What the judge said once is not asked again: verdicts and critiques, in one SQLite file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from verl_fapo.critique import UnknownReason, Verdict

T = TypeVar("T")

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the table and of what its values hold; a file of another one is left alone."""

BUSY_SECONDS = 3.0
"""Longest wait for a lock, of this process's other threads or of other processes."""

PAUSE_SECONDS = 5.0
"""After a failure that took long, every call is a miss at once for this time."""

CHECKPOINT_SUFFIXES = frozenset((".safetensors", ".bin", ".json", ".jinja", ".model"))
SMALL_FILE_BYTES = 2**20
"""A smaller file of a checkpoint is known by its content, others by their time and parts of it."""

NUM_PARTS, PART_BYTES = 16, 4096


def memory_key(prompt: str, *, checkpoint: str, sampling: Mapping[str, float | int]) -> str:
    """SHA-256 of all that determines a judgement, in hex.

    Args:
        prompt: as rendered, with problem, reference, solution and the template's words.
        checkpoint: name of the judge's weights, such as their :func:`checkpoint_fingerprint`.
        sampling: temperature, top_p, max_tokens, samples.
    """
    return hashlib.sha256(_dump([prompt, checkpoint, dict(sampling)])).hexdigest()


def checkpoint_fingerprint(folder: Path) -> str:
    """SHA-256 of names, sizes, times and parts of a checkpoint's files, in hex; of small files of all their content.

    The folder's own name has no part in it.

    Raises:
        OSError: a file can not be read, or there is none.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in CHECKPOINT_SUFFIXES)
    traits = [trait for path in files if (trait := _file_trait(path))]
    if not traits:
        raise FileNotFoundError(f"no {', '.join(sorted(CHECKPOINT_SUFFIXES))} in {folder}")
    return hashlib.sha256(_dump(traits)).hexdigest()


def _file_trait(path: Path) -> tuple[str, int, int | None, str] | None:
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        return None
    small = status.st_size < SMALL_FILE_BYTES
    content = path.read_bytes() if small else _parts(path, status.st_size)
    return path.name, status.st_size, None if small else status.st_mtime_ns, hashlib.sha256(content).hexdigest()


def _parts(path: Path, size: int) -> bytes:
    """Some of a large file, from the first byte to the last: times alone are equal in some archives and images."""
    parts = []
    with path.open("rb") as file:
        for number in range(NUM_PARTS):
            file.seek((size - PART_BYTES) * number // (NUM_PARTS - 1))
            parts.append(file.read(PART_BYTES))
    return b"".join(parts)


class VerdictMemory:
    """Keeps what the judge said; safe in threads, in forks, and in many processes on one file.

    Every call opens the file anew: that takes a tenth of a millisecond, no connection is shared between threads or
    inherited by a fork, and a file that was removed or mended meanwhile is seen. The rollback journal, SQLite's
    default, is also for shared file systems; its write-ahead log is not.

    Whatever is wrong with the file is logged, once for each kind of error, and is a miss; nothing is raised.

    Args:
        path: the file; it and its folder are made where they are missing.
        max_entries: above this, the oldest are dropped.
    """

    def __init__(self, path: Path, *, max_entries: int) -> None:
        self._path = path
        self._max_entries = max_entries
        self._paused_until = 0.0
        self._logged: dict[str, object] = {}
        self._turns: dict[int, Lock] = {}

    def get(self, key: str) -> tuple[Verdict, str] | None:
        """Verdict and critique; None where there are none."""
        row = self._try(lambda db: db.execute("SELECT value FROM verdicts WHERE key = ?", (key,)).fetchone())
        return _unpack(row[0]) if row else None

    def put(self, key: str, verdict: Verdict, critique: str) -> None:
        """Keep a judgement, in place of what the key had."""
        self.put_many({key: (verdict, critique)})

    def put_many(self, judgements: Mapping[str, tuple[Verdict, str]]) -> None:
        """Keep judgements by key; many take hardly longer than one."""
        rows = [(key, _pack(*judgement)) for key, judgement in judgements.items()]
        self._try(lambda db: _write(db, rows, max_entries=self._max_entries))

    def close(self) -> None:
        """Nothing to do: no call leaves the file open."""

    def _try(self, act: Callable[[sqlite3.Connection], T]) -> T | None:
        started = time.monotonic()
        try:
            with self._turn():
                if time.monotonic() < self._paused_until:
                    return None
                with closing(self._connect(max(0.0, started + BUSY_SECONDS - time.monotonic()))) as db:
                    _prepare(db)
                    return act(db)
        except (sqlite3.Error, OSError) as exc:
            if time.monotonic() - started > BUSY_SECONDS / 2:
                self._paused_until = time.monotonic() + PAUSE_SECONDS
            self._log_once(exc)
            return None

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time: SQLite lets those that wait for a lock try at random, and some for ever in vain."""
        turn = self._turns.setdefault(os.getpid(), Lock())  # of a fork another, as nobody would release this one there
        if not turn.acquire(timeout=BUSY_SECONDS):
            raise TimeoutError(f"no turn within {BUSY_SECONDS:g} s")
        try:
            yield
        finally:
            turn.release()

    def _connect(self, busy_seconds: float) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return sqlite3.connect(self._path, timeout=busy_seconds, isolation_level=None)

    def _log_once(self, exc: Exception) -> None:
        kind = getattr(exc, "sqlite_errorname", type(exc).__name__)
        mark = object()
        if self._logged.setdefault(kind, mark) is mark:  # in one step: threads fail together
            logger.warning("verdicts can not be kept in %s, or not all: %s: %s", self._path, kind, exc)


def _prepare(db: sqlite3.Connection) -> None:
    """Make the table where the file is new, and refuse a file that is something else."""
    if _version(db) == VERSION:
        return
    if _is_empty(db):
        db.execute("BEGIN IMMEDIATE")
        if _is_empty(db):
            db.execute("CREATE TABLE verdicts (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB NOT NULL)")
            db.execute(f"PRAGMA user_version = {VERSION}")
        db.execute("COMMIT")
    if (version := _version(db)) != VERSION:
        raise sqlite3.DatabaseError(f"expected verdicts of version {VERSION}, got a database of version {version}")


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]


def _is_empty(db: sqlite3.Connection) -> bool:
    return _version(db) == 0 and db.execute("SELECT 1 FROM sqlite_master").fetchone() is None


def _write(db: sqlite3.Connection, rows: list[tuple[str, bytes]], *, max_entries: int) -> None:
    """Ids have no gaps, since only the oldest are ever deleted: so nothing need be counted."""
    db.execute("BEGIN IMMEDIATE")
    db.executemany(
        "INSERT INTO verdicts (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", rows
    )
    db.execute("DELETE FROM verdicts WHERE id <= (SELECT max(id) FROM verdicts) - ?", (max_entries,))
    db.execute("COMMIT")


def _pack(verdict: Verdict, critique: str) -> bytes:
    return zlib.compress(_dump([verdict.index, verdict.reason, verdict.box, critique]), level=1)


def _unpack(value: Any) -> tuple[Verdict, str] | None:
    """None for what :func:`_pack` did not write."""
    try:
        index, reason, box, critique = json.loads(zlib.decompress(value).decode(errors="surrogatepass"))
        reason = None if reason is None else UnknownReason(reason)
    except (TypeError, ValueError, RecursionError, zlib.error):
        return None
    is_index = type(index) is int and index >= -1
    is_whole = (is_index if reason is None else index is None) and isinstance(box, str | None)
    return (Verdict(index, reason, box), critique) if is_whole and isinstance(critique, str) else None


def _dump(value: Any) -> bytes:
    """Canonical JSON. Escaped, two lone surrogates would be read as the one character that they would make."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode(errors="surrogatepass")

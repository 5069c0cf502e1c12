"""Whether the command can write its run folder; nothing is made or changed there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from verl_fapo.doctor.findings import Finding
from verl_fapo.doctor.machine import GB, LEAST_DISK
from verl_fapo.errors import SettingsError
from verl_fapo.run_folder import FILES, LOCK, STARTED_AT
from verl_fapo.settings import read_settings


def examine(config_yaml: str) -> Iterator[Finding]:
    """The folders of the run and of its checkpoints."""
    config = OmegaConf.create(config_yaml)
    try:
        run = Path(read_settings(config).run_dir).expanduser().absolute()
    except SettingsError:  # told under 'settings'
        return
    yield look(run, "fapo.run_dir")
    checkpoints = Path(config.trainer.default_local_dir).absolute()
    if checkpoints not in run.parents:
        yield look(checkpoints, "trainer.default_local_dir")


def look(folder: Path, key: str) -> Finding:
    """One folder that is written to, or to be made."""
    way_out = f"name another folder in {key}"
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return Finding("run folder", "problem", f"{key}={str(folder)!r}: {existing} is no folder", way_out)
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("run folder", "problem", f"{key}={str(folder)!r}: {existing} cannot be written to", way_out)
    if key == "fapo.run_dir" and (obstacle := _obstacle(folder)):
        return Finding("run folder", "problem", f"{key}={str(folder)!r}: {obstacle}", way_out)
    free = shutil.disk_usage(existing).free
    what = f"{folder}: writable, {free / GB:.1f} GB free"
    if free < LEAST_DISK:
        return Finding("run folder", "problem", what, f"free some of {existing}, or {way_out}")
    return Finding("run folder", "ok", what)


def _obstacle(folder: Path) -> str | None:
    """What a run itself would refuse when it opens the folder."""
    left = [name for name in FILES if (folder / name).exists()]
    if left and not (folder / STARTED_AT).exists():
        return f"{left[0]} is there but is not of a run"
    try:
        with (folder / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another run writes to it"
    except OSError:  # no such file, or a file system without locks
        return None
    return None

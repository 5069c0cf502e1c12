"""Cores, memory, shared memory and disk, as the container allows them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from verl_fapo.doctor.findings import Finding

GB = 1e9
# Measured: the tiny demo takes 5.5 GB, 10 without fork server; with SmolLM2 it peaks near 16.
LEAST_MEMORY, SMOLLM2_MEMORY = 6 * GB, 16 * GB
# On a CPU veRL hands weights over in a bucket of 512 MB a replica; Ray's object store is there as well.
LEAST_SHARED_MEMORY = 1 * GB
LEAST_DISK = 1 * GB
# Ray spills and stores nothing more beyond this.
RAY_DISK_SHARE = 0.95
CGROUPS = Path("/sys/fs/cgroup")


def examine() -> Iterator[Finding]:
    """What every part of a run on this machine shares."""
    yield _cores(len(os.sched_getaffinity(0)))
    memory = psutil.virtual_memory()
    limit, used = cgroup_memory(CGROUPS, Path("/proc/self/cgroup").read_text())
    yield _memory(
        total=min(memory.total, limit), available=min(memory.available, limit - used), limited=limit < memory.total
    )
    yield _shared_memory(Path("/dev/shm"))
    # As Ray chooses it.
    yield _disk(Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"), "Ray's files")
    yield _disk(Path.cwd(), "this folder")


def cgroup_memory(root: Path, membership: str) -> tuple[float, float]:
    """The lowest memory limit of this process's control groups and what is used of it, in bytes.

    Args:
        root: where control groups are mounted.
        membership: content of ``/proc/self/cgroup``.
    """
    lowest = float("inf"), 0.0
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, names = root / path.lstrip("/"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder, names = root / "memory" / path.lstrip("/"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # In a container the path may be the host's, and the limit stands in the root.
        for group in (folder, *folder.parents):
            try:
                limit, used = ((group / name).read_text().strip() for name in names)
            except OSError:
                continue
            if limit.isdigit() and int(limit) < lowest[0]:
                lowest = int(limit), int(used) - _cached(group)
    return lowest


def _cached(group: Path) -> int:
    """Bytes that count as used, and are given up at need: pages of files."""
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return int(statistics.get("total_inactive_file", statistics.get("inactive_file", 0)))


def _cores(num: int) -> Finding:
    return Finding("machine", "ok", f"{num} CPU core{'s' * (num != 1)}")


def _memory(*, total: float, available: float, limited: bool) -> Finding:
    what = f"memory: {available / GB:.1f} of {total / GB:.1f} GB available{' in this control group' * limited}"
    if available < LEAST_MEMORY:
        way_out = "end other processes, raise the container's limit, or take a larger machine"
        return Finding("machine", "problem", f"{what}; the smallest run takes {LEAST_MEMORY / GB:.0f} GB", way_out)
    if available < SMOLLM2_MEMORY:
        return Finding("machine", "note", f"{what}; the demo with SmolLM2 peaks near {SMOLLM2_MEMORY / GB:.0f} GB")
    return Finding("machine", "ok", what)


def _shared_memory(folder: Path) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as exc:
        return Finding("machine", "problem", f"{folder}: {exc.strerror}", f"mount a tmpfs at {folder}")
    what = f"{folder}: {usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    if usage.free < LEAST_SHARED_MEMORY:
        what += "; weights (512 MB a replica on a CPU) and Ray's object store go through it"
        way_out = f"docker run --shm-size=16g, mount -o remount,size=16g {folder}, or delete what is left there"
        return Finding("machine", "problem", what, way_out)
    return Finding("machine", "ok", what)


def _disk(folder: Path, use: str) -> Finding:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as exc:
        return Finding("machine", "problem", f"{folder} ({use}): {exc.strerror}", f"make {folder}, or set TMPDIR")
    if not os.access(folder, os.W_OK):
        return Finding(
            "machine", "problem", f"{folder} ({use}) cannot be written to", "work in, or set TMPDIR to, another"
        )
    what = f"disk of {folder} ({use}): {usage.free / GB:.1f} of {usage.total / GB:.1f} GB free"
    if usage.free < LEAST_DISK:
        return Finding("machine", "problem", what, f"free some of {folder}, or work on another disk")
    # As df counts: what only root may use is not there.
    if usage.used > RAY_DISK_SHARE * (usage.used + usage.free):
        return Finding("machine", "note", f"{what}; Ray stores nothing more on a disk that is 95 % full")
    return Finding("machine", "ok", what)

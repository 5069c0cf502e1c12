"""The models of the demo, warmed up side by side, or taken from the cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import verl_fapo
from verl_fapo.errors import WarmUpError

SOURCES = ("critique.py", "imitation.py", "templates.py", "data.py", "demo/lessons.py", "demo/tokenizer.py",
           "demo/training.py", "demo/world.py")  # fmt: skip
LIBRARIES = ("tokenizers", "torch", "transformers")
LOG_LINES = 15


def tiny_models(cache: Path, names: Sequence[str], *, seed: int, say: Callable[[str], None]) -> list[Path]:
    """Folders of models; makes them if ``cache`` has none, two in about a minute on two cores.

    Args:
        cache: folder for these and other models, made if it is not there.
        names: of :data:`verl_fapo.demo.training.RECIPES`.
        seed: of weights and problems.
        say: is told how far the warm-up is, from threads of its own.

    Raises:
        WarmUpError: a warm-up failed.
    """
    folder = cache / f"tiny-{_key(names, seed)}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tiny-", dir=cache) as temporary:
            half_made = Path(temporary) / "models"
            _warm_up(half_made, names, seed=seed, say=say)
            try:
                half_made.rename(folder)
            except OSError:
                if not folder.exists():  # else another warm-up was faster
                    raise
    return [folder / name for name in names]


def _key(names: Sequence[str], seed: int) -> str:
    """Says all that determines the models."""
    root = Path(verl_fapo.__file__).parent
    digest = hashlib.sha256(repr([seed, *names, *map(importlib.metadata.version, LIBRARIES)]).encode())
    for source in SOURCES:
        digest.update((root / source).read_bytes())
    return digest.hexdigest()[:16]


def _warm_up(folder: Path, names: Sequence[str], *, seed: int, say: Callable[[str], None]) -> None:
    with contextlib.ExitStack() as stack:
        processes = {name: stack.enter_context(_training(name, folder / name, seed=seed)) for name in names}
        readers = stack.enter_context(ThreadPoolExecutor(len(names)))
        stack.callback(lambda: [process.kill() for process in processes.values()])
        for ended in [readers.submit(_follow, name, process, say) for name, process in processes.items()]:
            ended.result()


@contextlib.contextmanager
def _training(name: str, folder: Path, *, seed: int) -> Iterator[subprocess.Popen]:
    """A training in a process of its own, which ends with the block, and with us whatever happens to us."""
    command = [sys.executable, "-m", "verl_fapo.demo.training", name, str(folder), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _follow(name: str, process: subprocess.Popen, say: Callable[[str], None]) -> None:
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        say(f"{name}: {lines[-1]}")
    if process.wait():
        log = "\n".join(lines[-LOG_LINES:])
        raise WarmUpError(f"the warm-up of the {name} ended with exit code {process.returncode}:\n{log}")

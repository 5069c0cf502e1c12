"""Fixtures: composed configs, tiny models, and real trainings in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from verl_fapo.data import problem_row, write_parquet
from verl_fapo.run_folder import RunFolder

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRAINING_SECONDS = 600


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real inputs beside the clone."""
    if not SHARED_DATA.is_dir():
        pytest.skip("../shared/data is not beside this clone")
    return SHARED_DATA


@pytest.fixture(scope="session")
def compose() -> Callable:
    """Composes veRL's own config with overrides, as ``python -m verl.trainer.main_ppo`` would."""
    import hydra
    import verl  # noqa: F401  (loads the plugin)

    def compose(*overrides: str):
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            return hydra.compose("ppo_trainer", overrides=list(overrides))

    return compose


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy that answers 7 or 8, a judge that says flawed or clean, and problems whose answer is 7."""
    from tests.tiny_models import save_parrot

    folder = tmp_path_factory.mktemp("workshop")
    save_parrot(folder / "policy", ["It is 7.\n\n\\boxed{7}", "It is 8.\n\n\\boxed{8}"])
    save_parrot(folder / "judge", ["Paragraph 0 is wrong.\n\n\\boxed{0}", "All is right.\n\n\\boxed{-1}"])
    for name, split in (("train", "train"), ("validation", "test")):
        rows = (problem_row(f"What is {i} + {7 - i}?", "7", data_source="sums", split=split, index=i) for i in range(8))
        write_parquet(rows, folder / f"{name}.parquet")
    return folder


@dataclass
class Training:
    """A training that runs, or ran, through veRL's own command."""

    process: subprocess.Popen
    folder: Path
    log_path: Path
    marker: str
    run: RunFolder = field(init=False)

    def __post_init__(self) -> None:
        self.run = RunFolder(self.folder / "run")

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait(self, seconds: float = TRAINING_SECONDS) -> int:
        return self.process.wait(seconds)

    def wait_for(self, condition: Callable[[], bool], seconds: float = TRAINING_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the training ended early:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.log[-3000:]}"
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Living processes of this training, wherever in the tree."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def leftovers(self, seconds: float = 30) -> list[str]:
        """Command lines of what still lives some time after the end."""
        deadline = time.monotonic() + seconds
        while (living := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return [" ".join(process.cmdline())[:200] for process in living if process.is_running()]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get("VERL_FAPO_TEST") == self.marker
                and process.pid != os.getpid()
            )
        except psutil.Error:
            return False


@pytest.fixture
def train(tmp_path: Path, workshop: Path) -> Iterator[Callable[..., Training]]:
    """Starts ``python -m verl.trainer.main_ppo +recipe=fapo +recipe/device=cpu`` on the workshop, with overrides."""
    started: list[Training] = []

    def train(*overrides: str) -> Training:
        settings = {
            "actor_rollout_ref.model.path": workshop / "policy",
            "fapo.judge.model": workshop / "judge",
            "fapo.judge.max_tokens": 64,
            "fapo.run_dir": tmp_path / "run",
            "data.train_files": workshop / "train.parquet",
            "data.val_files": workshop / "validation.parquet",
            "data.train_batch_size": 4,
            "data.max_prompt_length": 256,
            "data.max_response_length": 16,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "trainer.total_training_steps": 2,
            "trainer.test_freq": 2,
            "trainer.default_local_dir": tmp_path / "checkpoints",
            "hydra.run.dir": tmp_path / "hydra",
        }
        marker = uuid.uuid4().hex
        log_path = tmp_path / "train.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=fapo", "+recipe/device=cpu"),
                    *(f"{key}={value}" for key, value in settings.items()),
                    *overrides,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
                env={**os.environ, "VERL_FAPO_TEST": marker},
                start_new_session=True,
            )
        training = Training(process=process, folder=tmp_path, log_path=log_path, marker=marker)
        started.append(training)
        return training

    yield train
    for training in started:
        for process in training.processes():
            process.send_signal(signal.SIGKILL)
        training.process.wait()


def read_lines(path: Path) -> list[dict]:
    """Records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]

"""Fixtures: composed configs, tiny models, and real trainings in a process of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests.router.peers import start  # noqa: F401  (a fixture)
from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, recipe_environment
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


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_reaches_children() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and children inherit that; a handler they do not."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """No test sees the environment variables that another one set."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def compose() -> Callable:
    """Composes veRL's own config with overrides, as ``python -m verl.trainer.main_ppo`` would."""
    import hydra
    import verl  # noqa: F401  (loads the plugin)

    def compose(*overrides: str, return_hydra_config: bool = False):
        with hydra.initialize_config_module("verl.trainer.config", version_base=None):
            return hydra.compose("ppo_trainer", overrides=list(overrides), return_hydra_config=return_hydra_config)

    return compose


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy that answers 7 or 8, a judge that says flawed or clean, and problems whose answer is 7."""
    from tests.tiny_models import save_parrot

    folder = tmp_path_factory.mktemp("workshop")
    ways = ("It is", "That makes", "So we have")
    save_parrot(folder / "policy", [f"{way} {answer}.\n\n\\boxed{{{answer}}}" for way in ways for answer in (7, 8)])
    save_parrot(folder / "judge", ["Paragraph 0 is wrong.\n\n\\boxed{0}", "All is right.\n\n\\boxed{-1}"])
    for name, split in (("train", "train"), ("validation", "test")):
        rows = (problem_row(f"What is {i} + {7 - i}?", "7", data_source="sums", split=split, index=i) for i in range(8))
        write_parquet(rows, folder / f"{name}.parquet")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of the demo are made, once for all tests."""
    return tmp_path_factory.mktemp("cache") / "verl-fapo"


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """The server that ``verl-fapo warm`` starts, for all trainings."""
    server = ForkServer(recipe_environment())
    yield server
    server.close()


@pytest.fixture
def good(compose: Callable, workshop: Path) -> Callable:
    """Composes the workshop's config, with overrides on top."""

    def good(*overrides: str, recipe: str = "fapo"):
        return compose(
            f"+recipe={recipe}",
            "+recipe/device=cpu",
            f"actor_rollout_ref.model.path={workshop / 'policy'}",
            f"fapo.judge.model={workshop / 'judge'}",
            "fapo.judge.max_tokens=64",
            f"data.train_files={workshop / 'train.parquet'}",
            f"data.val_files={workshop / 'validation.parquet'}",
            *overrides,
        )

    return good


class OwnProcesses:
    """The processes of one test, wherever in the tree: those with its mark, and those of a fork server.

    Args:
        fork_server: pid of a server that forks for this test alone just now, and was there before.
    """

    def __init__(self, fork_server: int | None = None) -> None:
        self.mark = {"VERL_FAPO_TEST": uuid.uuid4().hex}
        """Environment of the first of them; the others inherit it."""

        self._fork_server = fork_server
        self._started_at = time.time()

    def living(self) -> list[psutil.Process]:
        forked = psutil.Process(self._fork_server).children(recursive=True) if self._fork_server else []
        return [*forked, *filter(self._has_mark, psutil.process_iter())]

    def left(self, seconds: float = 30) -> list[str]:
        """Command lines of what still lives some time after the end, and shared memory that is still there."""
        deadline = time.monotonic() + seconds
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _left(self) -> list[str]:
        memory = (path for pattern in ("sem.mp-*", "verl_weights_*") for path in Path("/dev/shm").glob(pattern))
        names = [path.name for path in memory if path.stat().st_ctime > self._started_at]
        for process in self.living():
            with contextlib.suppress(psutil.Error):  # it has just ended
                names.append(" ".join(process.cmdline())[:200])
        return names

    def _has_mark(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and self.mark.items() <= process.environ().items()
        except psutil.Error:
            return False


@pytest.fixture
def own_processes() -> Iterator[OwnProcesses]:
    """Of a test that starts some; none of them outlives it."""
    own = OwnProcesses()
    yield own
    for process in own.living():
        process.kill()


@dataclass
class Training:
    """A training that runs, or ran, through veRL's own command."""

    process: subprocess.Popen
    folder: Path
    log_path: Path
    own: OwnProcesses
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
        return self.own.living()

    def leftovers(self) -> list[str]:
        return self.own.left()


@pytest.fixture
def train(tmp_path: Path, workshop: Path, fork_server: ForkServer) -> Iterator[Callable[..., Training]]:
    """Starts ``python -m verl.trainer.main_ppo +recipe=RECIPE +recipe/device=cpu`` on the workshop, with overrides.

    ``warm`` is whether it finds a fork server that is ready.
    """
    started: list[Training] = []

    def train(*overrides: str, warm: bool = True, recipe: str = "fapo") -> Training:
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
        own = OwnProcesses(fork_server.pid)
        log_path = tmp_path / "train.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "verl.trainer.main_ppo", f"+recipe={recipe}", "+recipe/device=cpu"),
                    *(f"{key}={value}" for key, value in settings.items()),
                    *overrides,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=tmp_path,
                env={
                    **os.environ,
                    **own.mark,
                    ADDRESS_VARIABLE: fork_server.address if warm else "",
                },
                start_new_session=True,
            )
        training = Training(process=process, folder=tmp_path, log_path=log_path, own=own)
        started.append(training)
        return training

    yield train
    for training in started:
        for process in training.processes():
            process.send_signal(signal.SIGKILL)
        training.process.wait()


@dataclass
class JudgeServer:
    """An OpenAI-compatible server of one's own: ``reply`` says a status and a critique, or raises, for a prompt."""

    reply: Callable[[str], tuple[int, str]]
    asked: Counter[str] = field(default_factory=Counter)
    """How often, by prompt."""

    url: str = ""

    def overrides(self) -> list[str]:
        return ["fapo.genrm.placement=external", f"fapo.genrm.endpoints=[{self.url}]"]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                prompt = request["messages"][-1]["content"]
                judge.asked[prompt] += 1
                try:
                    status, critique = judge.reply(prompt)
                except ConnectionAbortedError:
                    self.close_connection = True
                    return
                choice = {"message": {"content": critique}, "finish_reason": "stop"}
                body = json.dumps({"choices": [choice], "usage": {"completion_tokens": 3}}).encode()
                with contextlib.suppress(ConnectionError):  # the caller is gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            yield
            server.shutdown()


@pytest.fixture
def judge_server() -> Iterator[Callable[..., JudgeServer]]:
    """Starts a server whose critiques are what a function of the prompt says."""
    with contextlib.ExitStack() as stack:

        def judge_server(reply: Callable[[str], tuple[int, str]]) -> JudgeServer:
            judge = JudgeServer(reply)
            stack.enter_context(judge.running())
            return judge

        yield judge_server


def grpo(rewards: Mapping[str, float], *, left_out: Container[str] = ()) -> dict[str, float]:
    """GRPO's advantages of rollouts by id, written plainly; those that are left out, or then alone, have 0."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, reward in rewards.items():
        if name not in left_out:
            groups[name.rpartition("_")[0]].append(reward)
    advantages = {}
    for name, reward in rewards.items():
        compared = groups[name.rpartition("_")[0]]
        if name in left_out or len(compared) < 2:
            advantages[name] = 0.0
        else:
            advantages[name] = (reward - statistics.mean(compared)) / (statistics.stdev(compared) + 1e-6)
    return advantages


def read_lines(path: Path) -> list[dict]:
    """Records of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]

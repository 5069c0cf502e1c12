"""Real trainings in which something breaks: each ends in bounded time, says why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import read_lines

LONG = ["trainer.total_training_steps=200", "trainer.test_freq=-1", "trainer.val_before_train=false"]


@pytest.fixture
def silent_judge() -> Iterator[str]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def clean_judge() -> Iterator[str]:
    """A server that finds every solution clean."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = json.dumps({"choices": [{"message": {"content": "\\boxed{-1}"}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def external(url: str) -> list[str]:
    return ["fapo.genrm.placement=external", f"fapo.genrm.endpoints=[{url}]"]


def test_judge_that_never_answers_stops_the_run_before_it_learns_from_it(train, silent_judge):
    training = train(
        *external(silent_judge),
        "fapo.judge.timeout_seconds=3",
        "actor_rollout_ref.rollout.n=16",
        "trainer.val_before_train=false",
    )
    assert training.wait() == 1
    summary = training.run.summary
    assert summary["status"] == "failed"
    assert summary["steps"] == 0
    assert summary["failure"].startswith("JudgeError: 100% of the last")
    assert summary["failure"] in training.log
    assert summary["unknown"] == summary["judged"] >= 20
    assert {critique["reason"] for critique in read_lines(training.run.root / "critiques.jsonl")} == {"timeout"}
    assert training.leftovers() == []


def test_dead_rollout_engine_ends_the_run(train, clean_judge):
    training = train(*LONG, *external(clean_judge))
    training.wait_for(lambda: any(True for _ in training.run.scored()))
    engines = [process for process in training.processes() if "EngineCore" in " ".join(process.cmdline())]
    assert len(engines) == 1
    engines[0].kill()
    assert training.wait(120) == 1
    summary = training.run.summary
    assert summary["status"] == "failed"
    assert summary["failure"]
    assert summary["failure"] in training.log
    assert summary["steps"] < 200
    assert training.leftovers() == []


def test_dead_judge_ends_the_run_and_is_named(train):
    training = train(*LONG, "actor_rollout_ref.rollout.n=8")
    training.wait_for(lambda: len(training.run.metrics()) > 0)
    server = re.search(r"vLLMHttpServer pid=(\d+)\)\S* +'[^']*/judge'", training.log)
    os.kill(int(server[1]), signal.SIGKILL)
    assert training.wait(120) == 1
    summary = training.run.summary
    assert summary["status"] == "failed"
    assert re.search(r"the GenRM replica at \S+ (is dead|died)", summary["failure"]), summary["failure"]
    assert summary["failure"] in training.log
    reasons = Counter(line["reason"] for line in read_lines(training.run.root / "critiques.jsonl"))
    assert summary["unknown"] == reasons.total() - reasons[None]
    assert training.leftovers() == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("gcs_server", "StalledError: Ray's head at", id="head"),
        pytest.param("raylet", "Ray's raylet died", id="raylet"),
    ],
)
def test_dead_ray_ends_the_run(train, name, said):
    training = train(*LONG)
    training.wait_for(lambda: len(training.run.metrics()) > 0)
    (process,) = [process for process in training.processes() if process.name() == name]
    process.kill()
    assert training.wait(60) == 1
    assert training.run.summary["status"] == "failed"
    assert said in training.run.summary["failure"]
    assert training.leftovers() == []


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """The run folder of the trainings of this test, on a disk of 160 kB."""
    folder = tmp_path / "run"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=160k", "fapo-test", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_does_not_end_the_run_and_its_records_can_be_finished_later(train, small_disk):
    training = train("trainer.total_training_steps=16", "trainer.test_freq=-1", "trainer.val_before_train=false")
    assert training.wait() == 0, training.log[-3000:]
    assert "No space left on device" in training.log
    assert f"verl-fapo report --finish {small_disk}" in training.log
    assert training.log.count("training/global_step:16") == 1, "the last step was done"
    assert training.run.summary is None
    assert training.leftovers() == []

    subprocess.run(["mount", "-o", "remount,size=10m", str(small_disk)], check=True)
    training.run.finish(status="completed", ended_at=time.time())
    rollouts = read_lines(small_disk / "rollouts.jsonl")
    assert 16 <= training.run.summary["rollouts"] == len(rollouts) < 16 * 16, "those of the first steps"
    assert training.run.summary["judged"] == len(read_lines(small_disk / "critiques.jsonl"))


# What the log says shortly before; a random moment after it is chosen.
MOMENTS = [
    pytest.param("", 6, os.kill, signal.SIGTERM, id="SIGTERM to the command while it imports"),
    pytest.param("ray init kwargs", 6, os.killpg, signal.SIGINT, id="Ctrl-C to the group while Ray starts"),
    pytest.param("Total training steps", 12, os.kill, signal.SIGTERM, id="SIGTERM while workers start"),
    pytest.param("step:1 ", 3, os.killpg, signal.SIGINT, id="Ctrl-C while training"),
    pytest.param("step:1 ", 3, os.kill, signal.SIGTERM, id="SIGTERM while training"),
]


@pytest.mark.parametrize(("said", "within", "send", "signum"), MOMENTS)
def test_signal_leaves_a_readable_run_folder_and_no_process(train, said, within, send, signum):
    training = train(*LONG)
    training.wait_for(lambda: said in training.log)
    moment = random.uniform(0, within)
    print(f"{signum.name} {moment:.2f} s after {said!r}")
    time.sleep(moment)
    send(training.process.pid, signum)
    assert training.wait(60) != 0
    if summary := training.run.summary:
        assert summary["status"] == "interrupted"
        assert summary["steps"] == len(training.run.metrics())
        assert summary["judged"] == len(read_lines(training.run.root / "critiques.jsonl"))
    else:
        assert not said, "the run folder was opened before Ray was started"
    assert training.leftovers() == []

"""Real trainings in which something breaks: each ends in bounded time, says why, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


@pytest.mark.parametrize(
    ("send", "signum"),
    [
        pytest.param(os.killpg, signal.SIGINT, id="Ctrl-C, to the whole group"),
        pytest.param(os.kill, signal.SIGTERM, id="SIGTERM, to the command"),
    ],
)
def test_signal_leaves_a_readable_run_folder_and_no_process(train, send, signum):
    training = train(*LONG)
    training.wait_for(lambda: len(training.run.metrics()) > 0)
    send(training.process.pid, signum)
    assert training.wait(60) != 0
    summary = training.run.summary
    assert summary["status"] == "interrupted"
    assert summary["steps"] == len(training.run.metrics()) >= 1
    assert summary["judged"] == len(read_lines(training.run.root / "critiques.jsonl"))
    assert training.leftovers() == []

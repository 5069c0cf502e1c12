"""Real trainings in which something breaks: each ends in bounded time, says why, and leaves nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import grpo, read_lines
from verl_fapo.critique import split_paragraphs
from verl_fapo.templates import judge_prompt

LONG = ["trainer.total_training_steps=200", "trainer.test_freq=-1", "trainer.val_before_train=false"]


@pytest.fixture
def silent_judge() -> Iterator[str]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_judge_that_never_answers_stops_the_run_before_it_learns_from_it(train, silent_judge):
    training = train(
        "fapo.genrm.placement=external",
        f"fapo.genrm.endpoints=[{silent_judge}]",
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


def test_dead_rollout_engine_ends_the_run(train, judge_server):
    training = train(*LONG, *judge_server(lambda prompt: (200, "\\boxed{-1}")).overrides())
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


def test_judge_that_fails_now_and_then_loses_and_doubles_no_reward(train, judge_server):
    rng = random.Random(1)

    def verdict(prompt: str) -> str:
        return "flawed" if zlib.crc32(prompt.encode()) % 2 else "clean"

    def reply(prompt: str) -> tuple[int, str]:
        fault = rng.choice(["", "", "", "500", "closed", "late", "empty"])
        if fault == "closed":
            raise ConnectionAbortedError
        if fault == "late":
            time.sleep(2)
        if fault == "empty":
            return 200, ""
        return 500 if fault else 200, "\\boxed{0}" if verdict(prompt) == "flawed" else "\\boxed{-1}"

    judges = [judge_server(reply), judge_server(reply)]
    training = train(
        "fapo.genrm.placement=external",
        f"fapo.genrm.endpoints=[{judges[0].url},{judges[1].url}]",
        "fapo.judge.timeout_seconds=10",
        "fapo.judge.max_unknown_rate=1",
        "fapo.memory.max_entries=0",
        "trainer.total_training_steps=4",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
    )
    assert training.wait() == 0, training.log[-3000:]
    rollouts = read_lines(training.run.root / "rollouts.jsonl")
    critiques = read_lines(training.run.root / "critiques.jsonl")
    rewards = {rollout["id"]: rollout["reward"] for rollout in rollouts}
    assert len(rewards) == len(rollouts) == 4 * 16
    assert len(critiques) == sum(rollout["correct"] for rollout in rollouts)
    for critique in critiques:
        prompt = judge_prompt(critique["problem"], "7", split_paragraphs(critique["solution"]))
        assert critique["verdict"] in (verdict(prompt), "unknown")
        assert critique["reward"] == (0.0 if critique["verdict"] == "flawed" else 1.0)
    assert {critique["verdict"] for critique in critiques} == {"flawed", "clean", "unknown"}
    assert training.run.advantages() == pytest.approx(grpo(rewards), abs=1e-4), "what was scored is what is learned"
    steps = training.run.metrics()
    assert sum(step["fapo/judged"] for step in steps) == len(critiques)
    assert sum(step["fapo/unknown"] for step in steps) == sum(c["verdict"] == "unknown" for c in critiques)
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

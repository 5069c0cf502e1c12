"""The demo itself, for real: ``make demo`` on a machine that has never run it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from verl_fapo.demo.outcome import gain, validations
from verl_fapo.run_folder import RunFolder

COMMAND = [sys.executable, "-c", "from verl_fapo.cli import main; main()", "demo"]


@pytest.fixture
def demo(cache, tmp_path, own_processes):
    """Starts ``verl-fapo demo`` with some arguments."""
    started = []

    def demo(*arguments: str) -> subprocess.Popen:
        environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), **own_processes.mark}
        command = [*COMMAND, "--out", str(tmp_path), *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield demo
    for process in started:
        process.kill()
        process.communicate()


def test_policy_learns_and_its_flaws_become_fewer(demo, tmp_path, own_processes):
    process = demo("--seed", "1")
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said[-3000:]
    before, after = validations(RunFolder(tmp_path / "fapo"))
    gained, margin = gain(before, after)
    assert before.problems == after.problems >= 200
    assert 0.3 <= before.accuracy <= 0.6
    assert 0.2 <= before.flawed_ratio <= 0.4
    assert gained > margin, "outside the 95 % interval"
    assert after.flawed_ratio < before.flawed_ratio
    assert before.judge_f1 > before.baseline_f1 + 0.2
    assert f"accuracy {gained:+.1%} (95 % interval" in said
    assert "step 15 of 15" in said
    assert own_processes.left() == []


def test_ctrl_c_ends_the_demo_and_all_that_it_started(demo, tmp_path, own_processes):
    process = demo("--steps", "100")
    deadline = time.monotonic() + 300
    while not RunFolder(tmp_path / "fapo").metrics():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "interrupted" in said
    assert own_processes.left() == []


def test_judge_learns_by_the_recipe_and_judges_the_next_demo(demo, tmp_path, own_processes):
    process = demo("--profile", "judge", "--seed", "1")
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said[-3000:]
    steps = RunFolder(tmp_path / "fapo").metrics()
    names = ("accuracy", "f1", "clean_flagged_rate")
    before, after = (
        {name: line[f"fapo_validation/steps_critic/{name}"] for name in names} for line in steps[:: len(steps) - 1]
    )
    assert after["accuracy"] > before["accuracy"] + 0.1
    assert after["f1"] > before["f1"] + 0.05
    assert after["clean_flagged_rate"] < before["clean_flagged_rate"] - 0.2
    assert f"{after['f1']:.3f}" in said
    for line in steps[1:]:
        assert 0 <= line["fapo_genrm/accuracy"] <= 1 and line["fapo_genrm/reward_std"] > 0
    _, _, command = said.partition("to let it judge: verl-fapo demo ")
    judge = command.splitlines()[0].split()
    process = demo(*judge, "--steps", "1")
    said, _ = process.communicate(timeout=800)
    assert process.returncode == 0, said[-3000:]
    before, _ = validations(RunFolder(tmp_path / "fapo"))
    assert before.judge_f1 > before.baseline_f1
    assert own_processes.left() == []

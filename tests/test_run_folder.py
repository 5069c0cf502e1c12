from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.conftest import read_lines
from verl_fapo.errors import DataError
from verl_fapo.run_folder import RolloutLog, RunFolder, count


def rollout(id: str, **values: object) -> dict:
    record = {
        "id": id, "step": 1, "validation": False, "problem": "p", "solution": "s", "ground_truth": "7",
        "answer": "7", "correct": True, "judged": True, "critique": "c", "verdict": "clean", "index": -1,
        "reason": None, "reward": 1.0,
    }  # fmt: skip
    return {**record, **values}


NOT_JUDGED = {"validation": True, "judged": False, "verdict": None}
WRONG = {"correct": False, "judged": False, "verdict": None, "reward": -1.0}


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.open("a: 1\n", started_at=1000.0, resumed=False)
    return folder


def test_parts_of_several_workers_become_one_file_of_critiques_and_one_of_all_rollouts(run):
    first, second = RolloutLog(run.root), RolloutLog(run.root)
    first.write(rollout("a_0", verdict="flawed", index=0, reward=0.0))
    second.write(rollout("a_1", **WRONG))
    second.write(rollout("b_0", verdict="unknown", index=None, reason="timeout"))
    run.log_metrics(1, {"training/global_step": 1})
    run.finish(status="completed", ended_at=1060.0)
    summary = run.summary
    assert {line["id"] for line in read_lines(run.root / "critiques.jsonl")} == {"a_0", "b_0"}
    assert {line["id"] for line in read_lines(run.root / "rollouts.jsonl")} == {"a_0", "a_1", "b_0"}
    assert "critique" not in read_lines(run.root / "rollouts.jsonl")[0]
    counts = {key: summary[key] for key in ("steps", "rollouts", "correct", "judged", "flawed", "unknown")}
    assert counts == {"steps": 1, "rollouts": 3, "correct": 2, "judged": 2, "flawed": 1, "unknown": 1}
    assert summary["seconds_total"] == 60.0
    assert json.loads((run.root / "summary.json").read_text()) == summary


def test_merging_again_changes_nothing(run):
    RolloutLog(run.root).write(rollout("a_0"))
    run.finish(status="completed", ended_at=1060.0)
    first = run.summary
    run.finish(status="completed", ended_at=1060.0)
    assert run.summary == first
    assert len(read_lines(run.root / "critiques.jsonl")) == 1


@pytest.mark.parametrize("merged", ["critiques.jsonl", "rollouts.jsonl"])
def test_merge_that_was_killed_between_two_files_doubles_and_loses_nothing(run, merged):
    RolloutLog(run.root).write(rollout("a_0"))
    RolloutLog(run.root).write(rollout("a_1", **WRONG))
    parts = {path.name: path.read_text() for path in (run.root / "parts").iterdir()}
    run.finish(status="interrupted", ended_at=1060.0)
    for name in {"critiques.jsonl", "rollouts.jsonl"} - {merged}:
        (run.root / name).unlink()
    (run.root / "parts").mkdir()
    for name, text in parts.items():
        (run.root / "parts" / name).write_text(text)
    run.finish(status="killed", ended_at=1060.0)
    assert (run.summary["rollouts"], run.summary["judged"]) == (2, 1)
    assert len(read_lines(run.root / "critiques.jsonl")) == 1
    assert len(read_lines(run.root / "rollouts.jsonl")) == 2


def test_line_that_a_crash_cut_off_is_left_out(run):
    RolloutLog(run.root).write(rollout("a_0"))
    (part,) = (run.root / "parts").iterdir()
    with part.open("a") as file:
        file.write('{"id": "a_1", "ste')
    run.finish(status="killed", ended_at=1060.0)
    assert run.summary["rollouts"] == 1


def test_resumed_run_goes_on_after_a_line_that_was_cut_off(run):
    run.log_metrics(1, {"a": 1})
    with (run.root / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a')
    run.open("", started_at=2000.0, resumed=True)
    run.log_metrics(2, {"a": 2})
    assert run.metrics() == [{"step": 1, "a": 1}, {"step": 2, "a": 2}]


def test_model_text_that_utf8_can_not_hold_is_kept(run):
    text = "lone \ud800 surrogate\n\x00 and \u2028 more"
    RolloutLog(run.root).write(rollout("a_0", critique=text))
    run.finish(status="completed", ended_at=1060.0)
    (line,) = read_lines(run.root / "critiques.jsonl")
    assert line["critique"] == text


def test_metrics_are_numbers_and_a_repeated_step_counts_once(run):
    run.log_metrics(1, {"a": np.float64(0.5), "b": torch.tensor(2), "c": "text", "d": float("nan"), "e": np.ones(3)})
    run.log_metrics(1, {"a": 0.75})
    assert read_lines(run.root / "metrics.jsonl")[0] == {"step": 1, "a": 0.5, "b": 2}
    assert run.metrics() == [{"step": 1, "a": 0.75, "b": 2}]


def test_validation_before_a_resumed_run_is_no_step_and_hides_none(run):
    run.log_metrics(3, {"training/global_step": 3, "loss": 1.0})
    run.log_metrics(3, {"val": 0.5})
    assert run.metrics() == [{"step": 3, "training/global_step": 3, "loss": 1.0, "val": 0.5}]
    run.log_metrics(7, {"val": 0.5})
    run.finish(status="completed", ended_at=1060.0)
    assert run.summary["steps"] == 1


def test_rollout_that_was_scored_again_counts_as_its_last_record(run):
    RolloutLog(run.root).write(rollout("a_0", verdict="flawed"))
    run.finish(status="interrupted", ended_at=1060.0)
    log, other = RolloutLog(run.root), RolloutLog(run.root)
    log.write(rollout("a_0", verdict="clean"))
    log.write(rollout("b_0", verdict="clean"))
    other.write(rollout("b_0", verdict="unknown"))
    run.finish(status="completed", ended_at=1070.0)
    critiques = {line["id"]: line["verdict"] for line in read_lines(run.root / "critiques.jsonl")}
    assert critiques == {"a_0": "clean", "b_0": "unknown"}
    assert len(read_lines(run.root / "critiques.jsonl")) == run.summary["judged"] == 2


def test_run_folder_that_holds_somebody_elses_files_is_refused(tmp_path):
    (tmp_path / "config.yaml").write_text("mine: 1\n")
    with pytest.raises(DataError, match=r"config.yaml is there but is not of a run"):
        RunFolder(tmp_path).open("", started_at=1000.0, resumed=False)
    assert (tmp_path / "config.yaml").read_text() == "mine: 1\n"


def test_two_runs_do_not_share_a_folder(run):
    with run.locked(), pytest.raises(DataError, match="another run writes to"), RunFolder(run.root).locked():
        pass
    with RunFolder(run.root).locked():
        pass


def test_file_system_without_locks_is_no_obstacle(run, monkeypatch, caplog):
    def flock(*args: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with run.locked():
        assert "can not be locked" in caplog.text


def test_worker_that_writes_during_a_merge_loses_nothing(run):
    logs = [RolloutLog(run.root) for _ in range(3)]
    stop = threading.Event()

    def write(log: RolloutLog, name: str) -> int:
        number = 0
        while not stop.is_set() or number < 50:
            log.write(rollout(f"{name}{number}_0"))
            number += 1
            time.sleep(0.001)
        return number

    with ThreadPoolExecutor() as pool:
        written = [pool.submit(write, log, name) for log, name in zip(logs, "abc", strict=True)]
        for _ in range(5):
            run.finish(status="interrupted", ended_at=1060.0)
        stop.set()
    total = sum(future.result() for future in written)
    run.finish(status="completed", ended_at=1060.0)
    assert run.summary["judged"] == len(read_lines(run.root / "critiques.jsonl")) == total >= 150
    assert not (run.root / "parts").exists()


GARBAGE = [b"7\n", b"null\n", b"{}\n", b"[" * 100_000 + b"\n", b"\xff\xfe\n", b'{"step": 1, "x']


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_line_that_is_no_record_is_left_out_and_the_next_one_is_kept(run, garbage):
    log = RolloutLog(run.root)
    log.write(rollout("a_0"))
    (part,) = (run.root / "parts").iterdir()
    for path in (part, run.root / "metrics.jsonl"):
        with path.open("ab") as file:
            file.write(garbage)
    log.write(rollout("b_0"))
    run.log_metrics(2, {"training/global_step": 2})
    run.finish(status="completed", ended_at=1060.0)
    assert (run.summary["rollouts"], run.summary["steps"]) == (2, 1)


def test_files_that_are_not_a_runs_stay_and_earlier_runs_are_never_overwritten(run):
    (run.root / "global_step_5").mkdir()
    run.open("b: 1\n", started_at=2000.0, resumed=False)
    run.open("c: 1\n", started_at=2000.0, resumed=False)
    shutil.rmtree(run.root / "earlier-1")
    run.open("d: 1\n", started_at=2000.0, resumed=False)
    assert (run.root / "earlier-2" / "config.yaml").read_text() == "b: 1\n"
    assert (run.root / "earlier-3" / "config.yaml").read_text() == "c: 1\n"
    assert (run.root / "global_step_5").is_dir()


def test_looking_at_a_run_that_is_under_way_changes_nothing(run):
    RolloutLog(run.root).write(rollout("a_0"))
    before = sorted(path.relative_to(run.root) for path in run.root.rglob("*"))
    assert run.summarise(status="not finished", ended_at=0.0)["seconds_total"] == 0.0
    assert sorted(path.relative_to(run.root) for path in run.root.rglob("*")) == before


def test_fresh_run_moves_an_earlier_one_aside_and_a_resumed_one_goes_on(run):
    run.log_metrics(1, {"a": 1})
    run.fail("JudgeError: x")
    run.open("a: 2\n", started_at=2000.0, resumed=True)
    assert run.metrics() == [{"step": 1, "a": 1}]
    assert run.failure is None
    run.open("a: 3\n", started_at=3000.0, resumed=False)
    assert run.metrics() == []
    assert read_lines(run.root / "earlier-1" / "metrics.jsonl") == [{"step": 1, "a": 1}]
    run.open("a: 4\n", started_at=4000.0, resumed=False)
    assert (run.root / "earlier-2" / "config.yaml").read_text() == "a: 3\n"
    assert (run.root / "earlier-1").exists()


def test_accuracy_is_that_of_the_first_and_the_last_validation():
    validation = [
        {**rollout(f"v{i}", step=step, correct=correct, **NOT_JUDGED), "time": 1010.0 + i}
        for i, (step, correct) in enumerate([(0, False), (0, True), (5, True), (9, True), (9, True)])
    ]
    summary = count([], validation, started_at=1000.0, ended_at=1020.0)
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.5, 1.0)
    assert (summary["rollouts"], summary["validation_rollouts"]) == (0, 5)
    assert summary["seconds_to_first_rollout"] == 10.0


def test_nothing_scored_gives_no_accuracy_and_no_first_rollout():
    summary = count([], [], started_at=1000.0, ended_at=1020.0)
    assert summary["accuracy_before"] is summary["accuracy_after"] is summary["seconds_to_first_rollout"] is None

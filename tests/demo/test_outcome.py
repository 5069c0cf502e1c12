from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from verl_fapo.demo.outcome import Validation, gain, outcome_table, validations
from verl_fapo.run_folder import RolloutLog, RunFolder

QUESTION = "Mia has 7 beads. Step 1: she finds 5 more. Step 2: she swaps every 4 for one. How many beads does she have?"
CLEAN = "7 + 5 = 12.\n\n12 // 4 = 3.\n\n\\boxed{3}"
FLAWED = "7 + 5 = 13.\n\n13 // 4 = 3.\n\n\\boxed{3}"
WRONG = "7 + 5 = 11.\n\n11 // 4 = 2.\n\n\\boxed{2}"

# step, validation, solution, the judge's verdict
ROLLOUTS = [
    (0, True, CLEAN, "clean"),
    (0, True, CLEAN, "flawed"),
    (0, True, FLAWED, "flawed"),
    (0, True, FLAWED, "unknown"),
    (0, True, WRONG, None),
    (1, False, FLAWED, "flawed"),
    (1, True, CLEAN, "clean"),
    (1, True, WRONG, None),
]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.open("", started_at=0.0, resumed=False)
    log = RolloutLog(tmp_path)
    for i, (step, validation, solution, verdict) in enumerate(ROLLOUTS):
        record = {"problem": QUESTION, "solution": solution, "verdict": verdict, "reason": None, "critique": ""}
        flags = {"validation": validation, "correct": verdict is not None, "judged": verdict is not None}
        log.write({"id": f"{i}_0", "step": step, **flags, **record})
    folder.finish(status="completed", ended_at=1.0)
    return folder


def test_judge_is_held_against_the_checker(run):
    before, after = validations(run)
    assert before == Validation(problems=5, right=4, flawed=2, called=2, found=1)
    assert after == Validation(problems=2, right=1, flawed=0, called=0, found=0)
    assert before.accuracy == 0.8
    assert before.flawed_ratio == 0.5
    assert before.judge_f1 == 0.5, "one of two found, one of two called is flawed"
    assert before.baseline_f1 == pytest.approx(2 / 3), "all found, half of those called are flawed"
    assert after.judge_f1 == after.baseline_f1 == 0.0


def test_gain_has_the_interval_of_two_independent_samples():
    before = Validation(problems=400, right=200, flawed=0, called=0, found=0)
    after = Validation(problems=400, right=320, flawed=0, called=0, found=0)
    gained, margin = gain(before, after)
    assert gained == pytest.approx(0.3)
    assert margin == pytest.approx(1.96 * (0.25 / 400 + 0.16 / 400) ** 0.5)


def test_without_judgements_there_is_nothing_to_say(run):
    RolloutLog(run.root).write(
        {"id": "9_0", "step": 1, "validation": True, "correct": True, "judged": False, "verdict": None}
    )
    assert validations(run) == []


def test_of_another_world_there_is_nothing_to_say(run):
    with (run.root / "critiques.jsonl").open("a") as file:
        foreign = {
            "id": "x",
            "validation": True,
            "judged": True,
            "problem": "What is 2 + 2?",
            "solution": "4",
            "step": 1,
        }
        file.write(json.dumps(foreign))
    assert validations(run) == []


def test_record_that_was_cut_off_is_left_out(run):
    before = validations(run)
    with (run.root / "critiques.jsonl").open("ab") as file:
        file.write(b'\n[]\n{"id": "7_0", "validation": tr\xff')
    assert validations(run) == before


def test_table_shows_rates_and_both_f1(run):
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(outcome_table(zip(("before", "after"), validations(run), strict=True)))
    before = next(line for line in console.export_text().splitlines() if "before" in line)
    assert [cell.strip() for cell in before.split("│")[1:-1]] == [
        "before",
        "5",
        "80.0%",
        "50.0%",
        "50.0%",
        "0.50",
        "0.67",
    ]

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_fapo.cli import main
from verl_fapo.run_folder import RolloutLog, RunFolder

JUDGED = {
    "step": 4,
    "validation": False,
    "problem": "What is 3 + 4?",
    "solution": "Three.\n\nThree and four is 9.\n\nSo \\boxed{7}.",
    "ground_truth": "7",
    "answer": "7",
    "correct": True,
    "method": "same_number",
    "judged": True,
    "critique": "Paragraph 1 is wrong.\n\\boxed{1}",
    "verdict": "flawed",
    "index": 1,
    "reason": None,
    "judge_seconds": 2.5,
    "from_memory": False,
    "reward": 0.0,
    "reward_for_length": 0.0,
}
CLEAN = JUDGED | {"critique": "\\boxed{-1}", "verdict": "clean", "index": -1, "reward": 1.0}
UNKNOWN = JUDGED | {"critique": "hm", "verdict": "unknown", "index": None, "reason": "no_box", "reward": 1.0}
NOT_JUDGED = JUDGED | {"judged": False, "critique": "", "verdict": None, "index": None, "reward": 1.0}
WRONG = NOT_JUDGED | {"answer": "8", "correct": False, "reward": -1.0}
LESSON = JUDGED | {
    "method": "verdict",
    "answer": "1",
    "ground_truth": "2",
    "judge_seconds": 0.0,
    "reward": 1 - 1 / 3,
}


class Run:
    """A run folder whose rollouts a test makes up."""

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.folder.open("fapo:\n  judge:\n    scope: whole\n", started_at=1000.0, resumed=False)
        self.log = RolloutLog(root)

    def add(self, name: str, record: dict) -> None:
        self.log.write({"id": name, **record})

    def explain(self, *arguments: str) -> list[str]:
        result = CliRunner().invoke(main, ["explain", str(self.folder.root), *arguments])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    def refused(self, *arguments: str) -> str:
        result = CliRunner().invoke(main, ["explain", str(self.folder.root), *arguments])
        assert result.exit_code == 2, result.output
        (line,) = result.output.splitlines()
        return line


@pytest.fixture
def run(tmp_path) -> Run:
    return Run(tmp_path / "run")


@pytest.mark.parametrize("finished", [False, True], ids=["under way", "finished"])
def test_everything_about_a_flawed_rollout_is_on_one_screen(run, finished):
    run.add("abc_1", JUDGED)
    run.folder.log_advantages(4, {"abc_1": -0.5})
    if finished:
        run.folder.finish(status="completed", ended_at=2000.0)
    assert run.explain("abc_1") == [
        "rollout    abc_1, training, step 4",
        "problem",
        "   What is 3 + 4?",
        "solution",
        "   0  Three.",
        ">> 1  Three and four is 9.",
        "      ^ first wrong paragraph",
        "   2  So \\boxed{7}.",
        "critique",
        "   Paragraph 1 is wrong.",
        "   \\boxed{1}",
        "answer     7, expected 7: right (by same_number)",
        "verdict    flawed at 1, after 2.5 s",
        "reward     0: +1 as it is right, -1 for flawed",
        "advantage  -0.5000",
    ]


@pytest.mark.parametrize(
    ("record", "line"),
    [
        pytest.param(CLEAN, "verdict    clean, after 2.5 s", id="clean"),
        pytest.param(CLEAN | {"from_memory": True}, "verdict    clean, from memory", id="remembered"),
        pytest.param(UNKNOWN, "verdict    unknown (no_box), after 2.5 s", id="unknown"),
        pytest.param(UNKNOWN | {"reward": 0.5}, "reward     0.5: +1 as it is right, -0.5 for unknown", id="penalised"),
        pytest.param(CLEAN, "reward     1", id="full reward"),
        pytest.param(WRONG, "answer     8, expected 7: wrong (by same_number)", id="wrong answer"),
        pytest.param(WRONG | {"answer": None}, "answer     none, expected 7: wrong (by same_number)", id="no answer"),
        pytest.param(WRONG, "verdict    none: only right answers are judged", id="wrong is not judged"),
        pytest.param(NOT_JUDGED, "verdict    none: not judged", id="validation or baseline"),
        pytest.param(WRONG, "advantage  none: no step was trained on it, or not yet", id="no step"),
        pytest.param(WRONG | {"validation": True}, "advantage  none: validation", id="validation"),
        pytest.param(LESSON, "verdict    right: flawed at 1, and flawed at 2", id="judge in training"),
        pytest.param(
            LESSON, "reward     0.666667: +1 as it is right, -0.333333 for the distance", id="judge's distance"
        ),
    ],
)
def test_each_part_says_how_it_came_about(run, record, line):
    run.add("abc_1", record)
    assert line in run.explain("abc_1")


@pytest.mark.parametrize(
    ("record", "reward", "said"),
    [
        (JUDGED, -0.25, "-0.25: +1 as it is right, -1 for flawed, -0.25 for its length"),
        (JUDGED, 0.75, "0.75: +1 as it is right, -0.25 for its length"),
        (CLEAN, 0.75, "0.75: +1 as it is right, -0.25 for its length"),
        (UNKNOWN, 0.75, "0.75: +1 as it is right, -0.25 for its length"),
        (NOT_JUDGED, 0.75, "0.75: +1 as it is right, -0.25 for its length"),
        (WRONG, -1.25, "-1.25: -1 as it is wrong, -0.25 for its length"),
    ],
    ids=["flawed", "flawed, penalty 0", "clean", "unknown is kept", "not judged", "wrong"],
)
def test_length_has_its_own_part_in_the_reward(run, record, reward, said):
    run.add("abc_1", record | {"reward": reward, "reward_for_length": -0.25})
    assert f"reward     {said}" in run.explain("abc_1")


def test_paragraphs_are_those_of_the_scope_that_was_judged(run):
    (run.folder.root / "config.yaml").write_text("fapo:\n  judge:\n    scope: after_think\n")
    run.add("abc_1", JUDGED | {"solution": "<think>a\n\nb</think>c\n\nd"})
    assert ">> 1  d" in run.explain("abc_1")


@pytest.mark.parametrize("config", ["", "[]", "fapo: 7", "fapo: {judge: null}", "{", None])
def test_run_without_a_readable_config_is_explained_all_the_same(run, config):
    (run.folder.root / "config.yaml").unlink()
    if config is not None:
        (run.folder.root / "config.yaml").write_text(config)
    run.add("abc_1", JUDGED)
    assert ">> 1  Three and four is 9." in run.explain("abc_1")


def test_rollout_that_was_not_judged_says_that_its_texts_are_not_kept(run):
    run.add("abc_1", WRONG)
    assert any(line.startswith("texts      none: the run folder keeps") for line in run.explain("abc_1"))


@pytest.mark.parametrize("wanted", ["abc_1", "a_1", "abc_1"[:3] + "_1", "abd", "abd_0"])
def test_beginning_of_an_id_is_enough(run, wanted):
    run.add("abc_0", WRONG)
    run.add("abc_1", WRONG)
    run.add("abd_0", CLEAN)
    name = "abd_0" if wanted.startswith("abd") else "abc_1"
    assert run.explain(wanted)[0] == f"rollout    {name}, training, step 4"


def test_whole_id_that_begins_another_is_itself(run):
    run.add("abc_1", WRONG)
    run.add("abc_11", CLEAN)
    assert run.explain("abc_1")[0].startswith("rollout    abc_1,")


def test_beginning_of_several_names_them(run):
    for session in range(5):
        run.add(f"abc_{session}", WRONG)
    said = run.refused("ab")
    assert "'ab' is the beginning of 5 rollouts, expected one: abc_0, abc_1, abc_2, abc_3, ..." in said


@pytest.mark.parametrize("wanted", ["x", "abc_2", "_1", "c_1"])
def test_rollout_that_is_not_there_is_one_line(run, wanted):
    run.add("abc_1", WRONG)
    assert f"has no rollout {wanted!r}" in run.refused(wanted)


def test_without_a_rollout_the_latest_of_each_kind_are_listed(run):
    for session, record in enumerate([WRONG] * 5 + [JUDGED, CLEAN, UNKNOWN, CLEAN | {"validation": True}]):
        run.add(f"0123456789abc_{session}", record)
    run.folder.log_advantages(4, {"0123456789abc_5": -0.5})
    head, *rows, hint = run.explain()
    assert head.split() == ["rollout", "step", "reward", "advantage"]
    assert sorted(row.split()[0] for row in rows) == [f"01234567_{session}" for session in (2, 3, 4, 5, 6, 7, 8)]
    (flawed,) = (row for row in rows if row.startswith("01234567_5"))
    assert flawed.split(maxsplit=4) == ["01234567_5", "4", "0.000", "-0.500", "right, flawed at 1"]
    assert any(row.endswith("validation: right, clean") for row in rows)
    assert "verl-fapo explain" in hint


def test_for_programs_there_is_json(run):
    run.add("abc_1", JUDGED)
    run.folder.log_advantages(4, {"abc_1": -0.5})
    (line,) = run.explain("abc", "--json")
    explained = json.loads(line)
    assert explained["advantage"] == -0.5
    assert explained["paragraphs"] == ["Three.", "Three and four is 9.", "So \\boxed{7}."]
    assert JUDGED.items() <= explained.items()
    (line,) = run.explain("--json")
    assert json.loads(line)["id"] == "abc_1" and "critique" not in json.loads(line)


def test_text_of_a_model_does_not_steer_the_terminal(run):
    run.add("abc_1", JUDGED | {"critique": "\x1b[31mred", "answer": "\x1b]0;x\x07", "solution": "\x9b1A"})
    output = "\n".join(run.explain("abc_1"))
    assert not set(output) & set("\x1b\x07\x9b")


@pytest.mark.parametrize("missing", ["judged", "correct", "reward", "verdict", "method", "step"])
def test_record_of_another_shape_is_one_line(run, missing):
    run.add("abc_1", {key: value for key, value in JUDGED.items() if key != missing})
    assert f"a file of the run is damaged (KeyError({missing!r}))" in run.refused("abc_1")


def test_run_without_a_rollout_and_folder_without_a_run_are_one_line(run, tmp_path):
    assert "no rollout is scored yet" in run.refused()
    result = CliRunner().invoke(main, ["explain", str(tmp_path)])
    assert result.exit_code == 2 and "is no run folder" in result.output

from __future__ import annotations

import json

import pyarrow.parquet
import pytest
from click.testing import CliRunner

from verl_fapo.cli import main
from verl_fapo.run_folder import RolloutLog, RunFolder


@pytest.mark.parametrize(
    "command", [[], ["demo"], ["prepare"], ["report"], ["verdict"], ["template"], ["doctor"], ["explain"]]
)
def test_help_says_what_the_command_does(command):
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_report_shows_a_run_that_is_not_finished_and_finishes_it_only_when_told(tmp_path):
    run = RunFolder(tmp_path)
    run.open("", started_at=1000.0, resumed=False)
    run.log_metrics(1, {"training/global_step": 1, "fapo/accuracy": 0.5, "fapo/judged": 8, "timing_s/step": 3.25})
    values = {"step": 1, "validation": False, "correct": False, "judged": False, "verdict": None}
    RolloutLog(tmp_path).write({"id": "a_0", **values})
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "not finished" in result.output and "0.500" in result.output
    assert not (tmp_path / "summary.json").exists()
    result = CliRunner().invoke(main, ["report", "--finish", str(tmp_path)])
    assert "killed" in result.output and result.exit_code == 0
    assert json.loads((tmp_path / "summary.json").read_text())["rollouts"] == 1


def test_failure_text_is_shown_as_it_is(tmp_path):
    run = RunFolder(tmp_path)
    run.open("", started_at=1000.0, resumed=False)
    run.fail("JudgeError: bad files [/models/a] [red]")
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "[/models/a]" in result.output


def test_run_that_is_under_way_is_not_finished(tmp_path):
    run = RunFolder(tmp_path)
    run.open("", started_at=1000.0, resumed=False)
    with run.locked():
        result = CliRunner().invoke(main, ["report", "--finish", str(tmp_path)])
    assert result.exit_code == 2
    assert "another run writes to" in result.output


def test_folder_without_a_run_is_one_line_and_code_2(tmp_path):
    result = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert len(result.output.splitlines()) == 1
    assert "is no run folder" in result.output


def test_prepare_writes_what_verl_reads(tmp_path, shared_data):
    out = tmp_path / "gsm8k.parquet"
    arguments = ["prepare", "gsm8k", str(shared_data / "gsm8k_test.jsonl"), str(out), "--limit", "5"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "5 rows" in result.output
    assert pyarrow.parquet.read_table(out).num_rows == 5


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"question": null, "answer": "#### 7"}\n',
        '{"question": "?", "answer": "#### "}\n',
        "no json\n",
        "[]\n",
        '{"question": "?"}\n',
        '{"question": "?", "answer": 7}\n',
    ],
)
@pytest.mark.parametrize(("source", "name"), [("gsm8k", "GSM8K"), ("fapo_critic", "FAPO-Critic")])
def test_prepare_refuses_another_form_and_writes_nothing(tmp_path, source, name, text):
    (tmp_path / "in.jsonl").write_text(text)
    result = CliRunner().invoke(main, ["prepare", source, str(tmp_path / "in.jsonl"), str(tmp_path / "out.parquet")])
    assert result.exit_code == 2
    assert f"is no {name} file" in result.output or "no rows" in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "out.parquet").exists()


@pytest.mark.parametrize(
    ("prompt", "label", "total", "said"),
    [
        pytest.param('[{"content": "s"}, {"content": "?"}]', 0, 3, "one message", id="system message"),
        pytest.param('[{"content": "?"}]', -1, 0, "no index of its 0 paragraphs", id="no paragraphs"),
        pytest.param('[{"content": "\\ud800"}]', 0, 3, "parquet can not hold", id="lone surrogate"),
        pytest.param('[{"content": "?"}]', 10**30, 10**31, "parquet can not hold", id="number without end"),
    ],
)
def test_row_that_can_not_be_a_lesson_is_refused(tmp_path, prompt, label, total, said):
    row = f'"prompt": {prompt}, "reward_model": {{"ground_truth": {label}}}, "extra_info": {{"total_steps": {total}}}'
    (tmp_path / "in.jsonl").write_text(f"{{{row}}}\n")
    result = CliRunner().invoke(main, ["prepare", "fapo_critic", str(tmp_path / "in.jsonl"), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert said in result.output and len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "row"),
    [
        ("gsm8k", '{"question": "?", "answer": "#### 7"}'),
        (
            "fapo_critic",
            '{"prompt": [{"content": "?"}], "reward_model": {"ground_truth": 0}, "extra_info": {"total_steps": 1}}',
        ),
    ],
)
def test_blank_lines_are_none(tmp_path, source, row):
    (tmp_path / "in.jsonl").write_text(f"{row}\n\n{row}\n \n")
    result = CliRunner().invoke(main, ["prepare", source, str(tmp_path / "in.jsonl"), str(tmp_path / "out")])
    assert "2 rows" in result.output, result.output


@pytest.mark.parametrize("label", ["7", "-2", "true", '"0"', "0.0", "null"])
def test_label_that_is_no_paragraph_is_refused_with_its_row(tmp_path, label):
    row = '{"prompt": [{"content": "?"}], "reward_model": {"ground_truth": %s}, "extra_info": {"total_steps": 7}}\n'
    (tmp_path / "in.jsonl").write_text(row % "6" + row % label)
    result = CliRunner().invoke(main, ["prepare", "fapo_critic", str(tmp_path / "in.jsonl"), str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "row 2: ground_truth" in result.output


def test_demo_with_a_missing_file_is_one_line_and_code_2(tmp_path):
    arguments = ["demo", "--model", str(tmp_path), "--data", str(tmp_path / "no.parquet"), "--out", str(tmp_path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "no such file" in result.output

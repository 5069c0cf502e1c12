from __future__ import annotations

import json

import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner, Result

from verl_fapo.cli import main
from verl_fapo.critique import Verdict, join_critiques
from verl_fapo.critique_view import harmless
from verl_fapo.templates import BUILT_IN, read_template

ROW = {"problem": "p", "ground_truth": "7", "solution": "One.\n\nTwo\nlines.\n\nThree.", "critique": "So \\boxed{1}."}


def run(*arguments: object, rows: object = "") -> Result:
    text = rows if isinstance(rows, str) else "\n".join(json.dumps(row) for row in rows)
    return CliRunner().invoke(main, list(map(str, arguments)), input=text)


def test_wrong_paragraph_is_marked():
    result = run("verdict", "-", rows=[ROW])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "row 1: 3 paragraphs, flawed at 1, from the box '1'",
        "   0  One.",
        ">> 1  Two",
        ">>    lines.",
        "      ^ first wrong paragraph",
        "   2  Three.",
    ]


@pytest.mark.parametrize("rows", [ROW, [ROW], [ROW, ROW]], ids=["object", "list of one", "list of two"])
def test_json_over_several_lines_is_rows(tmp_path, rows):
    (tmp_path / "rows.json").write_text("\ufeff" + json.dumps(rows, indent=2), encoding="utf-8")
    output = run("verdict", tmp_path / "rows.json").output
    assert output.count("flawed at 1") == (1 if rows is ROW else len(rows))


def test_recorded_verdict_without_an_index_is_no_other_one():
    assert "recorded" not in run("verdict", "-", rows=[{**ROW, "verdict": "flawed"}]).output
    recorded = run("verdict", "--json", "-", rows=[{**ROW, "verdict": "unknown", "reason": "truncated"}]).output
    assert json.loads(recorded)["recorded"] == "unknown truncated"


def test_unknown_says_why_and_what_the_row_recorded():
    rows = [{**ROW, "critique": "\\boxed{x}", "verdict": "unknown", "index": None, "reason": "truncated"}]
    lines = run("verdict", "-", rows=rows).output.splitlines()
    assert lines[:2] == [
        "row 1: 3 paragraphs, unknown (no_index), from the box 'x'", "  recorded in the row: unknown truncated"
    ]  # fmt: skip


TEXTS = ["\\boxed{2}", "hm", "\\boxed{2}"]


@pytest.mark.parametrize(
    "critiques",
    [{"critiques": TEXTS}, {"critique": join_critiques(TEXTS, [Verdict(index=2)] * 3)}],
    ids=["list", "as recorded"],
)
def test_samples_are_told_apart_and_combined(critiques):
    lines = run("verdict", "-", rows=[{**ROW, **critiques}]).output.splitlines()
    assert lines[:4] == [
        "row 1: 3 paragraphs, flawed at 2",
        "  critique 1 of 3: flawed at 2, from the box '2'",
        "  critique 2 of 3: unknown (no_box)",
        "  critique 3 of 3: flawed at 2, from the box '2'",
    ]


def test_json_is_a_line_a_row():
    result = run("verdict", "--json", "-", rows=[ROW, {**ROW, "critique": ""}])
    first, second = map(json.loads, result.output.splitlines())
    assert (first["row"], first["num_paragraphs"], first["verdict"], first["index"]) == (1, 3, "flawed", 1)
    assert (second["row"], second["verdict"], second["reason"], second["box"]) == (2, "unknown", "no_box", None)


def test_scope_and_prompt():
    rows = [{**ROW, "solution": "<think>a\n\nb</think>\n\nc"}]
    assert "1 paragraphs, unknown (out_of_range)" in run("verdict", "--scope", "after_think", "-", rows=rows).output
    assert run("verdict", "--prompt", "raw", "-", rows=[ROW]).output == (
        BUILT_IN["raw"].render("p", "7", ["One.", "Two\nlines.", "Three."]) + "\n"
    )


def test_text_of_a_model_can_not_steer_the_terminal():
    assert harmless("a\x1b[31m\r\x07\u202e\x9b\ud800\u2028\n\tb") == "a\\x1b[31m\\r\\x07\\u202e\\x9b\\ud800\\u2028\n\tb"
    rows = [{**ROW, "solution": "a\x1b[2J", "critique": "\\boxed{\x1b[31m}"}]
    assert "\x1b" not in run("verdict", "-", rows=rows).output


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param("", "<stdin>: no rows", id="empty"),
        pytest.param(json.dumps(ROW) + "\n{", "<stdin>: row 2: no JSON", id="no JSON"),
        pytest.param("[" * 100_000, "row 1: no JSON", id="bomb"),
        pytest.param("[1]", "row 1: '1' is no JSON object", id="list"),
        pytest.param([{"critique": ""}], "row 1: no key 'solution'; the row has 'critique'", id="no solution"),
        pytest.param([{"solution": "a"}], "row 1: no key 'critique'; the row has 'solution'", id="no critique"),
        pytest.param([{**ROW, "critique": 7}], "row 1: critique is 7, expected text", id="number"),
        pytest.param([ROW, {**ROW, "critiques": [1]}], "row 2: critiques is '[1]', expected a list", id="critiques"),
    ],
)
def test_row_that_is_none_is_one_line_and_code_2(rows, said):
    result = run("verdict", "-", rows=rows)
    assert result.exit_code == 2
    assert said in result.output.splitlines()[-1]


def test_file_that_is_no_text_is_one_line_and_code_2(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    for arguments in (["verdict", tmp_path / "x"], ["template", tmp_path / "x", tmp_path / "out"]):
        result = run(*arguments)
        assert result.exit_code == 2 and len(result.output.splitlines()) == 1 and "UTF-8" in result.output


def critic_rows(*steps: str) -> list[dict]:
    prompt = BUILT_IN["paragraphs"].render("p", "7", ["a", "b"])
    return [{"prompt": [{"role": "user", "content": prompt.replace("\nb\n", f"\n{step}\n")}]} for step in steps]


def test_template_is_written_and_read_back(tmp_path):
    rows, out = tmp_path / "critic.parquet", tmp_path / "t.txt"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(critic_rows("b", "<s>")), rows)
    result = run("template", rows, out)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        f"{out}: all 2 prompts are made again from it, byte for byte",
        "in 1 of them, lines that imitate the prompt would be escaped now",
    ]
    assert read_template(str(out)) == BUILT_IN["paragraphs"]


def test_template_of_fapo_critic(tmp_path, shared_data):
    result = run("template", shared_data / "fapo_critic_sample.jsonl", tmp_path / "t.txt")
    assert result.output == f"{tmp_path / 't.txt'}: all 100 prompts are made again from it, byte for byte\n"
    assert "\n[Ground Truth]\n\n{reference}\n" in (tmp_path / "t.txt").read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("x.jsonl", "{", "row 1: no JSON"),
        ("x.jsonl", "", "no prompts"),
        ("x.jsonl", '{"prompt": "hello"}', "row 1: no message in 'prompt'"),
        ("x.jsonl", '{"prompt": [{"content": 1}]}', "row 1: the message is '1'"),
        ("x.jsonl", '{"prompt": [{"content": "hello"}]}', "row 1: no paragraphs"),
        ("x.parquet", "hello", "no parquet file"),
    ],
)
def test_file_without_a_template_is_one_line_and_code_2(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    result = run("template", tmp_path / name, tmp_path / "out")
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1
    assert said in result.output and not (tmp_path / "out").exists()

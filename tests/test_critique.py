from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fapo.critique import (
    UnknownReason,
    Verdict,
    combine_verdicts,
    join_critiques,
    parse_verdict,
    split_critiques,
    split_paragraphs,
)

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM = 8
CLEAN = [
    r"\boxed{-1}", r"\boxed{ -1 }", r"\boxed{-1.}", r"\boxed{- 1}", r"\boxed{\text{-1}}", r"\boxed{-1.0}",
    "\\boxed{\u22121}", "\\boxed{\u20131}", "\\boxed{\u20111}", "\\boxed{\uff0d\uff11}", r"$\boxed{-1}$",
    r"\boxed{-1 (not found)}", r"\boxed{-1 \text{ (no error)}}", r"\boxed{index -1}", r"\boxed{index = -1}",
    r"\boxed -1", r"\boxed{\boxed{-1}}", r"\boxed{$\fbox{-1}$}", r"\boxed{-1 (none)}", r"\boxed{-1 (no errors found)}",
    r"\boxed{-1 (all paragraphs are correct)}", r"\boxed{-1 (clean)}",
]  # fmt: skip
AT_3 = [
    r"\boxed{3}", r"\boxed{3}.", r"\[ \boxed{3} \]", r"\boxed{03}", r"\boxed{+3}", r"\boxed{3.0}", r"\boxed{3.}",
    r"\boxed{paragraph 3}", r"\boxed{Paragraph 3}", r"\boxed{paragraph_3}", r"\boxed{\text{paragraph\_3}}",
    r"\boxed{<paragraph_3>}", r"\boxed{</paragraph_3>}", r"\boxed{\texttt{<paragraph\_3>}}", r"\boxed{paragraph-3}",
    r"\boxed{paragraph: 3}", r"\boxed{paragraph #3}", r"\boxed{index 3}", r"\boxed{\#3}", r"\boxed{\textbf{3}}",
    r"\boxed{\mathrm{3}}", r"\boxed{{3}}", r"\boxed{\boxed{3}}", r"\boxed{\(3\)}", r"\boxed{$3$}", r"\boxed{\{3\}}",
    r'\boxed{"3"}', r"\boxed{`3`}", r"\boxed{**3**}", r"\boxed{[3]}", r"\boxed{(3)}", "\\boxed{\uff13}",
    r"\boxed{3 (sign error)}", r"\boxed 3", r"\boxed  {3}", r"\fbox{3}", r"\\boxed{3}", r"\boxed{3, 5}", r"\boxed{5,3}",
    r"\boxed{3 and 5}", r"\boxed{3, 4, and 5}", r"\boxed{paragraphs 3 and 5}", r"\boxed{3} in \boxed.",
    r"\boxed{\text{\boxed{3}}}", r"\boxed{\boxed{\boxed 3}}", r"\boxed{3 (incorrect sum)}", "\\boxed\n{3}",
]  # fmt: skip
UNKNOWN = {
    UnknownReason.NO_BOX: [
        "", "no box", "Internal Server Error", r"\boxedfoo{3}", r"boxed{3}", r"in \boxed, 3",
        "\\boxed\n3",
    ],
    UnknownReason.NO_INDEX: [
        r"\boxed{}", r"\boxed{ }", r"\boxed{x}", r"\boxed{none}", r"\boxed{2.5}", r"\boxed{1/2}", r"\boxed{\frac12}",
        r"\boxed{3-5}", r"\boxed{1e0}", r"\boxed{step 3}", r"\boxed{3 or 5}", r"\boxed{3 or -1}", r"\boxed{3, -1}",
        r"\boxed{3, 50}", r"\boxed{(3, 5)}", r"\boxed{3 5}", r"\boxed{{3}{5}}", r"\boxed{-0}", r"\boxed{paragraph-1}",
        "\\boxed{3\u00b2}", "\\boxed{\u0663}", "\\boxed{\u2462}", r"\boxed{__import__('os')}", r"\boxed{3} \boxed{}",
        r"\boxed{" + "1" * 300 + "}", r"\boxed{paragraph 3 is wrong}", r"\boxed{\text{not }\boxed{-1}}",
        r"\boxed{\boxed{-1}, \boxed{3}}", r"\boxed{3 \boxed{5}}", r"\boxed{not " + "a" * 300 + r" \boxed{-1}}",
        r"\boxed{-1 (not all)}", r"\boxed{-1 (not correct)}", r"\boxed{-1 (sign error)}", r"\boxed{-1 (maybe)}",
        r"\boxed{3 (no error)}", r"\boxed{3 (no_error)}", r"\boxed{3 (one-based)}", r"\boxed{3 (correct)}",
        r"\boxed{3 (maybe)}", r"\boxed{3 (not wrong)}",
    ],
    UnknownReason.OUT_OF_RANGE: [
        r"\boxed{8}", r"\boxed{-2}", r"\boxed{204}", r"\boxed{1,000}", r"\boxed{99999999999999999999}",
        r"\boxed{9} and \boxed{8}", r"\boxed{paragraph-12}",
    ],
    UnknownReason.TRUNCATED: [
        r"\boxed{3", r"\boxed{2} \boxed{3", r"\boxed{\text{3}", r"so \boxed", r"<think>\boxed{3}",
        "\n <think> \\boxed{3}", r"\boxed{3\}", "\ufeff\u200b<think>\\boxed{3}", r"\boxed{3} <think> \boxed{2}",
        r"<think>a</think> <THINKING> \boxed{3}", r"<seed:think>\boxed{3}", r"[THINK]\boxed{3}",
        r"<|channel|>analysis<|message|>\boxed{3}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("text", CLEAN)
def test_spellings_of_clean(text):
    assert parse_verdict(text, num_paragraphs=NUM) == Verdict(index=-1)


@pytest.mark.parametrize("text", AT_3)
def test_spellings_of_an_index(text):
    assert parse_verdict(text, num_paragraphs=NUM) == Verdict(index=3)


@pytest.mark.parametrize(("reason", "text"), [(reason, text) for reason, texts in UNKNOWN.items() for text in texts])
def test_what_is_no_verdict(reason, text):
    assert parse_verdict(text, num_paragraphs=NUM) == Verdict(reason=reason)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        pytest.param("<think>\\boxed{0}</think> \\boxed{1}", 1, id="after the thinking block"),
        pytest.param("<think>a</think>b</think>\\boxed{2}", 2, id="after the last thinking block"),
        pytest.param("<thinking>\\boxed{0}</Thinking> \\boxed{1}", 1, id="thinking"),
        pytest.param("<seed:think>\\boxed{0}</seed:think>\\boxed{1}", 1, id="Seed's"),
        pytest.param("[THINK]\\boxed{0}[/THINK]\\boxed{1}", 1, id="Mistral's"),
        pytest.param("<|channel|>analysis a<|end|><|channel|>final<|message|>\\boxed{1}", 1, id="gpt-oss's"),
        pytest.param("\\boxed{0} no, \\boxed{2}", 2, id="last of two"),
        pytest.param("\\boxed{-1}\n\nThe solution boxed \\boxed{204}.", -1, id="final answer quoted again"),
        pytest.param("\\boxed{2}, and it boxed \\boxed{1,024}", 2, id="one with thousands"),
        pytest.param("\\boxed{2} \\boxed{x} \\boxed{-7}", 2, id="last in range before it"),
        pytest.param("\\boxed{the set \\{ of \\boxed{3}", 3, id="closed box in one that is not"),
        pytest.param("\\boxed{" + "a" * 10_000 + "} so \\boxed{0}", 0, id="long box before it"),
    ],
)
def test_last_box_decides(text, index):
    assert parse_verdict(text, num_paragraphs=NUM).index == index


def test_box_only_in_thoughts_is_none():
    verdict = parse_verdict("<think>\\boxed{0}</think> done", num_paragraphs=NUM)
    assert verdict == Verdict(reason=UnknownReason.NO_BOX)


def test_verdict_holds_the_box_that_decided():
    assert parse_verdict("\\boxed{ paragraph 3 } \\boxed{99}", num_paragraphs=NUM).box == "paragraph 3"
    assert parse_verdict("\\boxed{x y}", num_paragraphs=NUM).box == "x y"


@pytest.mark.parametrize("num_paragraphs", [0, 1, 2])
def test_range_is_that_of_the_paragraphs(num_paragraphs):
    verdicts = [parse_verdict(f"\\boxed{{{i}}}", num_paragraphs=num_paragraphs) for i in range(-1, 3)]
    assert [verdict.index for verdict in verdicts] == [i if i < num_paragraphs else None for i in range(-1, 3)]


def test_real_verdicts(shared_data):
    rows = [json.loads(line) for line in (shared_data / "verdicts_visible.jsonl").read_text("utf-8").splitlines()]
    assert len(rows) == 112
    for row in rows:
        verdict = parse_verdict(row["text"], num_paragraphs=row["num_paragraphs"])
        found = {"kind": verdict.kind, "index": verdict.index if verdict.kind == "flawed" else None}
        assert found == row["expected"], row["id"]


def table_of_docs(heading: str) -> list[list[str]]:
    section = (DOCS / "judge.md").read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| \n").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_spellings_in_the_docs_have_the_verdict_that_is_told_there():
    spelled = 0
    for spellings, told in table_of_docs("Verdicts"):
        for text in re.findall(r"`([^`]+)`", spellings):
            box = text if text.startswith("\\boxed{3") and text != "\\boxed{3}" else f"\\boxed{{{text}}}"
            verdict = parse_verdict(box, num_paragraphs=8)
            assert str(verdict) in told or f"{verdict.kind} (`{verdict.reason}`)" in told, text
            spelled += 1
    assert spelled > 40


def test_docs_tell_every_reason():
    assert [row[0].strip("`") for row in table_of_docs("Unknown")] == [reason.value for reason in UnknownReason]


PIECES = st.sampled_from([
    "\\boxed", "\\fbox", "{", "}", "\\", "-1", "3", " ", "\n", "<think>", "</think>", "\\text{", ",", "paragraph_", "(",
    "\u2212", "\uff13", "\u00b2", "9" * 30, "\r", "$", "#", "_",
])  # fmt: skip


@given(st.lists(PIECES | st.text(max_size=3)).map("".join), st.integers(0, 5))
def test_any_text_has_a_verdict_in_range_or_a_reason(text, num_paragraphs):
    verdict = parse_verdict(text, num_paragraphs=num_paragraphs)
    assert (verdict.index is None) == (verdict.reason is not None)
    assert verdict.index is None or -1 <= verdict.index < num_paragraphs


@given(st.text(), st.integers(-1, 4))
def test_plain_box_at_the_end_decides_whatever_stands_before(text, index):
    closed = text.replace("<think>", "")
    assert parse_verdict(f"{closed}\n\\boxed{{{index}}}", num_paragraphs=5).index == index


DEGENERATE = {
    "open boxes": "\\boxed{" * 140_000,
    "boxes out of range": "\\boxed{99}" * 100_000,
    "bare boxes": "\\boxed 9" * 120_000,
    "braces": "\\boxed{" + "{" * 1_000_000,
    "many indices and no end": "\\boxed{" + "42; " * 60 + "x}",
    "backslashes": "\\" * 1_000_000,
    "blanks in a command": "\\boxed" + " " * 1_000_000,
    "boxes in boxes": "\\boxed{" * 100_000 + "}" * 100_000,
    "thinking": "<think></think>" * 70_000,
    "thinking that is never closed": "<think>" * 140_000,
    "blank lines": "\n \n" * 330_000,
    "blanks": "\n" + " " * 1_000_000,
}


@pytest.mark.timeout(60)  # linear time is a fraction of a second, quadratic time many minutes
@pytest.mark.parametrize("text", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_text_takes_linear_time(text):
    parse_verdict(text, num_paragraphs=3)
    split_paragraphs(text, scope="after_think")


@pytest.mark.parametrize(
    ("solution", "paragraphs"),
    [
        pytest.param("a\n\nb\nc\n \t\n\nd\n", ["a", "b\nc", "d"], id="blank lines cut"),
        pytest.param("a\r\n\r\nb\r\nc", ["a", "b\r\nc"], id="carriage returns"),
        pytest.param("a\n\x0c\nb\n\u2028\u3000\nc", ["a", "b", "c"], id="form feed and Unicode blanks are blank"),
        pytest.param(
            "a\x0c\x0cb\u2029\u2029c\r\rd", ["a\x0c\x0cb\u2029\u2029c\r\rd"], id="only a line feed ends a line"
        ),
        pytest.param(" \n\n", [], id="nothing but blanks"),
        pytest.param("", [], id="empty"),
        pytest.param("\n\n".join(map(str, range(300))), list(map(str, range(300))), id="hundreds"),
    ],
)
def test_split_paragraphs(solution, paragraphs):
    assert split_paragraphs(solution) == paragraphs


@pytest.mark.parametrize(
    ("solution", "paragraphs"),
    [
        pytest.param("<think>a\n\nb</think>\n\nc\n\nd", ["c", "d"], id="closed"),
        pytest.param("a</think>b</think>c", ["b</think>c"], id="after the first one"),
        pytest.param("<think>a</think>b\n\n</think>c", ["b", "</think>c"], id="a second closing hides nothing"),
        pytest.param("\ufeff\n<Thinking>a\n\nb</THINKING>c", ["c"], id="other spelling"),
        pytest.param("[THINK]a[/THINK]c", ["c"], id="other brackets"),
        pytest.param("a<think>b</think>c", ["a<think>b</think>c"], id="opened after some text is all"),
        pytest.param("a</think>b<think>c</think>d", ["b<think>c</think>d"], id="opened once more"),
        pytest.param("<think>a\n\nb", ["<think>a", "b"], id="never closed is all"),
        pytest.param("<think>a</think>\n", ["<think>a</think>"], id="nothing after it is all"),
        pytest.param("a\n\nb", ["a", "b"], id="no thinking"),
    ],
)
def test_scope_after_think(solution, paragraphs):
    assert split_paragraphs(solution, scope="after_think") == paragraphs


@given(st.lists(st.sampled_from(["a", "b ", "\n", "\r\n", " ", "\t", "\x0c", "\u2028", "\x85", "\x1c"])).map("".join))
def test_split_loses_nothing_and_leaves_no_blank_line(solution):
    paragraphs = split_paragraphs(solution)
    assert "".join("".join(paragraphs).split()) == "".join(solution.split())
    for paragraph in paragraphs:
        assert paragraph == paragraph.strip() != ""
        assert all(line.strip() for line in paragraph.split("\n"))


def verdict_of(spelled: int | str) -> Verdict:
    return Verdict(index=spelled) if isinstance(spelled, int) else Verdict(reason=UnknownReason(spelled))


@pytest.mark.parametrize(
    ("verdicts", "combined"),
    [
        pytest.param([2], 2, id="one"),
        pytest.param([-1, -1, 3], -1, id="clean"),
        pytest.param([-1, 3, 4], 3, id="flawed, the earliest of equals"),
        pytest.param([5, 4, 4, 1], 4, id="most frequent index"),
        pytest.param([-1, 2], "tie", id="tie"),
        pytest.param(["no_box", 2, 2], 2, id="unknown has no vote"),
        pytest.param(["no_box", "no_box", -1], "no_box", id="one vote of three is too few"),
        pytest.param([2, 2, "no_box", "truncated"], "no_box", id="half the votes are too few"),
        pytest.param(["no_box", -1, 2], "tie", id="unknown breaks no tie"),
        pytest.param(["truncated", "no_box", "no_box"], "no_box", id="most frequent reason"),
        pytest.param(["truncated", "no_box"], "truncated", id="first reason of equals"),
        pytest.param([], "unreachable", id="none"),
    ],
)
def test_majority_decides(verdicts, combined):
    assert combine_verdicts([verdict_of(spelled) for spelled in verdicts]) == verdict_of(combined)


HEADERS = ["--- critique 2 of 2, 1 characters: clean ---\n", "--- critique 1 of 1, 3 characters: clean ---\nabc"]


@given(st.lists(st.text() | st.sampled_from(HEADERS), min_size=1, max_size=4))
def test_joined_critiques_come_apart_again(critiques):
    verdicts = [Verdict(index=i) for i in range(len(critiques))]
    assert split_critiques(join_critiques(critiques, verdicts)) == critiques


@given(st.text() | st.lists(st.sampled_from(["--- critique 1 of 2, 3 characters: x ---\n", "abc\n", "a"])).map("".join))
def test_any_text_is_at_least_one_critique(text):
    assert split_critiques(text)

from __future__ import annotations

import pytest

from verl_fapo.answers import last_box, verify

BOXES = [
    pytest.param("so \\boxed{7}.", "7", id="plain"),
    pytest.param("\\boxed{1} then \\boxed{2}", "2", id="the last of two"),
    pytest.param("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", id="nested braces"),
    pytest.param("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", id="escaped braces"),
    pytest.param("\\fbox{7}", "7", id="fbox"),
    pytest.param("\\boxed {\n7 }", "7", id="blanks"),
    pytest.param("\\boxed{}", "", id="empty"),
    pytest.param("\\boxed{1} and \\boxed{2", None, id="an unclosed last box hides the one before"),
    pytest.param("\\boxed", None, id="no braces"),
    pytest.param("7", None, id="no box"),
]


@pytest.mark.parametrize(("text", "box"), BOXES)
def test_last_box(text, box):
    assert last_box(text) == box


ANSWERS = [
    # answer, reference, correct
    pytest.param("72", "72", True, id="integer"),
    pytest.param("1,000", "1000", True, id="thousands"),
    pytest.param("0.5", "\\frac{1}{2}", True, id="decimal and fraction"),
    pytest.param("1/2", "\\dfrac{1}{2}", True, id="two spellings of a fraction"),
    pytest.param("-\\frac{3}{4}", "-0.75", True, id="negative fraction"),
    pytest.param("\\$18", "18", True, id="money"),
    pytest.param(" 7. ", "7", True, id="full stop"),
    pytest.param("x + 1", "x+1", True, id="blanks in text"),
    pytest.param("1 2", "12", False, id="two numbers are not one"),
    pytest.param("1  2", "12", False, id="two numbers with two blanks between"),
    pytest.param("1\n\n2", "12", False, id="two numbers on two lines"),
    pytest.param("1\\ 2", "12", False, id="two numbers with a LaTeX space between"),
    pytest.param("1\\,000", "1000", True, id="thin space for thousands"),
    pytest.param("1{,}000", "1000", True, id="LaTeX comma for thousands"),
    pytest.param("2 \\, 3", "23", False, id="thin space that is not for thousands"),
    pytest.param("1,2", "12", False, id="a tuple is no number"),
    pytest.param("1/0", "1/0", True, id="no number, the same text"),
    pytest.param("7", "8", False, id="other number"),
    pytest.param("", "", False, id="an empty box is no answer"),
    pytest.param(".", "", False, id="nothing but a full stop"),
    pytest.param("9" * 5000, "9" * 5001, False, id="huge numbers"),
]


@pytest.mark.parametrize(("answer", "reference", "correct"), ANSWERS)
def test_verify(answer, reference, correct):
    assert verify(f"Then.\n\n\\boxed{{{answer}}}", reference).correct is correct


def test_solution_without_a_box_is_wrong():
    assert not verify("It is 7.", "7").correct

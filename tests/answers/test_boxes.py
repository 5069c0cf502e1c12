from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fapo.answers import final_answer

ANSWERS = [
    pytest.param("so \\boxed{7}.", "7", id="plain"),
    pytest.param("\\boxed{1} then \\boxed{2}", "2", id="the last of two"),
    pytest.param("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", id="nested braces"),
    pytest.param("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", id="escaped braces"),
    pytest.param(
        "\\boxed{\\begin{matrix} 1 \\\\ {2} \\end{matrix}}", "\\begin{matrix} 1 \\\\ {2} \\end{matrix}", id="rows"
    ),
    pytest.param("\\boxed{185\\}.", "185\\", id="a closing brace that only looks escaped"),
    pytest.param("\\fbox{7}", "7", id="fbox"),
    pytest.param("\\boxed {\n7 }", "7", id="blanks and line breaks"),
    pytest.param("\\boxed 5", "5", id="without braces"),
    pytest.param("\\boxed -42, as said", "-42", id="several digits without braces"),
    pytest.param("\\boxedfoo{5}", None, id="another command"),
    pytest.param("\\boxed{5} and \\boxedfoo{6}", "5", id="another command behind"),
    pytest.param("\\boxed{6 + \\boxed{5}}", "6 + \\boxed{5}", id="the outer of nested boxes"),
    pytest.param("\\boxed{5}" + " and so on" * 200, "5", id="a long way from the end"),
    pytest.param("\\boxed{}", "", id="empty"),
    pytest.param("\\boxed{5} \\boxed{ }", "", id="an empty last box hides the one before"),
    pytest.param("\\boxed{1} and \\boxed{2", None, id="an unclosed last box hides the one before"),
    pytest.param("\\boxed", None, id="no braces"),
    pytest.param("\\boxed{5}, in \\boxed as you said", "5", id="mentioned behind"),
    pytest.param("\\boxed B", "B", id="a letter without braces"),
    pytest.param("\\boxed{" + "1" * 60_000 + "}", None, id="endless"),
    pytest.param("7", None, id="no box"),
    pytest.param("\\boxed{2}, \\boxed{3} and $\\boxed{5}$", "2, 3, 5", id="a run"),
    pytest.param("\\boxed{2}\\quad\\text{and}\\quad\\boxed{3}", "2, 3", id="a run in LaTeX"),
    pytest.param("\\boxed{1}. Also \\boxed{2}, \\boxed{3}", "2, 3", id="the last run"),
    pytest.param("\\boxed{2}\\boxed{3}", "3", id="side by side is no run"),
    pytest.param("\\boxed{2} or \\boxed{3}", "3", id="alternatives are no run"),
    pytest.param("\\boxed{2}, \\boxed{}", "", id="an empty box behind a comma"),
    pytest.param("\\boxed{5}, \\boxed{5}", "5", id="said twice"),
    pytest.param("<think>\\boxed{1}</think> \\boxed{2}", "2", id="after the thinking block"),
    pytest.param("<think>\\boxed{1}</think> two", None, id="only in the thinking block"),
    pytest.param(" <think>is it \\boxed{1}", None, id="in thoughts without an end"),
    pytest.param("thought \\boxed{1}</think>\\boxed{2}", "2", id="a block that the chat template opened"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


PARTS = ["\\boxed", "\\fbox", "{", "}", "\\", ",", " ", "and", "5", "x", "\\}", "<think>", "</think>"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
def test_answer_is_made_of_what_stands_in_the_text(text):
    answer = final_answer(text)
    assert answer is None or all(part in text for part in answer.split(", "))


DEGENERATE = [
    "\\boxed{",
    "\\boxed{1},",
    "\\boxedx",
    "\\fbox",
    "{",
    "\\boxed ",
    "\\",
    "a ",
    "\\boxed{}",
    "\\boxed{{}",
    "π",
]


@pytest.mark.timeout(60)  # linear time is a fraction of a second, quadratic time many minutes
@pytest.mark.parametrize("part", DEGENERATE)
def test_degenerate_text_takes_linear_time(part):
    final_answer(part * (1_000_000 // len(part)) + "\\boxed{5}")

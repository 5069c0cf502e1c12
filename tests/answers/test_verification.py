from __future__ import annotations

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import read_lines
from verl_fapo.answers import Method, comparison, verify
from verl_fapo.settings import AnswerSettings

CORPUS = Path(__file__).with_name("corpus.jsonl")


def boxed(answer: str) -> str:
    return f"Then.\n\n\\boxed{{{answer}}}"


def test_corpus():
    """Answers from public test suites and bug reports (``source``), and made to fool; see docs/answers.md."""
    wrong = [
        row for row in read_lines(CORPUS) if verify(row["prediction"], row["ground_truth"]).correct != row["correct"]
    ]
    assert wrong == []


def test_every_visible_answer_is_right(shared_data):
    rows = read_lines(shared_data / "answers_visible.jsonl")
    ordered = AnswerSettings(ordered=True)  # the convention of this one row
    wrong = []
    for row in rows:
        expected = row["leaning"] if row["expected"] == "contract" else row["expected"]
        options = ordered if row["id"] == "con-01" else AnswerSettings()
        if verify(row["prediction"], row["ground_truth"], options=options).correct != expected:
            wrong.append(row)
    assert wrong == [] and len(rows) == 85


def test_real_rollouts_are_scored_as_their_labels_say(shared_data):
    rows = read_lines(shared_data / "rollouts_math.jsonl")
    wrong = [row["id"] for row in rows if verify(row["response"], row["ground_truth"]).correct != row["correct"]]
    assert wrong == []


def test_reference_solutions_are_right(shared_data):
    rows = read_lines(shared_data / "math500.jsonl")
    assert [row["unique_id"] for row in rows if not verify(row["solution"], row["answer"]).correct] == []


OPTIONS = [
    # option, its other value, answer, reference, right by default, right with the other value
    pytest.param("units", "required", "35 cm", "35", True, False, id="unit left out"),
    pytest.param("units", "required", "35 cm", "35\\text{ centimeters}", True, True, id="two names of a unit"),
    pytest.param("units", "required", "35 cm", "35 m", False, False, id="another unit"),
    pytest.param("units", "required", "72 degrees", "72", True, False, id="degrees left out"),
    pytest.param("units", "required", "\\$5", "5", True, False, id="money"),
    pytest.param("percent", "required", "10\\%", "10", True, False, id="percent left out"),
    pytest.param("percent", "required", "10\\%", "0.1", True, False, id="percent is hundredths, required"),
    pytest.param("percent", "fraction", "10\\%", "0.1", True, True, id="percent is hundredths"),
    pytest.param("percent", "fraction", "10\\%", "10", True, False, id="percent is only hundredths"),
    pytest.param("base_suffix", "required", "2516", "2516_8", True, False, id="base left out"),
    pytest.param("base_suffix", "required", "2516_8", "2516_{9}", False, False, id="another base"),
    pytest.param("decimals", 1, "33.3", "\\frac{100}{3}", False, True, id="rounded"),
    pytest.param(
        "decimals", 2, "(0.6,2.6667]", "(\\frac{3}{5},\\frac{8}{3}]", False, True, id="rounded in an interval"
    ),
    pytest.param("decimals", 2, "1.41", "\\sqrt{2}", False, True, id="rounded root"),
    pytest.param("decimal_digits", 6, "0.333333", "\\frac13", False, True, id="a shorter decimal"),
    pytest.param("decimal_digits", 20, "0.0833333333333333", "\\frac{1}{12}", True, False, id="a long decimal"),
    pytest.param("decimal_comma", False, "3,14", "3.14", True, False, id="decimal comma"),
    pytest.param("decimal_comma", False, "3,140", "3.14", False, False, id="comma of thousands"),
    pytest.param("mixed_numbers", False, "918\\frac{1}{2}", "918.5", True, False, id="mixed number"),
    pytest.param("relations_as_intervals", False, "0 < x < 12.5", "(0, 12.5)", True, False, id="relation as interval"),
    pytest.param("equivalent_equations", False, "y = 2x + 1", "2x - y + 1 = 0", True, False, id="equivalent equations"),
    pytest.param("ordered", True, "1, -2", "-2, 1", True, False, id="order of a list"),
    pytest.param("ordered", True, "\\{1, -2\\}", "\\{-2, 1\\}", True, True, id="order of a set"),
    pytest.param("letter_with_text", False, "C: a polygenic score", "C", True, False, id="letter with its text"),
]


@pytest.mark.parametrize(("option", "other", "answer", "reference", "by_default", "otherwise"), OPTIONS)
def test_matter_of_contract(option, other, answer, reference, by_default, otherwise):
    assert verify(boxed(answer), reference).correct is by_default
    assert verify(boxed(answer), reference, options=AnswerSettings(**{option: other})).correct is otherwise


def test_every_option_is_in_the_table():
    shown = {case.values[0] for case in OPTIONS}
    assert shown == set(AnswerSettings.model_fields) - {"timeout_seconds"}


METHODS = [
    pytest.param("7", "7", Method.TEXT, id="text"),
    pytest.param("007", "8", Method.TEXT, id="integers"),
    pytest.param("1/2", "0.5", Method.RULES, id="rules"),
    pytest.param("\\sqrt{8}", "2\\sqrt{2}", Method.SYMBOLIC, id="symbolic"),
    pytest.param("9^{9^{9^9}}", "5", Method.UNDECIDED, id="endless"),
    pytest.param("", "5", Method.NO_ANSWER, id="no answer"),
]


@pytest.mark.parametrize(("answer", "reference", "method"), METHODS)
def test_method_says_how_it_was_decided(answer, reference, method):
    options = AnswerSettings(timeout_seconds=1)
    assert verify(boxed(answer), reference, options=options).method is method


@pytest.mark.parametrize("reference", ["\\boxed{7}", "$7$", " 7.0 ", "7."])
def test_reference_may_be_dressed(reference):
    assert verify(boxed("7"), reference).correct


PIECES = [
    *(
        "\\frac",
        "\\sqrt",
        "\\text{",
        "\\pm",
        "\\cup",
        "\\le ",
        "\\left",
        "\\infty",
        "\\circ",
        "\\pi",
        "\\{",
        "\\}",
        "\\\\",
    ),
    *(
        "\\begin{pmatrix}",
        "\\end{pmatrix}",
        "²",
        "½",
        "∞",
        " and ",
        "cm",
        "1",
        "2",
        "x",
        " ",
        *"{}[]()=,^_%$<!.-+/&:|'",
    ),
]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.lists(st.sampled_from(PIECES), max_size=10).map("".join),
)
def test_any_text_is_compared_without_error_and_either_way_round(answer, reference):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison.WORKER, "ask", lambda *args, **kwargs: None)
        there = verify(boxed(answer), reference)
        assert there.correct in (True, False)
        if there.answer == answer.strip() and "boxed" not in reference:
            assert verify(boxed(reference), answer).correct in (there.correct, False) or not there.correct


@given(st.fractions(max_denominator=10_000), st.fractions(max_denominator=10_000))
def test_rational_numbers_are_equal_as_fractions_are(a, b):
    def spellings(value):
        sign, top, bottom = "-" * (value < 0), abs(value.numerator), value.denominator
        return [
            f"{value.numerator}/{bottom}",
            f"{sign}\\frac{{{top}}}{{{bottom}}}",
            f"{sign}\\dfrac{{{3 * top}}}{{{3 * bottom}}}",
        ]

    for one in spellings(a):
        for other in spellings(b):
            assert verify(boxed(one), other).correct is (a == b)


@given(st.integers(-(10**12), 10**12), st.integers(0, 4))
def test_decimals_and_thousands_are_exact(value, places):
    number = f"{value / 10**places:.{places}f}" if value < 2**50 else str(value)
    grouped = f"{value:,}"
    assert verify(boxed(grouped), str(value)).correct
    assert not verify(boxed(grouped), str(value + 1)).correct
    assert verify(boxed(number + "0" * 3 if "." in number else number), number).correct


def test_threads_and_event_loops_share_one_process_of_math_verify():
    cases = [(f"\\sqrt{{{n * n * 2}}}", f"{n}\\sqrt{{2}}") for n in range(2, 22)]
    cases += [(f"\\sqrt{{{n * n * 2}}}", f"{n + 1}\\sqrt{{2}}") for n in range(2, 22)]
    expected = [True] * 20 + [False] * 20

    async def all_at_once():
        return await asyncio.gather(*(asyncio.to_thread(verify, boxed(a), b) for a, b in cases))

    with ThreadPoolExecutor(8) as pool:
        assert [v.correct for v in pool.map(lambda case: verify(boxed(case[0]), case[1]), cases)] == expected
    assert [v.correct for v in asyncio.run(all_at_once())] == expected


def test_model_text_is_never_run(tmp_path):
    target = tmp_path / "made"
    for code in (f"__import__('os').mkdir('{target}')", f"exec(\"import os; os.mkdir('{target}')\")"):
        assert not verify(boxed(code), "5").correct
        assert not verify(boxed("x+1"), code).correct
    assert not target.exists()


def test_forked_process_has_a_math_verify_of_its_own():
    assert verify(boxed("\\sqrt{18}"), "3\\sqrt{2}").correct
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(verify(boxed("\\sqrt{50}"), "5\\sqrt{2}").correct).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 10) == b"true"
    assert verify(boxed("\\sqrt{98}"), "7\\sqrt{2}").correct

from __future__ import annotations

import random
import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_fapo.answers import verify
from verl_fapo.critique import parse_verdict, split_paragraphs
from verl_fapo.demo.world import (
    MAX_VALUE,
    Problem,
    Step,
    careless_critique,
    first_flaw,
    imperfect_solution,
    perfect_critique,
    problem_rows,
    problems,
    read_problem,
    slip,
    solution,
)
from verl_fapo.errors import DataError

MIA = Problem("Mia", "beads", 7, (Step("+", 5), Step("-", 5), Step("*", 2), Step("//", 4)))
QUESTION = (
    "Mia has 7 beads. Step 1: she finds 5 more. Step 2: she gives 5 away. Step 3: she swaps each one for 2 others. "
    "Step 4: she swaps every 4 for one. How many beads does she have?"
)
STEPS = ["7 + 5 = 12.", "12 - 5 = 7.", "7 * 2 = 14.", "14 // 4 = 3.", "\\boxed{3}"]
RIGHT = "\n\n".join(STEPS)
NUM_PARAGRAPHS = len(STEPS)
ANY_PROBLEM = st.builds(lambda seed: next(problems("test", seed=seed)), st.integers(0, 10_000))


def changed(place: int, paragraph: str) -> str:
    return "\n\n".join([*STEPS[:place], paragraph, *STEPS[place + 1 :]])


def test_question_solution_and_answer_by_hand():
    assert MIA.question == QUESTION
    assert MIA.results == (12, 7, 14, 3)
    assert solution(MIA) == RIGHT
    assert first_flaw(MIA, RIGHT) == -1


WRONG = [
    # text, index of the first wrong paragraph
    pytest.param("", 0, id="nothing"),
    pytest.param(" \n\n ", 0, id="blanks"),
    pytest.param("I do not know.", 0, id="prose"),
    pytest.param("\\boxed{3}", 0, id="answer alone"),
    pytest.param("\n\n".join(STEPS[1:]), 0, id="first step missing"),
    pytest.param("\n\n".join([*STEPS[:2], *STEPS[3:]]), 2, id="third step missing"),
    pytest.param("\n\n".join(STEPS[:4]), 3, id="box missing"),
    pytest.param("\n\n".join(STEPS[:2]), 1, id="ends early"),
    pytest.param("\n\n".join([*STEPS, "Done."]), 5, id="prose after the box"),
    pytest.param("\n\n".join([*STEPS, "\\boxed{3}"]), 5, id="two boxes"),
    pytest.param("\n\n".join(["First:", *STEPS]), 0, id="prose before"),
    pytest.param("\n\n".join([*STEPS[:2], *STEPS[1:]]), 2, id="repeated step"),
    pytest.param("\n\n".join([STEPS[0], STEPS[2], STEPS[1], *STEPS[3:]]), 1, id="steps exchanged"),
    pytest.param("\n\n".join([*STEPS[:2], STEPS[2] + "\n" + STEPS[3], STEPS[4]]), 2, id="two steps in a paragraph"),
    pytest.param(changed(3, STEPS[3] + " \\boxed{3}"), 3, id="box in the last step"),
    pytest.param(changed(1, "12 - 5 = 8."), 1, id="wrong result"),
    pytest.param(changed(2, "7 * 2 = 15."), 2, id="wrong result that washes out"),
    pytest.param(changed(1, "11 - 4 = 7."), 1, id="wrong operands, right result"),
    pytest.param(changed(1, "13 - 5 = 7."), 1, id="value copied wrong"),
    pytest.param(changed(1, "12 - 4 = 7."), 1, id="operand copied wrong"),
    pytest.param(changed(1, "12 + 5 = 7."), 1, id="wrong sign"),
    pytest.param(changed(0, "5 + 7 = 12."), 0, id="operands exchanged"),
    pytest.param(changed(2, "7 + 7 = 14."), 2, id="another way"),
    pytest.param(changed(1, "Step 3: 12 - 5 = 7."), 1, id="label before it"),
    pytest.param(changed(1, "12 - 5 = 7"), 1, id="no full stop"),
    pytest.param(changed(1, "12 - 5 = 7.."), 1, id="two full stops"),
    pytest.param(changed(1, "12 - 5 = 7 = 7."), 1, id="two results"),
    pytest.param(changed(1, "12 - 5 = 8. 12 - 5 = 7."), 1, id="corrected in the line"),
    pytest.param(changed(1, "12 - 5 = 7. Easy!"), 1, id="prose after the result"),
    pytest.param(changed(1, "step 2: 12 - 5 = 7."), 1, id="small letter"),
    pytest.param(changed(1, "12 - 5 = 07."), 1, id="leading zero"),
    pytest.param(changed(1, "12 - 5 = +7."), 1, id="plus before a number"),
    pytest.param(changed(1, "12 - 5 = 7.0."), 1, id="decimals"),
    pytest.param(changed(1, "1 2 - 5 = 7."), 1, id="blank in a number"),
    pytest.param(changed(1, "12 - 5 = \u0667."), 1, id="arabic digit"),
    pytest.param(changed(1, "12 - 5 = \uff17."), 1, id="fullwidth digit"),
    pytest.param(changed(1, "12 \u2212 5 = 7."), 1, id="unicode minus"),
    pytest.param(changed(1, "12 - 5 = 7\u200b."), 1, id="zero-width space"),
    pytest.param(changed(1, "12 - 5 = 7\u0301."), 1, id="combining mark"),
    pytest.param(changed(1, "12 - 5\u00a0= 7."), 1, id="no-break space"),
    pytest.param(changed(1, "12 - 5 = 7\0."), 1, id="null"),
    pytest.param(changed(1, "<|unk|>12 - 5 = 7."), 1, id="special token"),
    pytest.param(changed(3, "14 / 4 = 3."), 3, id="another division"),
    pytest.param(changed(4, "\\boxed{4}"), 4, id="wrong box"),
    pytest.param(changed(4, "\\boxed{}"), 4, id="empty box"),
    pytest.param(changed(4, "\\boxed{3"), 4, id="open box"),
    pytest.param(changed(4, "boxed{3}"), 4, id="no backslash"),
    pytest.param(changed(4, "\\ boxed{3}"), 4, id="blank after the backslash"),
    pytest.param(changed(4, "\\fbox{3}"), 4, id="another box"),
    pytest.param(changed(4, "The answer is \\boxed{3}"), 4, id="prose before the box"),
    pytest.param(solution(Problem("Mia", "beads", 8, MIA.steps)), 0, id="right solution of another problem"),
]


@pytest.mark.parametrize(("text", "index"), WRONG)
def test_every_wrong_paragraph_is_caught_where_it_is(text, index):
    assert first_flaw(MIA, text) == index


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(RIGHT.replace("\n\n", "\n\n\n\n"), id="more blank lines"),
        pytest.param(RIGHT.replace("\n\n", "\r\n\r\n"), id="windows lines"),
        pytest.param(RIGHT.replace("\n\n", " \n \t\n "), id="blanks around paragraphs"),
        pytest.param(f"\n {RIGHT} \n", id="blanks around the text"),
        pytest.param(RIGHT.replace(" = ", "  =\t"), id="more blanks"),
        pytest.param(RIGHT.replace(" = ", "="), id="fewer blanks"),
        pytest.param(RIGHT.replace(" = ", "\n= "), id="line broken"),
        pytest.param(RIGHT.replace("{3}", " { 3 }"), id="blanks in the box"),
    ],
)
def test_blanks_are_no_flaw(text):
    assert first_flaw(MIA, text) == -1
    assert verify(text, "3").correct


@given(ANY_PROBLEM)
def test_right_solution_is_clean_and_its_box_is_the_answer(problem):
    text = solution(problem)
    assert first_flaw(problem, text) == -1
    assert verify(text, str(problem.answer)).correct
    assert all(0 < result <= MAX_VALUE for result in problem.results)


@given(
    ANY_PROBLEM, st.randoms(use_true_random=False), st.sampled_from(["", "7", "13", "+", "//", ".", "Step", "x", "="])
)
def test_any_other_token_is_caught_where_it_stands(problem, rng, other):
    paragraphs = split_paragraphs(solution(problem))
    place = rng.randrange(len(paragraphs))
    tokens = re.findall(r"\\?\w+|\S", paragraphs[place])
    spot = rng.randrange(len(tokens))
    if tokens[spot] != other and not (tokens[spot] == "/" and other == "//"):
        paragraphs[place] = " ".join([*tokens[:spot], other, *tokens[spot + 1 :]])
        assert first_flaw(problem, "\n\n".join(paragraphs)) == place


@given(ANY_PROBLEM, st.text())
def test_no_other_text_passes(problem, text):
    assert first_flaw(problem, text) == 0
    assert first_flaw(problem, f"{solution(problem)}\n\n!{text}") == NUM_PARAGRAPHS


@given(ANY_PROBLEM, st.randoms(use_true_random=False), st.floats(0, 1))
def test_place_of_the_first_mistake_is_found(problem, rng, error_rate):
    text, flaw = imperfect_solution(problem, rng, error_rate=error_rate)
    assert first_flaw(problem, text) == flaw
    assert (flaw < 0) == (text == solution(problem))


def test_mistakes_come_as_often_as_asked_and_some_answers_survive_them():
    asked = list(islice(problems("train", seed=0), 1000))
    rng = random.Random(0)
    traces = [(problem, *imperfect_solution(problem, rng, error_rate=0.22)) for problem in asked]
    right = [flaw for problem, text, flaw in traces if verify(text, str(problem.answer)).correct]
    assert 0.45 < len(right) / len(asked) < 0.6
    assert 0.2 < sum(flaw >= 0 for flaw in right) / len(right) < 0.4


@given(ANY_PROBLEM, st.randoms(use_true_random=False))
def test_slip_is_a_flaw_unless_it_changes_nothing(problem, rng):
    text = slip(solution(problem), rng)
    assert (first_flaw(problem, text) < 0) == (text == solution(problem))


@given(ANY_PROBLEM)
def test_question_is_read_back(problem):
    assert read_problem(problem.question) == problem


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param(MIA.prompt, id="with the instruction"),
        pytest.param(QUESTION + " ", id="blank at the end"),
        pytest.param(QUESTION.replace("Step 2", "Step 3"), id="labels out of order"),
        pytest.param(QUESTION.replace("gives", "takes"), id="another story"),
        pytest.param(QUESTION.replace("every 4", "every 0"), id="division by zero"),
        pytest.param(QUESTION.replace("every 4", "every four"), id="number word"),
        pytest.param(QUESTION.replace("has 7", "has 07"), id="leading zero"),
        pytest.param(QUESTION.replace("has 7", "has \u0667"), id="arabic digit"),
        pytest.param(QUESTION.replace("many beads", "many coins"), id="other things"),
        pytest.param("Mia has 7 beads. How many beads does she have?", id="no step"),
    ],
)
def test_other_questions_are_refused(text):
    with pytest.raises(DataError, match="no question of this world"):
        read_problem(text)


def test_problems_are_seeded_and_validation_has_none_of_training():
    def numbers(split: str, seed: int) -> list[tuple[int, tuple[Step, ...]]]:
        return [(problem.start, problem.steps) for problem in islice(problems(split, seed=seed), 2000)]

    assert numbers("train", 1) == numbers("train", 1) != numbers("train", 2)
    assert not set(numbers("train", 1)) & set(numbers("test", 1))


def test_rows_have_the_question_for_the_judge_and_differ():
    rows = list(problem_rows(50, split="test", seed=1))
    questions = [row["extra_info"]["question"] for row in rows]
    assert len(set(questions)) == 50
    for row, question in zip(rows, questions, strict=True):
        problem = read_problem(question)
        assert row["prompt"] == [{"role": "user", "content": problem.prompt}]
        assert row["reward_model"]["ground_truth"] == str(problem.answer)


def test_critique_by_hand():
    assert perfect_critique(MIA, changed(1, "12 - 5 = 8.")) == (
        "Paragraph 0: 7 + 5 = 12, it has 12, right.\nParagraph 1: 12 - 5 = 7, it has 8, wrong.\n\\boxed{1}"
    )
    assert perfect_critique(MIA, RIGHT).endswith("the answer is 3, it has 3, right.\n\\boxed{-1}")


@pytest.mark.parametrize(("text", "index"), [*WRONG[2:], pytest.param(RIGHT, -1, id="right")])
def test_critique_is_read_as_the_verdict(text, index):
    verdict = parse_verdict(perfect_critique(MIA, text), num_paragraphs=len(split_paragraphs(text)))
    assert verdict.index == index


@pytest.mark.parametrize("text", [*(case.values[0] for case in WRONG[2:]), RIGHT])
def test_careless_judge_that_makes_no_mistake_is_the_perfect_one(text):
    assert careless_critique(MIA, text, random.Random(1), error_rate=0.0) == perfect_critique(MIA, text)


@pytest.mark.parametrize(("text", "index"), [(RIGHT, 0), (changed(0, "7 + 5 = 13."), 1)])
def test_careless_judge_says_the_opposite(text, index):
    critique = careless_critique(MIA, text, random.Random(1), error_rate=1.0)
    assert parse_verdict(critique, num_paragraphs=5).index == index

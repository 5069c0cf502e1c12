"""What the models of the demo are taught: imperfect solutions, and critiques of flawed ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from verl_fapo.critique import split_paragraphs
from verl_fapo.data import critic_row
from verl_fapo.demo.world import (
    MAX_VALUE,
    Problem,
    Split,
    careless_critique,
    first_flaw,
    imperfect_solution,
    perfect_critique,
    problems,
    remarks,
    slip,
    solution,
    written,
)
from verl_fapo.templates import judge_prompt

POLICY_ERROR_RATE = 0.21
"""Of a step: the policy is right in about half of the problems then, and flawed in a third of these."""

JUDGED_ERROR_RATES = (0.0, 0.2, 0.5, 0.5)
"""Of the solutions that the judge learns from: high ones too, as it learns most from what is wrong."""

NUM_SOLUTIONS = 9600
"""The judge's first lessons: who judges must be able to solve."""

NUM_INVENTED = 6400
"""Its next lessons, in which results are invented but for ``TRUE_SHARE``."""

TRUE_SHARE = 0.5

SLIP_SHARE = 0.5
"""Of its last lessons, in solutions with a mistake of another kind than the policy was taught."""

CARELESS_RATE = 0.2
"""Of the apprentice's remarks: it flags most of the right solutions then, and can learn better."""

CLEAN_SHARE = 0.4
"""Of the solutions that it learns better from; about half of them are clean then, as in FAPO-Critic."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the user says, and what the model is to answer."""

    prompt: str
    answer: str


def policy_lessons(seed: int) -> Iterator[Lesson]:
    rng = random.Random(f"policy {seed}")
    for problem in problems("train", seed=seed):
        text, _ = imperfect_solution(problem, rng, error_rate=POLICY_ERROR_RATE)
        yield Lesson(problem.prompt, text)


def judge_lessons(seed: int) -> Iterator[Lesson]:
    """Those of the judge that the demo's policy has."""
    return _judge_lessons(random.Random(f"judge {seed}"), perfect_critique, seed=seed)


def apprentice_lessons(seed: int) -> Iterator[Lesson]:
    """Those of a judge that is careless, for RL to make a better one of."""
    rng = random.Random(f"apprentice {seed}")
    return _judge_lessons(rng, partial(careless_critique, rng=rng, error_rate=CARELESS_RATE), seed=seed)


def _judge_lessons(rng: random.Random, critique: Callable[[Problem, str], str], *, seed: int) -> Iterator[Lesson]:
    """First right solutions; then critiques all through solutions whose results are mostly invented, so that the judge
    learns to work by itself and not to believe; then as a judge meets them.
    """
    for num, problem in enumerate(problems("train", seed=seed)):
        if num < NUM_SOLUTIONS:
            yield Lesson(problem.prompt, solution(problem))
        elif num < NUM_SOLUTIONS + NUM_INVENTED:
            text = invented(problem, rng)
            yield Lesson(judge_question(problem, text), "\n".join(remarks(problem, text)))
        else:
            text = judged_solution(problem, rng)
            yield Lesson(judge_question(problem, text), critique(problem, text))


def critic_rows(num: int, *, split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Rows for the manager ``fapo_genrm``, a solution of each of ``num`` problems; in the form of FAPO-Critic."""
    rng = random.Random(f"critic {split} {seed}")
    for index, problem in enumerate(islice(problems(split, seed=seed), num)):
        text = solution(problem) if rng.random() < CLEAN_SHARE else judged_solution(problem, rng)
        yield critic_row(
            judge_question(problem, text),
            first_flaw(problem, text),
            num_paragraphs=len(split_paragraphs(text)),
            data_source="steps_critic",
            split=split,
            index=index,
        )


def judged_solution(problem: Problem, rng: random.Random) -> str:
    """A solution as a judge meets them."""
    text, _ = imperfect_solution(problem, rng, error_rate=rng.choice(JUDGED_ERROR_RATES))
    return slip(text, rng) if rng.random() < SLIP_SHARE else text


def invented(problem: Problem, rng: random.Random) -> str:
    """A solution whose results are the right ones or any at all; the next step begins with what was written."""
    return written(
        problem,
        tuple(result if rng.random() < TRUE_SHARE else rng.randint(0, MAX_VALUE) for result in problem.results),
    )


def judge_question(problem: Problem, text: str) -> str:
    """What the judge is asked about a solution, as the manager ``fapo`` asks it."""
    return judge_prompt(problem.question, str(problem.answer), split_paragraphs(text))

r"""A world of small word problems in which every step can be checked exactly.

    Mia has 7 beads. Step 1: she finds 5 more. Step 2: she gives 5 away. Step 3: she swaps each one for 2 others.
    Step 4: she swaps every 4 for one. How many beads does she have?

A solution has a paragraph a step, and the answer::

    7 + 5 = 12.

    12 - 5 = 7.

    7 * 2 = 14.

    14 // 4 = 3.

    \boxed{3}

Swapping many for one loses the rest: had the third paragraph said 15, the fourth would still give 3. So a wrong
paragraph may lead to the right answer, as a guessable answer does in real data, and a policy that is paid for answers
alone keeps it. Every token of a solution matters to its answer: one that did not, such as a label, would be free to
drift in training, and a small judge does not see that.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl_fapo.critique import split_paragraphs
from verl_fapo.data import problem_row
from verl_fapo.errors import DataError

NAMES = ("Mia", "Ada", "Zoe", "Eva")
THINGS = ("beads", "coins", "nuts", "shells")
NUM_STEPS = 4
MAX_VALUE = 12
MISSES = (-1, 1)
"""By how much a wrong result is wrong."""

Split = Literal["train", "test"]
TEST_SHARE = 8
"""One problem in so many is for validation."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of step: how a question tells it, the sign a solution writes for it, and what it does."""

    story: str
    sign: str
    apply: Callable[[int, int], int]
    operands: range


OPERATIONS = {
    operation.sign: operation
    for operation in (
        Operation("she finds {} more", "+", lambda value, operand: value + operand, range(1, 6)),
        Operation("she gives {} away", "-", lambda value, operand: value - operand, range(1, 6)),
        Operation("she swaps each one for {} others", "*", lambda value, operand: value * operand, range(2, 4)),
        Operation("she swaps every {} for one", "//", lambda value, operand: value // operand, range(2, 5)),
    )
}

_QUESTION = re.compile(r"(\w+) has (\d{1,4}) (\w+)\. (.+\.) How many \w+ does she have\?", re.ASCII)
_STORY_STEP = re.compile(r"Step \d{1,4}: (.+?)\.", re.ASCII)
# Numbers, words and runs of signs: what two paragraphs must have in common, whatever the blanks between.
_TOKEN = re.compile(r"\\?[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]+", re.ASCII)
_NUMBER = re.compile(r"[0-9]+")
_SIGN = re.compile("|".join(map(re.escape, OPERATIONS)))


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a problem: ``sign`` names its operation."""

    sign: str
    operand: int

    def __call__(self, value: int) -> int:
        return OPERATIONS[self.sign].apply(value, self.operand)

    def told(self) -> str:
        return OPERATIONS[self.sign].story.format(self.operand)


@dataclass(frozen=True, slots=True)
class Problem:
    """A start value and what happens to it."""

    name: str
    things: str
    start: int
    steps: tuple[Step, ...]

    @property
    def question(self) -> str:
        story = " ".join(f"Step {i}: {step.told()}." for i, step in enumerate(self.steps, 1))
        return f"{self.name} has {self.start} {self.things}. {story} How many {self.things} does she have?"

    @property
    def prompt(self) -> str:
        """What the policy is asked: the question, and how to answer."""
        return problem_row(self.question, "", data_source="", split="", index=0)["prompt"][-1]["content"]

    @property
    def results(self) -> tuple[int, ...]:
        """The right result of every step."""
        return _faithful(self.start, self.steps)

    @property
    def answer(self) -> int:
        return self.results[-1]

    @property
    def split(self) -> Split:
        """What the problem is for, from its numbers: it is the same under any name."""
        core = repr((self.start, [(step.sign, step.operand) for step in self.steps]))
        return "train" if zlib.crc32(core.encode()) % TEST_SHARE else "test"


def problems(split: Split, *, seed: int) -> Iterator[Problem]:
    """An endless, seeded stream of problems of one split, whose values stay within ``MAX_VALUE``."""
    rng = random.Random(f"{split} {seed}")
    while True:
        problem = Problem(rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, MAX_VALUE), _draw_steps(rng))
        if _is_in_range(problem.results) and min(problem.results) > 0 and problem.split == split:
            yield problem


def problem_rows(num: int, *, split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of ``num`` problems, each of them once."""
    seen: set[str] = set()
    for problem in problems(split, seed=seed):
        if len(seen) == num:
            return
        if problem.question not in seen:
            index = len(seen)
            seen.add(problem.question)
            yield problem_row(problem.question, str(problem.answer), data_source="steps", split=split, index=index)


def read_problem(question: str) -> Problem:
    """The problem that a question tells.

    Raises:
        DataError: the text is no question of this world, to the letter.
    """
    match = _QUESTION.fullmatch(question)
    if match:
        name, start, things, story = match.groups()
        steps = tuple(step for told in _STORY_STEP.findall(story) if (step := _read_step(told)))
        problem = Problem(name, things, int(start), steps)
        if steps and problem.question == question:
            return problem
    raise DataError(
        f"{question[:200]!r} is no question of this world, like 'Mia has 7 beads. Step 1: she finds 5 more. ...'"
    )


def solution(problem: Problem) -> str:
    """The right solution."""
    return written(problem, problem.results)


def written(problem: Problem, results: tuple[int, ...]) -> str:
    """A solution with these results, each of which the next step goes on from."""
    values = (problem.start, *results)
    lines = [f"{values[i]} {step.sign} {step.operand} = {values[i + 1]}." for i, step in enumerate(problem.steps)]
    return "\n\n".join([*lines, f"\\boxed{{{results[-1]}}}"])


def imperfect_solution(problem: Problem, rng: random.Random, *, error_rate: float) -> tuple[str, int]:
    """A solution in which every result is wrong with probability ``error_rate``, and all later steps go on from there.

    A wrong result is a near miss; where none keeps all that follows within ``MAX_VALUE``, the result is right.

    Returns:
        The text, and the index of its first wrong paragraph, -1 if there is none.
    """
    value, results, flaw = problem.start, [], -1
    for i, step in enumerate(problem.steps):
        value = step(value)
        rest = problem.steps[i + 1 :]
        misses = [value + miss for miss in MISSES if _is_in_range((value + miss, *_faithful(value + miss, rest)))]
        if misses and rng.random() < error_rate:
            value = rng.choice(misses)
            flaw = i if flaw < 0 else flaw
        results.append(value)
    return written(problem, tuple(results)), flaw


def slip(text: str, rng: random.Random) -> str:
    """A solution with a mistake other than a wrong result: a token changed, or a paragraph dropped, repeated or moved.

    Some are none: a number may be changed into itself.
    """
    return rng.choice((_change_number, _change_number, _change_sign, _drop, _repeat, _exchange))(text, rng)


def first_flaw(problem: Problem, text: str) -> int:
    """Index of the first wrong paragraph of a solution, as ``split_paragraphs`` counts them; -1 if there is none.

    A paragraph is right if it is, but for blanks, the only one that can follow the right ones before it. Where a
    solution ends too early its last paragraph is the wrong one; a blank text is wrong at 0.
    """
    written, right = split_paragraphs(text), split_paragraphs(solution(problem))
    for i, paragraph in enumerate(written):
        if i == len(right) or not _is_same(paragraph, right[i]):
            return i
    return -1 if len(written) == len(right) else max(0, len(written) - 1)


def perfect_critique(problem: Problem, text: str) -> str:
    r"""What a perfect judge says of a solution.

    It works through the problem itself, compares, and stops at the first wrong paragraph, whose index it boxes::

        Paragraph 0: 7 + 5 = 12, it has 12, right.
        Paragraph 1: 12 - 5 = 7, it has 8, wrong.
        \boxed{1}
    """
    flaw = first_flaw(problem, text)
    lines = remarks(problem, text)
    if flaw >= 0:
        lines = [*lines[:flaw], *(line.replace("right", "wrong") for line in lines[flaw : flaw + 1])]
    return "\n".join([*lines, f"\\boxed{{{flaw}}}"])


def careless_critique(problem: Problem, text: str, rng: random.Random, *, error_rate: float) -> str:
    """The same form, from a judge that says the opposite of a paragraph with probability ``error_rate``."""
    flaw = first_flaw(problem, text)
    lines = remarks(problem, text)
    for i, line in enumerate(lines):
        claim, _, word = line.rpartition(", ")
        is_wrong = (i == flaw or word == "wrong.") != (rng.random() < error_rate)
        lines[i] = f"{claim}, {'wrong' if is_wrong else 'right'}."
        if is_wrong:
            return "\n".join([*lines[: i + 1], f"\\boxed{{{i}}}"])
    return "\n".join([*lines, "\\boxed{-1}"])


def remarks(problem: Problem, text: str) -> list[str]:
    """One line on every paragraph of a solution: its result held against the right one, whatever else it says."""
    right = split_paragraphs(solution(problem))
    values = (problem.start, *problem.results)
    claims = [f"{values[i]} {step.sign} {step.operand} = {values[i + 1]}" for i, step in enumerate(problem.steps)]
    claims += [f"the answer is {problem.answer}", "nothing is left to do"]
    return [
        f"Paragraph {i}: {claim}, it has {_last_number(paragraph)}, "
        f"{'right' if i < len(right) and _last_number(paragraph) == _last_number(right[i]) else 'wrong'}."
        for i, (claim, paragraph) in enumerate(zip(claims, split_paragraphs(text), strict=False))
    ]


def _change_number(text: str, rng: random.Random) -> str:
    return _change(text, _NUMBER, [str(value) for value in range(MAX_VALUE + 1)], rng)


def _change_sign(text: str, rng: random.Random) -> str:
    return _change(text, _SIGN, list(OPERATIONS), rng)


def _change(text: str, pattern: re.Pattern[str], others: list[str], rng: random.Random) -> str:
    place = rng.choice(list(pattern.finditer(text)))
    return text[: place.start()] + rng.choice(others) + text[place.end() :]


def _drop(text: str, rng: random.Random) -> str:
    paragraphs = split_paragraphs(text)
    del paragraphs[rng.randrange(len(paragraphs))]
    return "\n\n".join(paragraphs)


def _repeat(text: str, rng: random.Random) -> str:
    paragraphs = split_paragraphs(text)
    place = rng.randrange(len(paragraphs))
    return "\n\n".join([*paragraphs[: place + 1], *paragraphs[place:]])


def _exchange(text: str, rng: random.Random) -> str:
    paragraphs = split_paragraphs(text)
    i, j = rng.sample(range(len(paragraphs)), 2)
    paragraphs[i], paragraphs[j] = paragraphs[j], paragraphs[i]
    return "\n\n".join(paragraphs)


def _draw_steps(rng: random.Random) -> tuple[Step, ...]:
    signs = rng.choices(tuple(OPERATIONS), k=NUM_STEPS)
    return tuple(Step(sign, rng.choice(OPERATIONS[sign].operands)) for sign in signs)


def _faithful(value: int, steps: tuple[Step, ...]) -> tuple[int, ...]:
    results = []
    for step in steps:
        value = step(value)
        results.append(value)
    return tuple(results)


def _is_in_range(values: tuple[int, ...]) -> bool:
    return all(0 <= value <= MAX_VALUE for value in values)


def _is_same(paragraph: str, other: str) -> bool:
    return _TOKEN.findall(paragraph) == _TOKEN.findall(other)


def _last_number(text: str) -> str:
    return (_NUMBER.findall(text) or ["nothing"])[-1]


def _read_step(told: str) -> Step | None:
    for sign, operation in OPERATIONS.items():
        before, after = operation.story.split("{}")
        operand = told.removeprefix(before).removesuffix(after)
        if re.fullmatch(r"[1-9][0-9]{0,3}", operand) and told == operation.story.format(operand):
            return Step(sign, int(operand))
    return None

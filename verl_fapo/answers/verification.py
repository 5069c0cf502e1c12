r"""Is the final answer right? docs/answers.md is the contract."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from verl_fapo.answers.boxes import final_answer
from verl_fapo.answers.comparison import Comparison, Method
from verl_fapo.answers.reading import readings
from verl_fapo.answers.spelling import clean
from verl_fapo.settings import AnswerSettings

DEFAULTS = AnswerSettings()
MAX_LENGTH = 2000
"""Longer answers are only compared as text."""

_INTEGER = re.compile(r"-?\d{1,300}")
_LETTER = re.compile(r"(?:\\text\{)?\s*(?:[Oo]ption|[Cc]hoice|[Aa]nswer)?\s*[(\[]?([A-Z])[)\].:]*\s*\}?")
_BRACKETED_LETTER = re.compile(r"(?:\\text\{)?\s*\(([A-J])\)")
_OTHER_LETTER = re.compile(
    r"(?<!\w)(?:not|wrong|incorrect|false|is|isn)(?!\w)|\([A-J]\)|(?<![A-Za-z])[A-J][).:]|(?<!\w)(?:or|and)\W+[(]?[A-J]\b"
)
_LETTER_WITH_TEXT = re.compile(
    r"(?:\\text\{)?\s*(?:\(([A-Z])\)\s*[:.]?|([A-Z])\s*[:.)])\s*\}?\s*(?![A-Z](?![A-Za-z]))(?=(?:\\text|\\\$|[^\W_]|[-\\{])).+",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of :func:`verify`."""

    correct: bool
    answer: str | None
    """What stood in the last box, or in the last run of boxes; None without one."""

    method: Method


def verify(solution: str, ground_truth: str, *, options: AnswerSettings = DEFAULTS) -> Verification:
    r"""Compare the final answer of a solution with the reference.

    The answer is the last ``\boxed{}`` after the thinking block, or the last run of boxes with nothing but commas or
    "and" between them. A last box that is empty or never closed is no answer; an earlier one does not stand in for it.

    Args:
        solution: any text; a model wrote it.
        ground_truth: the reference, as in the data set; LaTeX or plain, also in ``$`` or a box.
        options: matters of contract.

    Never raises on a string. Time is linear in the length of the solution; Math-Verify is asked at most
    :data:`~verl_fapo.answers.comparison.MAX_QUESTIONS` questions, and none after one that took
    ``options.timeout_seconds``.
    """
    answer = final_answer(solution)
    if not answer:
        return Verification(correct=False, answer=answer, method=Method.NO_ANSWER)
    truth = ground_truth.strip()
    if answer == truth:
        return Verification(correct=True, answer=answer, method=Method.TEXT)
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(truth):
        return Verification(correct=int(answer) == int(truth), answer=answer, method=Method.TEXT)
    if "\\boxed" in truth or "\\fbox" in truth:
        truth = final_answer(truth) or truth
    try:
        correct, method = _compare(answer, truth, options)
    except (TimeoutError, RecursionError):  # not remembered: there may be time, or room, when it is asked again
        correct, method = False, Method.UNDECIDED
    return Verification(correct=correct, answer=answer, method=method)


@lru_cache(maxsize=8192)
def _compare(answer: str, truth: str, options: AnswerSettings) -> tuple[bool, Method]:
    if max(len(answer), len(truth)) > MAX_LENGTH:
        return "".join(answer.split()) == "".join(truth.split()), Method.TEXT
    given, expected = clean(answer), clean(truth)
    if not given or not expected:
        return False, Method.TEXT
    if given == expected:
        return True, Method.TEXT
    if options.letter_with_text and _same_letter(given, expected):
        return True, Method.RULES
    letters = [match.group(1) for match in map(_BRACKETED_LETTER.match, (given, expected)) if match]
    if len(set(letters)) > 1:
        return False, Method.RULES
    comparison = Comparison(options)
    late = None
    for expected_form, given_form in product(readings(expected, options), readings(given, options)):
        try:
            if comparison.same(expected_form, given_form):
                return True, comparison.method
        except TimeoutError as exc:
            late = exc
    if late:
        raise late
    return False, comparison.method


def _same_letter(given: str, expected: str) -> bool:
    """``C: a polygenic risk score`` and ``C``."""
    for letter, text in ((expected, given), (given, expected)):
        alone, followed = _LETTER.fullmatch(letter), _LETTER_WITH_TEXT.fullmatch(text)
        if followed and _OTHER_LETTER.search(text, followed.end(followed.lastindex) + 1):
            return False
        followed = followed or _LETTER.fullmatch(text)
        if alone and followed and alone.group(1) == next(filter(None, followed.groups())):
            return True
    return False

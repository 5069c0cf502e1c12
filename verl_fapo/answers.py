r"""Is the final answer right? The last ``\boxed{...}`` of a solution against a reference."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"(?<!\\)[{}]")
_THIN_THOUSANDS = re.compile(r"(?<=\d)(?:\\[,!]|\{,\})(?=\d{3})")
_SPACES = re.compile(r"(?:\s|\\[ ,;:!])+")
# All but one between two digits: "1 2" is not 12.
_BLANK = re.compile(r"(?<!\d) | (?!\d)")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(\d{1,100})\}\{(\d{1,100})\}")
_NUMBER = re.compile(r"[+-]?(\d{1,100}(\.\d{0,100})?|\.\d{1,100})(/\d{1,100})?")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3}){1,30}(\.\d{0,100})?")


@dataclass(frozen=True, slots=True)
class Verification:
    """Outcome of :func:`verify`."""

    correct: bool
    answer: str | None
    """What stood in the last box; None without one."""


def verify(solution: str, ground_truth: str) -> Verification:
    r"""Compare the last box of a solution with the reference.

    Equal are equal strings after the blanks, ``$`` and a trailing full stop are taken off, and equal rational
    numbers however they are written (``1,000``, ``0.5``, ``1/2``, ``\frac{1}{2}``). A last box that is empty or
    never closed is no answer; an earlier box does not stand in for it.
    """
    answer = last_box(solution)
    value = _value(answer or "")
    return Verification(correct=value != "" and value == _value(ground_truth), answer=answer)


def last_box(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``, stripped; None if there is none or it is never closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    match = _BOX.match(text, start) if start >= 0 else None
    if match is None:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, match.end()):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[match.end() : brace.start()].strip()
    return None


def _value(text: str) -> Fraction | str:
    """The number a text spells, or the text itself in a canonical spelling."""
    text = _SPACES.sub(" ", _THIN_THOUSANDS.sub("", text.replace("\\$", "").replace("$", "")))
    text = _BLANK.sub("", text).rstrip(".")
    fraction = _FRACTION.fullmatch(text)
    if fraction and int(fraction[3]):
        return Fraction(int(fraction[1] + fraction[2]), int(fraction[3]))
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if _NUMBER.fullmatch(text):
        numerator, _, denominator = text.partition("/")
        if not denominator:
            return Fraction(numerator)
        if int(denominator):
            return Fraction(numerator) / int(denominator)
    return text

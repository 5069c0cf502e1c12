"""Exact rational numbers, as text spells them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from math import comb, factorial

from verl_fapo.answers.forms import Number

MAX_DEPTH = 12
MAX_DIGITS = 400
MAX_EXPONENT = 4000
MAX_BITS = 8192
DECIMAL = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})")
_GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(?:(?:,\d{3}){1,60}|(?: \d{3}){1,60})(?:\.\d{0,400})?")
_SCIENTIFIC = re.compile(r"([+-]?(?:\d{1,100}(?:\.\d{0,100})?|\.\d{1,100}))[eE]([+-]?\d{1,3})")
_REPEATING = re.compile(r"([+-]?)(\d{0,100})\.(\d{0,100})\\(?:overline|bar|dot)\s*(?:\{(\d{1,100})\}|(\d))")
_BASED = re.compile(
    r"([+-]?)([0-9A-Z]{1,100})_(?:(\d)|\{\s*(\d{1,2})\s*\}|\{?\\text\{\s*([a-z]+)\s*\}\}?|\{([a-z]+)\})"
)
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
          "eleven": 11, "twelve": 12, "sixteen": 16}  # fmt: skip


def read_number(text: str) -> Number | None:
    if DECIMAL.fullmatch(text):
        return read_decimal(text)
    if _GROUPED.fullmatch(text):
        return read_decimal(text.replace(",", "").replace(" ", ""))
    if match := _SCIENTIFIC.fullmatch(text):
        return Number(Fraction(match.group(1)) * Fraction(10) ** int(match.group(2)))
    if match := _REPEATING.fullmatch(text):
        return Number(_repeating(match[1], match[2], match[3], match[4] or match[5]))
    if match := _BASED.fullmatch(text):
        base = int(match[3] or match[4] or _BASES.get(match[5] or match[6], 0))
        if 2 <= base <= 36 and (match[2][0].isdigit() or base > 10) and all(int(char, 36) < base for char in match[2]):
            return Number(Fraction(int(match[1] + match[2], base)), base=base)
    return None


def read_decimal(text: str) -> Number:
    whole, _, places = text.partition(".")
    if not places.strip("0"):
        return Number(Fraction(int(whole or 0)) if whole.strip("+-") else Fraction(0))
    return Number(Fraction(text), places=len(places), digits=len((whole.strip("+-") + places).lstrip("0")))


def _repeating(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    value = Fraction(int(whole or 0)) + Fraction(int(fixed or 0), 10 ** len(fixed))
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return -value if sign == "-" else value


class Arithmetic:
    """The exact value of a term of numbers.

    Args:
        tokens: of the term.
        mixed_numbers: ``1\\frac{1}{2}`` is 3/2; it has no value otherwise.
    """

    def __init__(self, tokens: Sequence[str], *, mixed_numbers: bool) -> None:
        self._tokens = [token for token in tokens if not token.isspace()]
        self._mixed_numbers = mixed_numbers
        self._at = 0
        self._depth = 0
        # "1 2" is no product.
        triples = zip(tokens, tokens[1:], tokens[2:], strict=False)
        self._apart = any(a[-1:].isdigit() and between == " " and b[:1].isdigit() for a, between, b in triples)
        self._apart |= re.search(r"\d [+-]\d", "".join(tokens)) is not None  # nor "2 -3" a difference

    def value(self) -> Fraction | None:
        """None where it is not arithmetic, or too large."""
        if self._apart and not self._plain_mixed():
            return None
        try:
            value = self._sum()
        except (ValueError, ZeroDivisionError):
            return None
        return value if self._at == len(self._tokens) else None

    def _plain_mixed(self) -> bool:
        """``1 1/2``."""
        tokens = self._tokens[1:] if self._tokens[0] in "+-" else self._tokens
        whole = len(tokens) == 4 and tokens[2] == "/" and all(tokens[i].isdecimal() for i in (0, 1, 3))
        return self._mixed_numbers and whole

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *tokens: str) -> str:
        if self._peek() in tokens and self._peek():
            self._at += 1
            return self._tokens[self._at - 1]
        return ""

    def _sum(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError("too deep")
        value = self._product()
        while sign := self._take("+", "-"):
            term = self._product()
            value = _bounded(value + term if sign == "+" else value - term)
        self._depth -= 1
        return value

    def _product(self) -> Fraction:
        negative = self._take("+", "-") == "-"
        value, number = self._power()
        if number and (mixed := self._mixed_part(value)) is not None:
            value = mixed
        while True:
            if self._take("*", "\\cdot", "\\times"):
                negative ^= self._signs()
                value = _bounded(value * self._power()[0])
            elif self._take("/", "\\div"):
                negative ^= self._signs()
                value = _bounded(value / self._power()[0])
            elif self._peek() in ("(", "\\frac") and not (number and self._peek() == "\\frac"):
                value, number = _bounded(value * self._power()[0]), False
            else:
                return -value if negative else value

    def _signs(self) -> bool:
        return self._take("+", "-") == "-"

    def _mixed_part(self, whole: Fraction) -> Fraction | None:
        following = self._tokens[self._at : self._at + 3]
        if self._peek() == "\\frac":
            part = self._power()[0]
        elif len(following) == 3 and following[1] == "/" and following[0].isdecimal() and following[2].isdecimal():
            part = Fraction(int(following[0][:400]), int(following[2][:400]))
            self._at += 3
        else:
            return None
        if not self._mixed_numbers or whole.denominator != 1 or not 0 < part < 1:
            raise ValueError("no mixed number")
        return whole + part

    def _power(self) -> tuple[Fraction, bool]:
        """A value, and whether it was a bare integer."""
        value, number = self._atom()
        if self._take("!"):
            if value.denominator != 1 or not 0 <= value <= 300:
                raise ValueError("factorial")
            value, number = Fraction(factorial(int(value))), False
        if self._take("^"):
            negative = self._signs()
            exponent = self._atom()[0] * (-1 if negative else 1)
            if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
                raise ValueError("exponent")
            size = max(value.numerator.bit_length(), value.denominator.bit_length()) * abs(int(exponent))
            if size > MAX_BITS or self._peek() == "^" or (value == 0 and exponent <= 0):
                raise ValueError("power")
            value, number = value ** int(exponent), False
        return value, number

    def _atom(self) -> tuple[Fraction, bool]:
        token = self._peek()
        self._at += 1
        if token[:1].isdigit() or (token[:1] == "." and len(token) > 1):
            if len(token) > MAX_DIGITS or not token.isascii():
                raise ValueError("digits")
            return Fraction(token), token.isdigit()
        if token in ("(", "{"):
            value = self._sum()
            if not self._take(")" if token == "(" else "}"):
                raise ValueError("bracket")
            return value, False
        if token == "\\frac":
            top, bottom = self._group(), self._group()
            return top / bottom, False
        if token == "\\binom":
            top, bottom = self._group(), self._group()
            if top.denominator != 1 or bottom.denominator != 1 or not 0 <= bottom <= top <= 300:
                raise ValueError("binomial")
            return Fraction(comb(int(top), int(bottom))), False
        raise ValueError("no number")

    def _group(self) -> Fraction:
        if self._peek() == "{":
            return self._atom()[0]
        raise ValueError("no group")


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ValueError("too large")
    return value

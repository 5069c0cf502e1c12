"""The process in which Math-Verify and SymPy look at expressions.

It reads a JSON list ``[question, gold, answer, tolerance, seconds]`` a line and writes ``true``, ``false`` or ``null``
(not decided). Whoever started it kills it when its time is up; it ends by itself when that process is gone.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from math_verify import verify
from sympy import Basic, Expr, I, MatrixBase, Rational, Symbol

MAX_BYTES = 3 * 2**30
DIGITS = 40
CLOSE = sympy.Float(10) ** -25
COORDINATES = tuple(
    Rational(top, bottom)
    for top, bottom in (
        (2, 1), (-1, 3), (3, 2), (-2, 1), (5, 1), (1, 7), (-5, 2), (1, 1), (-3, 1), (7, 3), (4, 1), (-1, 1),
        (12, 5), (-7, 2), (6, 1), (3, 1), (-6, 5), (17, 4), (-4, 1), (2, 3), (-50, 7), (10, 1), (-13, 11),
    )
)  # fmt: skip
LARGEST = sympy.Float(10) ** 100
ENOUGH = 4
"""Points at which both sides must have been seen to agree."""

CONVERSION = ConversionConfig(
    interpret_as_mixed_fractions=False,
    interpret_simple_eq_as_assignment=False,
    interpret_contains_as_eq=False,
    lowercase_symbols=False,
)
NORMALIZATION = NormalizationConfig(
    basic_latex=False, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)

_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_DEGREES = re.compile(r"(\d+|\})\s*\^\s*\{?\s*\\circ\s*\}?")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s*\(((?:[^()]|\([^()]*\))*)\)")
_PLAIN_NAME = re.compile(r"(?<![\\A-Za-z{])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|pi)(?![a-z])")
_ROOT_OF_ONE = re.compile(r"\\sqrt\s+(\d|[A-Za-z])")
_EXP = re.compile(r"\\?exp\s*\(([^()]*)\)")
_TEXT = re.compile(r"\\text\{\s*([A-Za-z]+)\s*\}")


def prepared(latex: str) -> str:
    """Spellings that the parser does not know, or would round."""
    latex = _PLAIN_ROOT.sub(r"\\sqrt{\1}", _EXP.sub(r"e^{\1}", latex).replace("**", "^").replace("\\operatorname", ""))
    latex = _PLAIN_NAME.sub(r"\\\1 ", latex).replace("*", "\\cdot ")
    latex = re.sub(r"\^\((-?[^()]*)\)", r"^{\1}", _ROOT_OF_ONE.sub(r"\\sqrt{\1}", latex))
    latex = _DEGREES.sub(r"\1\\cdot\\frac{\\pi}{180}", latex)
    return _DECIMAL.sub(lambda m: f"\\frac{{{int(m[1] + m[2])}}}{{1{'0' * len(m[2])}}}", latex)


def parse(latex: str) -> Basic | MatrixBase:
    """What the text says; raises whatever the parser raises."""
    if _TEXT.search(latex):
        raise ValueError("words")
    parsed = latex2sympy(prepared(latex), normalization_config=NORMALIZATION, conversion_config=CONVERSION)
    return parsed.subs({Symbol("e"): sympy.E, Symbol("i"): I, Symbol("pi"): sympy.pi})


def equal(gold: str, answer: str, tolerance: float) -> bool | None:
    """Whether two expressions are equal wherever they have a value."""
    a, b = parse(gold), parse(answer)
    if not (isinstance(a, Expr) and isinstance(b, Expr)):
        return type(a) is type(b) and verify(a, b, strict=True, timeout_seconds=None)
    if tolerance:
        return close(a - b, tolerance)
    return agree(a, b)


def agree(a: Expr, b: Expr) -> bool | None:
    """Equal in structure, or equal at enough points and different at none.

    Numbers of forty digits tell ``2^{-98}`` from ``2^{-99}``, which Math-Verify's rounding does not.
    """
    if a.has(sympy.zoo, sympy.nan) or b.has(sympy.zoo, sympy.nan):
        return None
    if a == b:
        return True
    if not (a.free_symbols | b.free_symbols):
        return same_constant(a, b)
    real = imaginary = 0
    for x, y in values(a, b):
        if abs(x - y) <= CLOSE * max(abs(x), abs(y)):
            real, imaginary = real + both_real(x, y), imaginary + (not both_real(x, y))
        elif x.is_real or y.is_real:
            return False
        # Where both are complex, branches of roots differ: 1/sqrt(n) and sqrt(1/n) below 0.
    return True if real >= ENOUGH else (imaginary >= ENOUGH or None)


def same_constant(a: Expr, b: Expr) -> bool | None:
    """Whether the difference vanishes to 1000 digits; of two rational numbers, whether they are equal."""
    if a.is_Rational and b.is_Rational:
        return a == b
    size = abs(a.evalf(5))
    if not (size.is_Float or size.is_Rational) or size > LARGEST:
        return None
    parts = (a - b).evalf(15, maxn=1000).as_real_imag()
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    return all(part == 0 or part._prec == 1 for part in parts)


def both_real(x: Expr, y: Expr) -> bool:
    return x.is_real and y.is_real


def values(*expressions: Expr) -> Iterator[tuple[Expr, ...]]:
    """Values of all expressions at fixed points; points without a finite value of each are left out.

    They are small, of both signs and in any order, so that no term drowns in another and no absolute value, maximum,
    root or rounding shows one side only.
    """
    symbols = sorted(set().union(*(e.free_symbols for e in expressions)), key=str)
    for n in range(len(COORDINATES)):
        # The strides differ, and the number of coordinates is prime: no two symbols go together.
        point = {symbol: COORDINATES[(n * (3 * i + 1) + 5 * i) % len(COORDINATES)] for i, symbol in enumerate(symbols)}
        found = tuple(number(e.subs(point)) for e in expressions)
        if None not in found:
            yield found


def number(expression: Expr) -> Expr | None:
    value = expression.evalf(DIGITS, maxn=400)
    real, imaginary = value.as_real_imag()
    if not (real.is_Float or real.is_Integer or real.is_Rational) or not value.is_finite:
        return None
    if abs(imaginary) <= CLOSE * abs(real):
        return real
    return value if imaginary.is_number else None


def close(difference: Expr, tolerance: float) -> bool | None:
    if difference.free_symbols:
        return False
    value = number(difference)
    return None if value is None else bool(abs(value) < sympy.Float(tolerance, DIGITS))


def same_relation(gold: str, answer: str, tolerance: float) -> bool | None:
    """Whether two equations or inequalities, each ``left<TAB>operator<TAB>right``, differ by a constant factor only."""
    (left, operator, right), (other_left, other_operator, other_right) = gold.split("\t"), answer.split("\t")
    a, b = parse(left) - parse(right), parse(other_left) - parse(other_right)
    if not (a.free_symbols and a.free_symbols == b.free_symbols):
        return False
    ratios = []
    for x, y in values(a, b):
        if x == 0 or y == 0:
            if x != y:
                return False
        else:
            ratios.append(x / y)
    if len(ratios) < ENOUGH:
        return None
    if any(abs(ratio - ratios[0]) > CLOSE * abs(ratios[0]) for ratio in ratios) or not ratios[0].is_real:
        return False
    flipped = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}.get(other_operator, other_operator)
    return operator == (other_operator if ratios[0] > 0 else flipped)


QUESTIONS: dict[str, Callable[[str, str, float], bool | None]] = {"equal": equal, "relation": same_relation}


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(3000)
    print("ready", flush=True)
    for line in sys.stdin:
        question, gold, answer, tolerance, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + 1)  # its end, should nobody be left to kill it
        try:
            decided = QUESTIONS[question](gold, answer, tolerance)
        except Exception:  # text that a model wrote, in a parser and an algebra system
            decided = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(decided if decided is None else bool(decided)), flush=True)


if __name__ == "__main__":
    main()

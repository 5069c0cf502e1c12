"""Whether two answers say the same."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from verl_fapo.answers.forms import Chain, Expression, Form, Items, Named, Number, Quantity, Range, Relation, Words
from verl_fapo.answers.symbolic import WORKER
from verl_fapo.settings import AnswerSettings

MAX_FORMULA = 400
"""Characters of an expression; a longer one is not asked about."""

MAX_QUESTIONS = 40
# What the parser of Math-Verify would read as something else, or leave out.
_NO_FORMULA = re.compile(
    "|".join(
        (
            r"[A-Za-z]\^\{?\\circ|\A[-+.\d ]*\d [-+]\d[-+.\d ]*\Z",
            r"[':?#&@\"%;`]|\.\.|!!|\\[{}]|(?<!\\sqrt)\[",
            r"\d ?\\frac\{\d+\}|(?<![_0-9])\d+ \d|\d_|(?<![\^_\d])\d+\{",  # numbers side by side
            r"(?<![\\A-Za-z])[A-Za-z]\d|\^[^{}\\ ]\^",
            r"(?<![\\A-Za-z])[fghFGHP](?:\(|\^)|\^\{\(",  # functions, and their derivatives
            r"\\(?:phi|varphi|psi|sigma|tau|zeta|eta|rho|mu|gamma|lambda|Gamma) ?\(",
            r"\^\{?(?:T|\\top)|(?<![A-Za-z\\])I(?![A-Za-z])|[A-Za-z] ?\\times ?[A-Za-z]",  # matrices and vectors
            r"(?<![\\A-Za-z])[A-Z](?:\^\{?-?\d\}?)? ?[A-Z]",
        )
    )
)
_KNOWN_COMMANDS = frozenset({
    "frac", "sqrt", "cdot", "times", "div", "pi", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos",
    "arctan", "over",
    "sinh", "cosh", "tanh", "log", "ln", "exp", "binom", "infty", "circ", "max", "min", "sum", "prod", "ell", "vert",
    "lfloor", "rfloor", "lceil", "rceil", "lvert", "rvert", "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon",
    "zeta", "eta", "theta", "vartheta", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi",
    "chi",
    "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Phi", "Psi", "Omega",
})  # fmt: skip
_EMPTY = Expression("\\emptyset")
# "XYZ" is no word, and not "xyz".
_NATURAL = re.compile(r"[a-z]{2}|[^\x00-\x7f]")
_INTERVALS = {"()", "(]", "[)", "[]"}
_ORDERS = re.compile(r"\\(?:leqslant|leqq|leq|le|geqslant|geqq|geq|ge)(?![a-z])")


class Method(StrEnum):
    """How it was decided whether an answer is right."""

    NO_ANSWER = "no_answer"
    """No box, an empty one, or one that is never closed."""

    TEXT = "text"
    """The two are the same text, or the same integer or not."""

    RULES = "rules"
    """By what both say: numbers, words, tuples, sets, ..."""

    SYMBOLIC = "symbolic"
    """Math-Verify was asked."""

    UNDECIDED = "undecided"
    """Math-Verify could not read one of them, or had no answer in time: not right."""


@dataclass(slots=True)
class Comparison:
    """Compares what two answers say; ``method`` is how it was done in the end."""

    options: AnswerSettings
    method: Method = Method.RULES
    _questions: int = field(default=0)

    def same(self, a: Form, b: Form) -> bool:
        """Whether the reference ``a`` and the answer ``b`` say the same.

        Raises:
            TimeoutError: Math-Verify had no answer in time.
        """
        if a == b:
            return True
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Chain):
                if isinstance(other, (Named, Range, Relation)):
                    return False
                return all(self.same(value, other) for value in one.values)
        if isinstance(a, (Named, Range, Relation)) or isinstance(b, (Named, Range, Relation)):
            return self._same_relation(a, b)
        if isinstance(a, Quantity) or isinstance(b, Quantity):
            return self._same_quantity(a, b)
        if isinstance(a, Items) or isinstance(b, Items):
            return self._same_items(a, b)
        if isinstance(a, Number) and isinstance(b, Number):
            return self._same_number(a, b)
        if isinstance(a, Words) or isinstance(b, Words):
            return _same_words(a, b)
        return self._same_expression(a, b)

    def _same_relation(self, a: Form, b: Form) -> bool:
        if isinstance(a, Named) and isinstance(b, Named) and a.name == b.name and self.same(a.value, b.value):
            return True
        if isinstance(a, Range) and isinstance(b, Range):
            return a.name == b.name and self.same(a.interval, b.interval)
        sides = [_sides(form) for form in (a, b)]
        if all(sides):
            both_named = isinstance(a, Named) and isinstance(b, Named)
            if both_named and any(isinstance(form.value, (Number, Quantity, Items, Words)) for form in (a, b)):
                return False
            if not self.options.equivalent_equations:
                return sides[0] == sides[1]
            return self._ask("relation", *("\t".join(side) for side in sides))
        for one, other in ((a, b), (b, a)):
            if isinstance(one, Named) and not isinstance(other, (Named, Relation)):
                return self.same(one.value, other)
            if isinstance(one, Range) and isinstance(other, Items) and self.options.relations_as_intervals:
                return other.brackets in _INTERVALS and self.same(one.interval, other)
        return False

    def _same_quantity(self, a: Form, b: Form) -> bool:
        units = [form.unit if isinstance(form, Quantity) else None for form in (a, b)]
        values = [form.value if isinstance(form, Quantity) else form for form in (a, b)]
        if units[0] == units[1]:
            return self.same(*values)
        if None not in units:
            return False
        rule = self.options.percent if "%" in units else self.options.units
        if rule == "required":
            return False
        if rule == "optional" and self.same(*values):
            return True
        factor = {"%": Number(Fraction(1, 100)), "deg": Expression("\\frac{\\pi}{180}")}.get(units[0] or units[1])
        return factor is not None and self.same(
            *(_times(value, factor) if unit else value for value, unit in zip(values, units, strict=True))
        )

    def _same_items(self, a: Form, b: Form) -> bool:
        if not (isinstance(a, Items) and isinstance(b, Items)):
            one, other = (a, b) if isinstance(a, Items) else (b, a)
            alone = one.brackets == "set" and len(one.items) == 1 and not isinstance(one.items[0], Items)
            return alone and one.items[0] != _EMPTY and self.same(one.items[0], other)
        for one, other in ((a, b), (b, a)):
            if one.brackets == "list" and other.brackets != "list" and (converted := _converted(one, other.brackets)):
                return self.same(converted, other)
        loose = {a.brackets, b.brackets} <= {"list", "set"}
        if not loose and a.brackets != b.brackets:
            tuples = [_tuple(items) for items in (a, b)]
            return None not in tuples and len(tuples[0]) == len(tuples[1]) and all(map(self.same, *tuples))
        if _num_names(a) != _num_names(b) and 0 not in (_num_names(a), _num_names(b)):
            return False
        if loose and _num_names(a) + _num_names(b) > 1 and 0 in (_num_names(a), _num_names(b)):
            return len(a.items) == len(b.items) and all(map(self.same, a.items, b.items))
        if (loose and not (self.options.ordered and a.brackets == b.brackets == "list")) or a.brackets == "union":
            return self._same_bag(_flat(a), _flat(b))
        return len(a.items) == len(b.items) and all(map(self.same, a.items, b.items))

    def _same_bag(self, a: list[Form], b: list[Form]) -> bool:
        if len(a) != len(b):
            return False
        rest = list(b)
        unmatched = []
        for item in a:  # what is equal at sight first: the other questions are dear
            if item in rest:
                rest.remove(item)
            else:
                unmatched.append(item)
        for item in unmatched:
            match = next((other for other in rest if self.same(item, other)), None)
            if match is None:
                return False
            rest.remove(match)
        return True

    def _same_number(self, a: Number, b: Number) -> bool:
        if a.base != b.base:
            return None in (a.base, b.base) and self.options.base_suffix == "optional" and _spelled(a) == _spelled(b)
        if self.options.decimals is not None and abs(a.value - b.value) <= Fraction(1, 2 * 10**self.options.decimals):
            return True
        return a.value == b.value or self._stands_for(a, b.value) or self._stands_for(b, a.value)

    def _stands_for(self, decimal: Number, value: Fraction) -> bool:
        """Whether a long decimal was rounded or cut from ``value``."""
        if not self._is_long(decimal) or decimal.value * value < 0:
            return False
        unit = Fraction(1, 10**decimal.places)
        beyond = abs(value) - abs(decimal.value)
        return 0 <= beyond < unit or abs(beyond) <= unit / 2

    def _is_long(self, form: Form) -> bool:
        return isinstance(form, Number) and bool(form.places) and form.digits >= self.options.decimal_digits

    def _tolerance(self, *forms: Form) -> float:
        """How near to each other expressions must be: equal, unless one is a long decimal or ``decimals`` is set."""
        tolerance = max(10.0**-form.places if self._is_long(form) else 0.0 for form in forms)
        decimals = self.options.decimals
        return tolerance if decimals is None else max(tolerance, 0.5 * 10.0**-decimals)

    def _same_expression(self, a: Form, b: Form) -> bool:
        texts = [_latex(form) for form in (a, b)]
        if texts[0] == texts[1]:
            return True
        if any(re.fullmatch(r"[A-Z]{1,3}|[a-zA-Z]", text) and text not in ("e", "i") for text in texts):
            return False  # a letter is no other value
        if not all(map(_is_formula, texts)):
            return False
        if max(map(len, texts)) > MAX_FORMULA:
            self.method = Method.UNDECIDED
            return False
        return self._ask("equal", *texts, tolerance=self._tolerance(a, b))

    def _ask(self, question: str, gold: str, answer: str, *, tolerance: float = 0.0) -> bool:
        self._questions += 1
        if self._questions > MAX_QUESTIONS:
            self.method = Method.UNDECIDED
            return False
        try:
            decided = WORKER.ask(question, gold, answer, tolerance=tolerance, seconds=self.options.timeout_seconds)
        except TimeoutError:
            self._questions = MAX_QUESTIONS  # the answer has had its time
            raise
        self.method = Method.UNDECIDED if decided is None else Method.SYMBOLIC
        return bool(decided)


def _is_formula(text: str) -> bool:
    known = all(command in _KNOWN_COMMANDS for command in re.findall(r"\\([A-Za-z]+)", text))
    return known and text.isascii() and not _NO_FORMULA.search(text)


def _num_names(items: Items) -> int:
    return len({item.name for item in items.items if isinstance(item, Named)})


def _converted(items: Items, brackets: str) -> Items | None:
    """A list as what it is compared with: ``x > 3 or x < -3`` as a union, ``x = 1, y = 2`` as a tuple."""
    if brackets == "union" and all(isinstance(item, Range) for item in items.items):
        return (
            Items("union", tuple(item.interval for item in items.items))
            if len({i.name for i in items.items}) == 1
            else None
        )
    if brackets == "()":
        names = [item.name for item in items.items if isinstance(item, Named)]
        if names and len(names) == len(items.items) and names == sorted(set(names)):
            return Items("()", tuple(item.value for item in items.items))
    return None


def _tuple(items: Items) -> tuple[Form, ...] | None:
    """The components of a tuple or vector, however it is written."""
    if items.brackets in ("()", "<>"):
        return items.items
    if items.brackets == "matrix" and all(isinstance(row, Items) and len(row.items) == 1 for row in items.items):
        return tuple(row.items[0] for row in items.items)
    return None


def _flat(items: Items) -> list[Form]:
    """The elements, once each in a set, and those of ``x = 1, 2`` or ``\\pm 3`` among them too."""
    flat: list[Form] = []
    for item in items.items:
        value = item.value if isinstance(item, Named) and isinstance(item.value, Items) else item
        inner = _flat(value) if isinstance(value, Items) and value.brackets == "list" else [item]
        flat += inner
    return list(dict.fromkeys(flat)) if items.brackets == "set" else flat


def _sides(form: Form) -> tuple[str, str, str] | None:
    """Left side, operator and right side."""
    if isinstance(form, Relation):
        return form.left, form.operator, form.right
    if isinstance(form, (Named, Range)):
        parts = re.split(r"(<=|>=|=|<|>)", _ORDERS.sub(lambda m: "<=" if "l" in m.group() else ">=", form.latex))
        if len(parts) == 3:
            return parts[0].strip(), parts[1], parts[2].strip()
    return None


def _times(value: Form, factor: Number | Expression) -> Form:
    if isinstance(value, Number) and isinstance(factor, Number):
        return Number(value.value * factor.value)
    return Expression(f"({_latex(value)})\\cdot {_latex(factor)}")


def _spelled(number: Number) -> str:
    """The digits as they were written."""
    if number.base is None:
        return str(number.value)
    digits, value = "", abs(int(number.value))
    while value or not digits:
        value, digit = divmod(value, number.base)
        digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"[digit] + digits
    return "-" * (number.value < 0) + digits


def _latex(form: Form) -> str:
    if isinstance(form, Number):
        sign, value = "-" * (form.value < 0), abs(form.value)
        whole = value.denominator == 1
        return f"{sign}{value.numerator}" if whole else f"{sign}\\frac{{{value.numerator}}}{{{value.denominator}}}"
    return form.latex


def _same_words(a: Form, b: Form) -> bool:
    texts = []
    for form in (a, b):
        if isinstance(form, (Words, Expression)):
            text = form.text if isinstance(form, Words) else re.sub(r"\\text\{([^{}]*)\}", r" \1 ", form.latex)
            text = " ".join(text.split()).strip(' ."')
            if _NATURAL.search(text):
                text = re.sub(r"\A(?:an?|the) (?=\w)", "", text.casefold().replace("-", " "))
            texts.append(text)
    return len(texts) == 2 and texts[0] == texts[1] != ""

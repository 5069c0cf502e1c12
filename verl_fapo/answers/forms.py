"""What an answer may say."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    places: int | None = None
    """Decimal places, where it is written as a decimal."""

    digits: int = 0
    """Significant digits, where it is written as a decimal."""

    base: int | None = None
    """The base in its suffix; ``value`` then spells the digits as if they were decimal."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value with a unit, ``%`` and money included."""

    value: Form
    unit: str


@dataclass(frozen=True, slots=True)
class Words:
    text: str


@dataclass(frozen=True, slots=True)
class Expression:
    latex: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several values: ``brackets`` is ``list``, ``set``, ``matrix``, ``union``, or an opening and a closing bracket."""

    brackets: str
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """``x = 5``, ``f(x) = 5``, ``x in (0, 1)``."""

    name: str
    value: Form
    latex: str


@dataclass(frozen=True, slots=True)
class Chain:
    """``2/4 = 1/2``: several spellings of one value."""

    values: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality that is more than a name and its value."""

    left: str
    operator: str
    right: str


@dataclass(frozen=True, slots=True)
class Range:
    """``0 < x <= 5``."""

    name: str
    interval: Items
    latex: str


Form = Number | Quantity | Words | Expression | Items | Named | Chain | Relation | Range

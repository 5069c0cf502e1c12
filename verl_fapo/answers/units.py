"""Units behind and in front of numbers."""

from __future__ import annotations

import re

# Words behind a number that are no unit: they would change what it says.
_NO_UNIT = frozenset({
    "lakh", "crore", "bn", "mil", "grand", "ten", "pair", "tenth", "fifth", "sixth", "hundredth", "thousandth",
    "halve", "doubled", "halved", "inverse", "reciprocal", "point", "dot", "one", "two", "three", "four", "five",
    "six", "seven", "eight", "nine", "twelve", "root", "exponent", "power", "divided", "multiplied", "remainder",
    "base", "binary", "out", "below", "above", "zero", "bc", "bce", "alternatively", "perhaps", "probably", "xor",
    "nand", "impossible", "invalid", "rejected", "never", "theta", "phi", "alpha", "beta", "gamma", "bar", "prime",
    "hat", "unknown", "error", "and", "or", "if", "when", "where", "for", "to", "than", "not", "is", "are",
    "was", "be", "but", "with", "without", "except", "only", "times", "plus", "minus", "over", "mod", "modulo",
    "choose", "hundred", "thousand", "million", "billion", "trillion", "dozen", "score", "half", "third", "quarter",
    "about", "approximately", "almost", "nearly", "around", "more", "less", "fewer", "least", "most", "either",
    "neither", "nor", "between", "undefined", "infinity", "no", "none", "wrong", "incorrect", "false", "true",
    "maybe", "possibly", "unless", "until", "other", "does", "do", "would", "could", "should", "might", "since",
    "because", "so", "then", "else", "otherwise", "pi", "sqrt", "log", "ln", "sin", "cos", "tan", "cot", "csc", "exp",
    "max", "min", "gcd", "lcm", "inf", "lim", "det", "factorial", "squared", "cubed", "negative", "positive", "from",
    "through", "up", "down", "equals", "equal",
})  # fmt: skip
_UNITS = frozenset({
    "m", "cm", "mm", "km", "ft", "in", "yd", "mi", "kg", "g", "mg", "lb", "lbs", "oz", "s", "sec", "min", "hr", "h",
    "hrs", "mins", "secs", "ml", "l", "kmh", "kph", "mph", "rad", "deg", "cents", "cent", "kw", "kwh", "hz", "db",
    "ev", "mol", "atm", "pa", "kpa", "usd", "eur", "gbp", "n", "j", "w", "k", "v", "rmb", "yuan", "am", "pm",
})  # fmt: skip
_SYNONYMS = {
    "percent": "%", "percentage": "%", "%": "%", "degree": "deg", "centimeter": "cm", "centimetre": "cm", "meter": "m",
    "metre": "m", "kilometer": "km", "kilometre": "km", "millimeter": "mm", "millimetre": "mm", "inch": "in",
    "inche": "in",
    "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "gram": "g", "kilogram": "kg", "pound": "lb", "ounce": "oz",
    "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "milliliter": "ml",
    "dollar": "$", "usd": "$", "\\$": "$", "cent": "¢", "radian": "rad", "unit": "unit", "kmh": "km/h", "kph": "km/h",
    "mph": "mi/h",
}  # fmt: skip
# No angles, and no half of the day: what may stand behind an unknown too.
KNOWN_UNITS = frozenset(
    {"%", "$", *(unit for unit in _SYNONYMS.values() if unit != "deg"), *_UNITS} - {"am", "pm", "deg", "rad"}
)
_POWERED = re.compile(r"(square|sq|cubic|cu)\s+(.*)")
POWER = re.compile(r"\s*\^\s*\{?\s*(-?[1-9])\s*\}?\Z")
DEGREES = re.compile(r"\^\s*\{?\s*(?:\\circ|\\degree|o)\s*\}?|\\degree|\\deg(?![a-z])")
TAIL = re.compile(
    r"(?P<head>.*?[\d}\)\]a-zA-Z!.])\s*(?:(?P<text>\\text\{(?P<inner>[^{}]*)\})|(?P<percent>\\?%)|"
    r"(?<=[\d}\)\]. ])(?P<plain>[A-Za-z][A-Za-z./ ]*))(?P<power>\s*\^\s*\{?\s*-?[1-9]\s*\}?)?\.?\Z",
    re.DOTALL,
)
MONEY_BEHIND = re.compile(r"(.*\d)\s*(\\\$|€|£|¥)", re.DOTALL)
MONEY = re.compile(r"([+-]?)\s*(\\\$|€|£|¥|\\pounds|\\euro|(?:USD|Rs\.?|US\\\$)(?=\s*\d))\s*(?=[\d.\\(])")


def unit_name(words: str, *, spelled_out: bool, apart: bool) -> str | None:
    r"""A unit's canonical name; None for words that are none.

    Args:
        words: what stands behind the number.
        spelled_out: it stood in ``\text{}``, where any noun may be counted.
        apart: with a blank before it, where a longer word may; else it must be a known unit, or it is a product.
    """
    lower = re.sub(r"\b([a-z])\. ?([a-z])\b\.?", r"\1\2", words.lower()).replace(".", " ").replace("-", " ").strip()
    names = lower.replace("/", " / ").split()
    if not 1 <= len(names) <= 4 or not all(re.fullmatch(r"[a-z]+(?:\^-?\d)?|/", name) for name in names):
        return None
    if any({name, name.removesuffix("s"), _singular(name)} & _NO_UNIT for name in names):
        return None
    shortest = 3 if spelled_out else 4
    nouns = (spelled_out or apart) and all(
        len(name) >= shortest and re.search(r"[aeiou][a-z]*\Z", name) for name in names
    )
    if not nouns and not all(map(_is_known, names)):
        return None
    product = len(names) > 1 and "/" not in names
    if len(names[0]) == 1 and (product or not (spelled_out or apart)):
        return None  # 3m and 3 m g h
    if powered := _POWERED.fullmatch(lower):
        return _singular(powered.group(2)) + ("^2" if powered.group(1).startswith("sq") else "^3")
    return "".join(_singular(name) for name in " ".join(names).replace(" per ", " / ").split())


def _is_known(name: str) -> bool:
    name = name.partition("^")[0]
    return name == "/" or name in _UNITS or name in _SYNONYMS or _singular(name) in _SYNONYMS


def _singular(name: str) -> str:
    name = name.strip()
    if name in _SYNONYMS:
        return _SYNONYMS[name]
    if len(name) > 2 and name.endswith("s") and not name.endswith("ss"):
        name = name[:-1]
    return _SYNONYMS.get(name, name)

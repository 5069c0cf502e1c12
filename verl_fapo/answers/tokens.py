"""Tokens of an answer, and the brackets around them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TOKEN = re.compile(
    r"\\begin\{[a-z]+\*?\}(?:\{[^{}]*\}|\[[^\[\]]*\])?|\\end\{[a-z]+\*?\}|\\text\{[^{}]*\}|\\[A-Za-z]+|\\.|"
    r"\d+(?:\.\d+)?|\.\d+|[A-Za-z]+|\s+|.",
    re.DOTALL,
)
_OPEN = {"(", "[", "{", "\\{", "\\lbrace", "\\lbrack", "\\langle", "\\lfloor", "\\lceil"}
_CLOSE = {")", "]", "}", "\\}", "\\rbrace", "\\rbrack", "\\rangle", "\\rfloor", "\\rceil"}


def strip(tokens: Sequence[str]) -> Sequence[str]:
    start, end = 0, len(tokens)
    while start < end and tokens[start].isspace():
        start += 1
    while start < end and tokens[end - 1].isspace():
        end -= 1
    return tokens[start:end]


def squeezed(text: str) -> str:
    """Without the blanks that separate nothing."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def levels_of(tokens: Sequence[str]) -> list[int]:
    """How deep in brackets each token stands; the brackets themselves as deep as what is around them."""
    level, levels = 0, []
    for token in tokens:
        if token in _CLOSE or token.startswith("\\end{"):
            level -= 1
        levels.append(level)
        if token in _OPEN or token.startswith("\\begin{"):
            level += 1
    return levels


def split(tokens: Sequence[str], separators: Iterable[str]) -> tuple[list[Sequence[str]], list[str]]:
    """Parts between the separators outside all brackets, and the separators."""
    parts, found, start = [], [], 0
    separators = set(separators)
    if separators.isdisjoint(tokens):
        return [tokens], []
    for i, (token, level) in enumerate(zip(tokens, levels_of(tokens), strict=True)):
        if level == 0 and token in separators:
            parts.append(tokens[start:i])
            found.append(token)
            start = i + 1
    return [*parts, tokens[start:]], found


def wraps(tokens: Sequence[str]) -> bool:
    """Whether the last token closes the first."""
    levels = levels_of(tokens)
    return len(tokens) > 1 and levels[-1] == 0 and all(level > 0 for level in levels[1:-1])

r"""The final answer of a solution: what stands in its last box."""

from __future__ import annotations

import re

MAX_NESTED = 5
MAX_RUN = 100
MAX_BOX = 50_000
"""Characters of a box; a longer one counts as never closed."""

_BARE = re.compile(r"[+-]?\d+(?:[.,]\d+)*(?:/\d+)?|[A-Z](?![A-Za-z])")
# Before anything else it is a mention, as in "put it into \\boxed".
_BOX = re.compile(rf"\\(?:boxed|fbox)(?![A-Za-z])(?:\s*+(?=\{{|\Z)|\s++(?={_BARE.pattern}))")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_RAW_BRACE = re.compile(r"[{}]")
_BLANK = r"(?:[\s$&]|\\[()\[\],; ]|\\q?quad(?![a-z]))*"
_JOINT = re.compile(rf"{_BLANK}(?:[,;]{_BLANK})?(?:[,;]|(?<!\w)and(?!\w)|\\text\{{\s*,?\s*and\s*,?\s*\}}){_BLANK}")
_THINKING = re.compile(r"\s*<think>")


def final_answer(text: str) -> str | None:
    """Content of the last box, or of the last run of boxes, joined by commas; None if there is none that is closed."""
    _, closing, rest = text.rpartition("</think>")
    if not closing and _THINKING.match(text):
        return None
    begins = [match.start() for match in _BOX.finditer(rest)]
    if not begins or (last := _outermost(rest, begins)) is None:
        return None
    start, _, content = last
    found = [content]
    while begins and content and len(found) < MAX_RUN:
        box = _read_box(rest, begins.pop(), start)
        if box is None or not box[2] or not _is_joint(rest[box[1] : start]):
            break
        start = box[0]
        found.append(box[2])
    return ", ".join(dict.fromkeys(reversed(found)))


def _outermost(text: str, begins: list[int]) -> tuple[int, int, str] | None:
    """Start, end and content of the last box, or of the one it stands in; takes all of these from ``begins``."""
    box = _read_box(text, begins.pop(), len(text))
    for _ in range(MAX_NESTED):
        outer = _read_box(text, begins[-1], len(text)) if box and begins else None
        if outer is None or outer[1] < box[1]:
            break
        box = outer
        begins.pop()
    return box


def _read_box(text: str, start: int, end: int) -> tuple[int, int, str] | None:
    """Start, end and content of the box at ``start``; None if it is not closed before ``end``."""
    at = _BOX.match(text, start).end()
    if text.startswith("{", at):
        for brace in (_BRACE, _RAW_BRACE):  # the second for "185\\}", whose last brace only looks escaped
            if stop := _closing(text, at, min(end, at + MAX_BOX), brace):
                return start, stop, text[at + 1 : stop - 1].strip()
    elif bare := _BARE.match(text, at, end):
        return start, bare.end(), bare.group()
    return None


def _is_joint(text: str) -> bool:
    return len(text) < 100 and _JOINT.fullmatch(text) is not None


def _closing(text: str, start: int, end: int, brace: re.Pattern) -> int | None:
    depth = 0
    for match in brace.finditer(text, start, end):
        token = match.group()
        depth += (token == "{") - (token == "}")
        if depth == 0 and token == "}":
            return match.end()
    return None

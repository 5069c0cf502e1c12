r"""Keeps text that goes into a judge's prompt from passing for a part of the prompt.

A line *imitates* the prompt if it holds a paragraph tag, or has no letters but those of one of the template's headings,
in square brackets, or holds a control token of a chat template, which servers read as such inside a message too.
Spelling does not matter: case, blanks, HTML escapes, other fonts of Unicode and invisible characters are seen through;
homoglyphs of other scripts are not, nor is what is split over two lines. Such a line is written with HTML escapes,
once, and every other line as it is. As a line imitates if and only if its escaped form does, this can be undone.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

MAX_ESCAPES = 4
"""Escapes around escapes that are seen through; a text with more of them imitates whatever it says."""

# Possessive throughout, and no two can match the same blanks: time grows with the length of the text.
_TAG = r"<[\s/]*+paragraph"
# What stands in a control token that has one bar only, or square brackets: a word, which |a|<|b| does not hold.
_WORD = r"/?[a-z_\u2581]{3}[\w.:\u2581]{0,37}+"
_ANGLE_NAMES = (
    "s", "(?:bos|eos|pad|unk|eop)(?:_token)?", "sop", "think(?:ing)?", r"seed:\w{1,40}+", "tool_call", "tool_response",
    "(?:start|end)_of_[a-z]{1,20}+",
)  # fmt: skip
_SQUARE_NAMES = (
    "INST", "SYSTEM_PROMPT", "AVAILABLE_TOOLS", "TOOL_RESULTS", "TOOL_CALLS", "TOOL_CONTENT", "THINK", "gMASK", "sMASK",
)  # fmt: skip
_ANGLE_TOKEN = rf"<\|[^<>|]{{3,}}+\|>|<\|{_WORD}>|<{_WORD}\|>|</?(?:{'|'.join(_ANGLE_NAMES)})>|<</?SYS>>"
# The last three are MiniMax's.
_SQUARE_TOKEN = rf"\[/?(?:{'|'.join(_SQUARE_NAMES)})\]|\[\|{_WORD}\|\]|\]~b\]|\]~!b\[|\[e~\["
# All but letters and line feeds.
_DRESS = r"(?:[^\w\n]|[\d_])"
_LETTERS = re.compile(r"[^\W\d_]+")
_LINE_ENDS = re.compile("[\r\x0b\x0c\x1c-\x1e]")
_FOREIGN = re.compile("[^\t-\r\x1c-\x7e]+")
# A line with a character without which nothing imitates.
_SUSPECT = r"<\[~&\x00-\x08\x0e-\x1b\x7f-\U0010ffff"
_SUSPECT_LINE = re.compile(rf"(?m)^[^\n{_SUSPECT}]*+[{_SUSPECT}][^\n]*+")
# What is escaped: the characters that are, or pass for, these.
_ANGLES = re.compile("[&<\ufe60\uff06\ufe64\uff1c]")
_ANGLES_AND_SQUARES = re.compile("[&<\ufe60\uff06\ufe64\uff1c\\[\ufe47\uff3b\u3010\u3014\u3016\u27e6~\uff5e]")
_MAY_BE_ESCAPED = re.compile(r"&(?=[#A-Za-z])")

_HEADING = re.compile(rf"(?m)^{_DRESS}*?\[((?=[^\[\]\n]*[^\W\d_])[^\[\]\n]+)\]{_DRESS}*+$")
_REFERENCE = re.compile(r"&(?:amp|lt|#\d+);")


def find_headings(text: str) -> tuple[str, ...]:
    """The lines of a template that hold no letters but those of a heading like ``[Problem]``, without brackets."""
    return tuple(dict.fromkeys(" ".join(_fold(name).split()).casefold() for name in _HEADING.findall(text)))


def escape(text: str, headings: tuple[str, ...] = ()) -> str:
    """``text`` with its imitating lines escaped.

    Args:
        text: anything.
        headings: of the template, as :func:`find_headings` gives them.
    """
    return _for_imitating_lines(text, headings, _escape_line)


def unescape(text: str, headings: tuple[str, ...] = ()) -> str:
    """The text that :func:`escape` was given."""
    return _for_imitating_lines(text, headings, lambda line, _: _REFERENCE.sub(lambda m: html.unescape(m[0]), line))


def _for_imitating_lines(text: str, headings: tuple[str, ...], change: Callable[[str, re.Pattern[str]], str]) -> str:
    anything, square = _patterns(headings)
    if not _imitates(text, anything):
        return text

    @lru_cache(maxsize=1024)
    def change_line(line: str) -> str:
        if not _imitates(line, anything):
            return line
        return change(line, _ANGLES_AND_SQUARES if _imitates(line, square) else _ANGLES)

    return _SUSPECT_LINE.sub(lambda match: change_line(match.group()), text)


def _escape_line(line: str, escaped: re.Pattern[str]) -> str:
    return escaped.sub(lambda match: _reference(match.group()), line)


def _reference(char: str) -> str:
    return {"&": "&amp;", "<": "&lt;"}.get(char) or f"&#{ord(char)};"


def _imitates(text: str, pattern: re.Pattern[str]) -> bool:
    """Whether ``pattern`` is in the text or in what it is an escape of."""
    for _ in range(MAX_ESCAPES + 1):
        if _shows(text, pattern):
            return True
        if not _MAY_BE_ESCAPED.search(text):
            return False
        inner = html.unescape(text)
        if inner == text:
            return False
        text = inner
    return True


def _shows(text: str, pattern: re.Pattern[str]) -> bool:
    """The same, where escapes are hidden by the spelling of the escapes themselves."""
    plain = _fold(text)
    if _found(pattern, plain):
        return True
    if plain is text:
        return False
    for _ in range(MAX_ESCAPES):
        if not _MAY_BE_ESCAPED.search(plain):
            return False
        inner = _fold(html.unescape(plain))
        if inner == plain:
            return False
        if _found(pattern, inner):
            return True
        plain = inner
    return True


def _found(pattern: re.Pattern[str], text: str) -> bool:
    return ("<" in text or "[" in text or "]~" in text) and pattern.search(text) is not None


@lru_cache(maxsize=64)
def _patterns(headings: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What imitates, and what of it is escaped at its ``[``."""
    square = _SQUARE_TOKEN
    if headings:
        # A bracket, the letters of a name, a bracket, and no other letter.
        names = "|".join(f"{_DRESS}*+".join(_LETTERS.findall(name)) for name in headings)
        square += rf"|^(?:(?!\[){_DRESS})*+\[{_DRESS}*+(?:{names})(?:(?!\]){_DRESS})*+\]{_DRESS}*+$"
    return re.compile(f"(?im){_TAG}|{_ANGLE_TOKEN}|{square}"), re.compile(f"(?im){square}")


def _fold(text: str) -> str:
    """Other spellings of ASCII as ASCII, without what has no width; every line end as a line feed."""
    if _FOREIGN.search(text):
        text = _FOREIGN.sub(lambda match: match.group().translate(_FOLDED), text)
    return _LINE_ENDS.sub("\n", text) if _LINE_ENDS.search(text) else text


_BRACKETS = dict(zip("\u3010\u3011\u3014\u3015\u3016\u3017\u27e6\u27e7", "[]" * 4, strict=True))
# Default_Ignorable_Code_Point, but for what the categories Cf and Cc hold.
_IGNORABLE = frozenset(
    code
    for first, last in (
        (0x34F, 0x34F), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x2065, 0x2065), (0x3164, 0x3164),
        (0xFE00, 0xFE0F), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8), (0xE0000, 0xE0FFF),
    )
    for code in range(first, last + 1)
)  # fmt: skip


class _Folded(dict[int, str]):
    """Each character's NFKC form.

    One at a time is enough, as the patterns are ASCII, and the NFKC of a whole text can take quadratic time.
    """

    def __missing__(self, code: int) -> str:
        char = chr(code)
        if _is_invisible(char):
            plain = ""
        elif char in "\x85\u2028\u2029":
            plain = "\n"
        elif char in _BRACKETS:
            plain = _BRACKETS[char]
        else:
            plain = unicodedata.normalize("NFKC", char)[:4].casefold()
        self[code] = plain
        return plain


_FOLDED = _Folded()


def _is_invisible(char: str) -> bool:
    return ord(char) in _IGNORABLE or (unicodedata.category(char) in ("Cf", "Cc") and not char.isspace())

r"""From a solution to its paragraphs, and from the judge's text to a verdict.

Everything here is pure, takes any text, never raises on one and never evaluates it, in time that grows with its length.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from operator import itemgetter

MAX_BOX_CHARS = 256
"""An index is not written in more; what is longer is none."""

MAX_BOXES = 1000
"""So many are looked at, from the last one back."""

THINKING = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel|>analysis": "<|channel|>final",
}
"""What opens a thinking block, and what closes it, in any case."""

# A closer is group 1.
_THINKING_MARK = re.compile(
    f"(?=[<\\[])(?:({'|'.join(map(re.escape, THINKING.values()))})|{'|'.join(map(re.escape, THINKING))})", re.IGNORECASE
)
_NOTHING_VISIBLE = re.compile(r"[\s\ufeff\u200b-\u200f\u2060]*+")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
# A box with its brace, or a number on its line, or at the end of the text; or another brace. Those with a backslash
# are none, but a pair of backslashes is a line break, after which a brace is a brace again.
_BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox)(?![A-Za-z@])(?:\s*+(?P<box>\{|\Z)|[^\S\n\r]*+(?P<bare>[-+\u2212]?[0-9]{1,256}+))?+"
    r"|\\(?:\\(?!boxed|fbox)|[{}])|(?P<brace>[{}])"
)
_PLAIN_INDEX = re.compile(r"-?[1-9][0-9]{0,8}|0")

_DASHES = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212\u02d7", "-"))
_WRAPPER = re.compile(
    r"\\(?:(?:text|math)(?:bf|it|tt|rm|sf|normal|md|up)?|emph|underline|boldsymbol|bm|mbox|hbox|operatorname"
    r"|displaystyle|textstyle|ensuremath|boxed|fbox|left|right|bf|it|tt|rm|large|Large)(?![A-Za-z])\*?"
)
_NO_BLANK = re.compile(r"\\!|\{,\}(?=[0-9])")
_BLANKS = re.compile(r"(?:\\[ ,;:()\[\]{}]|\\q?quad(?![A-Za-z])|[\s{}~$\"'`*\u2018\u2019\u201c\u201d])+")
_ESCAPED = re.compile(r"\\(?=[_#&])")
_FONTS_OF_MEANING = ("<super>", "<sub>", "<fraction>", "<circle>")

_NUMBER = r"[+-]? ?[0-9]+(?:\.0*)?"
_WORD = r"(?:paragraphs?|(?:paragraph )?index|idx)"
# "paragraph-3" is 3, but of "paragraph-1" nobody knows which is meant.
_HYPHEN = r"-(?!0*1(?![0-9]))"
_ITEM = (
    rf"(?:{_NUMBER}|# ?[0-9]+|{_WORD}(?: ?[_:=#] ?| ){_NUMBER}|{_WORD}(?:{_HYPHEN})?[0-9]+"
    r"|</? ?paragraph[ _-]?[0-9]+ ?>)"
)
_GLOSS = r"(?: ?\(([a-z ,_-]{0,80})\))?"
_CLEAN_GLOSS = re.compile(
    r" *(?:not found|(?:none|no (?:(?:wrong|incorrect|flawed) (?:paragraph|step)|error|mistake|flaw|issue)s?)"
    r"(?: found| detected)?|(?:all (?:paragraphs |steps )?(?:are )?|the solution is )?(?:correct|clean))? *"
)
_CONTRADICTION = re.compile(r"(?<![a-z])(?:no|none|not|all|maybe|perhaps|possibly|or|based|correct|clean)(?![a-z])")
_ONE = re.compile(rf"(?:{_ITEM}{_GLOSS}|\( ?{_ITEM} ?\)|\[ ?{_ITEM} ?\])")
_SEPARATOR = re.compile(r" ?(?:,? and|[,;&]) ?")
_ITEM_ALONE = re.compile(_ITEM)
_THOUSANDS = re.compile(r"[+-]? ?[0-9]{1,3}(?:,[0-9]{3})+(?:\.0*)?")
_VALUE = re.compile(r"[+-]? ?[0-9]+")


class UnknownReason(StrEnum):
    """Why a judgement has no verdict."""

    NO_BOX = "no_box"
    """There is no box after the thinking block."""

    NO_INDEX = "no_index"
    """The last box is empty, or what stands in it is no index."""

    OUT_OF_RANGE = "out_of_range"
    """The index names no paragraph, and no box before it does."""

    TRUNCATED = "truncated"
    """The critique was cut off: at ``fapo.judge.max_tokens``, or by the server (``finish_reason`` other than ``stop``),
    or its last box or thinking block is never closed."""

    TIE = "tie"
    """As many samples say clean as flawed."""

    TOO_LONG = "too_long"
    """Prompt and critique do not fit the judge's context."""

    REFUSED = "refused"
    """The server refused the request for another reason."""

    TIMEOUT = "timeout"
    """No answer within ``fapo.judge.timeout_seconds``."""

    UNREACHABLE = "unreachable"
    """The server could not be reached, or what it sent is no chat completion, or lacks a sample."""

    ERROR = "error"
    """The reward manager itself failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge said of a solution: clean, flawed at a paragraph, or nothing that counts."""

    index: int | None = None
    """First wrong paragraph, from 0; -1 for none; None if unknown."""

    reason: UnknownReason | None = None
    """Set exactly where ``index`` is None."""

    box: str | None = field(default=None, compare=False)
    """What stood in the box that decided, to be shown; None where there was none."""

    @property
    def kind(self) -> str:
        """``clean``, ``flawed`` or ``unknown``."""
        if self.index is None:
            return "unknown"
        return "clean" if self.index < 0 else "flawed"

    def __str__(self) -> str:
        if self.kind == "flawed":
            return f"flawed at {self.index}"
        return f"unknown ({self.reason})" if self.kind == "unknown" else "clean"


def split_paragraphs(solution: str, *, scope: str = "whole") -> list[str]:
    r"""Paragraphs of a solution: the texts between blank lines, without those that are blank.

    Only ``\n`` ends a line; a line is blank if it holds nothing but whitespace of any kind (blanks, tabs, ``\r``, form
    feeds, Unicode's separators), which is also what is stripped from both ends of a paragraph. So ``\r\n`` separates
    as ``\n`` does, and nothing that can be read is lost.

    Args:
        solution: the policy's text.
        scope: ``whole``, or ``after_think`` for what follows the thinking block that the text begins with. Its opening
            may be missing, as where the chat template writes it, and its first closing ends it: what a policy closes
            twice hides nothing. Where it is never closed, or nothing follows it, or text stands before it, that is
            the whole text too.
    """
    if scope == "after_think":
        solution = _after_thinking(solution)
    return [text for part in _BLANK_LINE.split(solution) if (text := part.strip())]


def _after_thinking(solution: str) -> str:
    for mark in _THINKING_MARK.finditer(solution):
        if mark[1]:
            rest = solution[mark.end() :]
            return rest if rest.strip() else solution
        if _NOTHING_VISIBLE.match(solution).end() < mark.start():
            break
    return solution


def parse_verdict(critique: str, *, num_paragraphs: int) -> Verdict:
    r"""The verdict in the last box after the last thinking block: -1, or an index below ``num_paragraphs``.

    Where that index is out of range, as when the judge quotes the final answer once more, the last box before it whose
    index is not decides. Of several indices in one box it is the earliest. ``docs/judge.md`` has the spellings.
    """
    marks = deque(_THINKING_MARK.finditer(critique), maxlen=1)
    if marks and not marks[0][1]:
        return Verdict(reason=UnknownReason.TRUNCATED)
    verdict = None
    for box in reversed(_boxes(critique[marks[0].end() :] if marks else critique)[-MAX_BOXES:]):
        indices = _indices(box) if box is not None else ()
        if indices and all(-1 <= index < num_paragraphs for index in indices):
            return Verdict(index=min(indices), box=box)
        if verdict is None:
            verdict = Verdict(reason=_reason(box, indices), box=box)
            if verdict.reason is not UnknownReason.OUT_OF_RANGE:
                break
    return verdict or Verdict(reason=UnknownReason.NO_BOX)


def _reason(box: str | None, indices: tuple[int, ...]) -> UnknownReason:
    if box is None:
        return UnknownReason.TRUNCATED
    return UnknownReason.OUT_OF_RANGE if len(indices) == 1 else UnknownReason.NO_INDEX


def _boxes(text: str) -> list[str | None]:
    r"""What stands in the boxes that are in no other box; None for one that is never closed.

    ``\boxed`` before neither a brace nor a number is a mention and no box, unless the text ends there.
    """
    boxes: list[tuple[int, str | None]] = []
    opened: list[int | None] = []  # where a box begins; None for another brace
    for mark in _BOX_OR_BRACE.finditer(text):
        if mark["bare"]:
            boxes.append((mark.end(), mark["bare"]))
        elif mark["box"] is not None or mark["brace"] == "{":
            opened.append(None if mark["brace"] else mark.end())
        elif mark["brace"] and opened and (start := opened.pop()) is not None:
            while boxes and boxes[-1][0] > start:
                boxes.pop()
            boxes.append((start, _shortened(text, start, mark.start())))
    boxes += [(start, None) for start in opened if start is not None]
    return [box for _, box in sorted(boxes, key=itemgetter(0))]


def _shortened(text: str, start: int, end: int) -> str:
    """A box that is too long holds no index, and nobody wants to see all of it."""
    return text[start:end].strip() if end - start <= MAX_BOX_CHARS else text[start : start + MAX_BOX_CHARS] + " [...]"


def _indices(box: str) -> tuple[int, ...]:
    """The indices that a box spells; none if it is no index."""
    return (int(box),) if _PLAIN_INDEX.fullmatch(box) else _spelled_indices(box)


@lru_cache(maxsize=4096)
def _spelled_indices(box: str) -> tuple[int, ...]:
    text = _plain(box)
    if _THOUSANDS.fullmatch(text):
        return (int(text.partition(".")[0].replace(",", "").replace(" ", "")),)
    if one := _ONE.fullmatch(text):
        spelled = _values(text)[0]
        return () if spelled == "-0" or _contradicts(one[1] or "", spelled) else (int(spelled),)
    # One by one: in one pattern, a blank that two parts of it may take makes the time exponential.
    if all(map(_ITEM_ALONE.fullmatch, _SEPARATOR.split(text))):
        indices = tuple(map(int, _values(text)))
        return () if "-" in "".join(_values(text)) else indices
    return ()


def _contradicts(gloss: str, index: str) -> bool:
    """Whether the words behind an index may mean another one."""
    return not _CLEAN_GLOSS.fullmatch(gloss) if int(index) == -1 else _CONTRADICTION.search(gloss) is not None


def _values(text: str) -> list[str]:
    text = re.sub(r"([a-z])-", r"\1 ", text)
    return [value.replace(" ", "") for value in _VALUE.findall(re.sub(r"\.0*", "", text))]


def _plain(box: str) -> str:
    """A box without its dress: lower case, ASCII where Unicode has only another font, one blank for all kinds."""
    if any(unicodedata.decomposition(char).startswith(_FONTS_OF_MEANING) for char in box):
        return ""
    text = unicodedata.normalize("NFKC", box).translate(_DASHES)
    text = "".join(char for char in text if unicodedata.category(char) != "Cf")
    text = _NO_BLANK.sub(lambda match: "," if "," in match.group() else "", _WRAPPER.sub(" ", text))
    text = _ESCAPED.sub("", _BLANKS.sub(" ", text)).casefold()
    return text.strip().rstrip(".,;:! ")


def combine_verdicts(verdicts: Sequence[Verdict]) -> Verdict:
    """The majority's verdict.

    Unknown ones have no vote; unless more than half vote, it is unknown for the most frequent reason, the first of
    equals. Clean against flawed first, and a tie is unknown; among the flawed the most frequent index, the earliest of
    equals.
    """
    votes = [verdict for verdict in verdicts if verdict.kind != "unknown"]
    if 2 * len(votes) <= len(verdicts):
        reasons = Counter(verdict.reason for verdict in verdicts if verdict.kind == "unknown")
        return Verdict(reason=reasons.most_common(1)[0][0] if reasons else UnknownReason.UNREACHABLE)
    flawed = Counter(verdict.index for verdict in votes if verdict.kind == "flawed")
    num_clean = len(votes) - flawed.total()
    if num_clean == flawed.total():
        return Verdict(reason=UnknownReason.TIE)
    return Verdict(index=-1 if num_clean > flawed.total() else min(flawed, key=lambda index: (-flawed[index], index)))


_HEADER = re.compile(r"--- critique ([0-9]{1,6}) of ([0-9]{1,6}), ([0-9]{1,9}) characters: [^\n]{1,80} ---\n")


def join_critiques(critiques: Iterable[str], verdicts: Sequence[Verdict]) -> str:
    """One text of several samples, each under a line with its own verdict; of one, the text itself.

    Unless that begins with such a line: then it has one of its own, so that :func:`split_critiques` is not misled.
    """
    critiques = list(critiques)
    if len(critiques) == 1 and not _HEADER.match(critiques[0]):
        return critiques[0]
    return "\n".join(
        f"--- critique {number} of {len(critiques)}, {len(text)} characters: {verdict} ---\n{text}"
        for number, (text, verdict) in enumerate(zip(critiques, verdicts, strict=True), 1)
    )


def split_critiques(joined: str) -> list[str]:
    """What :func:`join_critiques` was given. A text that is not of its making is one critique."""
    critiques: list[str] = []
    position = 0
    while header := _HEADER.match(joined, position):
        number, count, length = map(int, header.groups())
        position = header.end() + length + 1
        if number != len(critiques) + 1 or position > len(joined) + 1:
            break
        critiques.append(joined[header.end() : position - 1])
        if number == count and position == len(joined) + 1:
            return critiques
    return [joined]

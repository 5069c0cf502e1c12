r"""From a solution to the judge's prompt, and from the judge's text to a verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from verl_fapo.answers import last_box

_INTEGER = re.compile(r"-?\d{1,9}")
_IMITATED_TAG = re.compile(r"<(?=[\s/]*+paragraph_)", re.IGNORECASE)

_TASK = """\
Here are a problem, its reference answer, and a solution to check. {layout}

[Problem]
{problem}

[Reference answer]
{reference}

[Solution]
{solution}

Go through the solution paragraph by paragraph and say of each whether its reasoning is right. A right final answer \
does not excuse a wrong paragraph. Then give the index of the earliest wrong paragraph, or -1 if there is none, \
in \\boxed{{}}."""

_LAYOUTS = {
    "paragraphs": "The solution is cut into paragraphs, each between tags that carry its index, counted from 0.",
    "raw": "The paragraphs of the solution are separated by blank lines and counted from 0.",
}


class UnknownReason(StrEnum):
    """Why a judgement has no verdict."""

    NO_BOX = "no_box"
    """No boxed answer, an empty one, or one that is no index."""

    OUT_OF_RANGE = "out_of_range"
    """The index names no paragraph."""

    TRUNCATED = "truncated"
    """The critique was cut off at ``fapo.judge.max_tokens``."""

    REFUSED = "refused"
    """The server refused the request, for instance as too long for the judge's context."""

    TIMEOUT = "timeout"
    """No answer within ``fapo.judge.timeout_seconds``."""

    UNREACHABLE = "unreachable"
    """The server could not be reached, or what it sent is no chat completion."""

    ERROR = "error"
    """The reward manager itself failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the judge said of a solution: clean, flawed at a paragraph, or nothing that counts."""

    index: int | None = None
    """First wrong paragraph, from 0; -1 for none; None if unknown."""

    reason: UnknownReason | None = None
    """Set exactly where ``index`` is None."""

    @property
    def kind(self) -> str:
        """``clean``, ``flawed`` or ``unknown``."""
        if self.index is None:
            return "unknown"
        return "clean" if self.index < 0 else "flawed"


def split_paragraphs(solution: str) -> list[str]:
    """Paragraphs of a solution: the texts between blank lines, without those that are blank."""
    return [part.strip() for part in re.split(r"\n[^\S\n]*\n", solution) if part.strip()]


def judge_prompt(problem: str, reference: str, paragraphs: list[str], *, template: str = "paragraphs") -> str:
    """The judge's user message.

    Args:
        problem: the task given to the policy.
        reference: its reference answer.
        paragraphs: the solution, as :func:`split_paragraphs` cuts it.
        template: ``paragraphs`` (indexed tags) or ``raw``.
    """
    if template == "paragraphs":
        solution = "\n\n".join(
            f"<paragraph_{i}>\n{_IMITATED_TAG.sub('&lt;', text)}\n</paragraph_{i}>" for i, text in enumerate(paragraphs)
        )
    else:
        solution = "\n\n".join(paragraphs)
    return _TASK.format(layout=_LAYOUTS[template], problem=problem, reference=reference, solution=solution)


def parse_verdict(critique: str, *, num_paragraphs: int) -> Verdict:
    r"""The verdict in the last box after the thinking block: -1, or an index below ``num_paragraphs``."""
    box = last_box(critique.rpartition("</think>")[2])
    if box is None or not _INTEGER.fullmatch(box):
        return Verdict(reason=UnknownReason.NO_BOX)
    index = int(box)
    if not -1 <= index < num_paragraphs:
        return Verdict(reason=UnknownReason.OUT_OF_RANGE)
    return Verdict(index=index)

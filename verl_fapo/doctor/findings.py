"""What the doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_REASON = 400


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's."""

    section: str
    status: Literal["ok", "note", "problem"]
    what: str
    way_out: str = ""
    """A command or a setting that mends it; of a problem, never empty."""


@dataclass(frozen=True, slots=True)
class Composed:
    """The command's config, for the parts that come after its composition."""

    config_yaml: str
    environment: dict[str, str]
    """Variables that the command sets before it starts Ray."""


def reason(error: BaseException) -> str:
    """An exception and the one that it came from, in one line."""
    root = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    text = _line(error) if root is error else f"{_line(error)} <- {_line(root)}"
    # What went wrong stands first or last, tracebacks between.
    return text if len(text) <= MAX_REASON else f"{text[: MAX_REASON // 2]} ... {text[-MAX_REASON // 2 :]}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

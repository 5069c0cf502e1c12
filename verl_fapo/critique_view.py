r"""What the parser sees in critiques, shown to people: the commands ``verl-fapo verdict`` and ``template``.

A row, as in ``critiques.jsonl`` of a run folder; other keys are left alone::

    {"problem": "...", "solution": "One.\n\nTwo.", "ground_truth": "7", "critique": "... \\boxed{1}",
     "verdict": "flawed", "index": 1, "reason": null}
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fapo.critique import Verdict, combine_verdicts, parse_verdict, split_critiques, split_paragraphs
from verl_fapo.errors import DataError
from verl_fapo.templates import Template, derive_template, read_prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One row, read again."""

    paragraphs: list[str]
    verdicts: list[Verdict]
    """Of each critique."""

    verdict: Verdict
    """Of all of them."""

    recorded: str | None
    """What the row itself says, if that is another verdict; a critique does not tell that it was cut off."""


def read_rows(text: str, *, where: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file, one JSON object, a list of them, or one a line, with their numbers from 1.

    Raises:
        DataError: a row is none; names ``where`` and the row.
    """
    rows, text = 0, text.removeprefix("\ufeff")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    lines = text.split("\n")
    if isinstance(whole, dict | list):
        lines = [json.dumps(row) for row in (whole if isinstance(whole, list) else [whole])]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{where}: row {number}: no JSON ({exc})") from exc
        if not isinstance(row, dict):
            raise DataError(f"{where}: row {number}: {line[:40]!r} is no JSON object with 'solution' and 'critique'")
        rows += 1
        yield number, row
    if not rows:
        raise DataError(f"{where}: no rows; expected JSON objects with 'solution' and 'critique'")


def read_row(row: Mapping[str, Any], *, scope: str) -> Reading:
    """Parse the critiques of one row.

    Raises:
        DataError: the solution or the critiques are no texts.
    """
    paragraphs = split_paragraphs(row_text(row, "solution"), scope=scope)
    critiques = row.get("critiques")
    if critiques is None:
        critiques = split_critiques(row_text(row, "critique"))
    if not isinstance(critiques, list) or not critiques or not all(isinstance(text, str) for text in critiques):
        raise DataError(f"critiques is {str(critiques)[:40]!r}, expected a list of texts")
    verdicts = [parse_verdict(text, num_paragraphs=len(paragraphs)) for text in critiques]
    verdict = verdicts[0] if len(verdicts) == 1 else combine_verdicts(verdicts)
    parsed = {"verdict": verdict.kind, "index": verdict.index, "reason": verdict.reason}
    own = {key: row[key] for key in parsed if row.get("verdict") is not None and key in row}
    same = all(parsed[key] == value for key, value in own.items())
    recorded = None if same else " ".join(str(value) for value in own.values() if value is not None)
    return Reading(paragraphs=paragraphs, verdicts=verdicts, verdict=verdict, recorded=recorded)


def row_text(row: Mapping[str, Any], key: str) -> str:
    """A text of a row.

    Raises:
        DataError: it is not there, or no text.
    """
    if key not in row:
        raise DataError(f"no key {key!r}; the row has {', '.join(map(repr, row)) or 'none'}"[:300])
    if not isinstance(value := row[key], str):
        raise DataError(f"{key} is {json.dumps(value)[:40]}, expected text")
    return value


def show(number: int, reading: Reading) -> Iterator[str]:
    """The lines that the command prints of one row."""
    several = len(reading.verdicts) > 1
    yield f"row {number}: {len(reading.paragraphs)} paragraphs, {_told(reading.verdict)}"
    for i, verdict in enumerate(reading.verdicts if several else (), 1):
        yield f"  critique {i} of {len(reading.verdicts)}: {_told(verdict)}"
    if reading.recorded:
        yield f"  recorded in the row: {' '.join(harmless(reading.recorded).split())}"
    yield from marked(reading.paragraphs, reading.verdict.index)


def marked(paragraphs: Sequence[str], wrong_index: int | None) -> Iterator[str]:
    """Lines of numbered paragraphs, with a mark at the first wrong one."""
    width = len(str(len(paragraphs)))
    for index, paragraph in enumerate(paragraphs):
        wrong = index == wrong_index
        first, *rest = harmless(paragraph).split("\n")
        yield f"{'>>' if wrong else '  '} {index:>{width}}  {first}"
        for line in rest:
            yield f"{'>>' if wrong else '  '} {'':{width}}  {line}"
        if wrong:
            yield f"   {'':{width}}  ^ first wrong paragraph"


def as_json(number: int, reading: Reading) -> str:
    """The same for programs, as one line."""
    return json.dumps(
        {
            "row": number,
            "num_paragraphs": len(reading.paragraphs),
            **_fields(reading.verdict),
            "recorded": reading.recorded,
            "critiques": [_fields(verdict) for verdict in reading.verdicts],
        }
    )


def _fields(verdict: Verdict) -> dict[str, Any]:
    return {"verdict": verdict.kind, "index": verdict.index, "reason": verdict.reason, "box": verdict.box}


def _told(verdict: Verdict) -> str:
    return f"{verdict}" if verdict.box is None else f"{verdict}, from the box {verdict.box!r}"


def harmless(text: str) -> str:
    """Text of a model for a terminal: what would steer it, or is not seen, is spelled out."""
    return "".join(
        char.encode("unicode_escape").decode()
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else char
        for char in text
    )


def template_of(path: Path) -> tuple[Template, int, int]:
    """The template of a data set in the form of FAPO-Critic, JSON lines or parquet.

    Returns:
        The template, the number of rows, and how many of these :meth:`Template.render` writes otherwise, as they hold
        lines that imitate the prompt.

    Raises:
        DataError: the file can not be read, or its prompts are not from one template.
    """
    try:
        prompts = [_prompt(row, number) for number, row in _prompt_rows(path)]
        template = derive_template(prompts)
    except DataError as exc:
        raise DataError(f"{path}: {exc}") from exc
    parts = (read_prompt(template, prompt) for prompt in prompts)
    num_escaped = sum(template.render(*part) != prompt for part, prompt in zip(parts, prompts, strict=True) if part)
    return template, len(prompts), num_escaped


def _prompt_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    if path.suffix != ".parquet":
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as exc:
            raise DataError(f"no text in UTF-8 ({exc})") from exc
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as exc:
                    raise DataError(f"row {number}: no JSON ({exc})") from exc
        return
    try:
        yield from enumerate(pyarrow.parquet.read_table(path, columns=["prompt"]).to_pylist(), 1)
    except (pyarrow.ArrowException, ValueError) as exc:
        raise DataError(f"no parquet file with a column 'prompt' ({str(exc).splitlines()[0]})") from exc


def _prompt(row: Any, number: int) -> str:
    if isinstance(row, dict) and isinstance(row.get("prompt"), list) and len(row["prompt"]) > 1:
        raise DataError(f"row {number}: {len(row['prompt'])} messages in 'prompt', expected the user's alone")
    try:
        content = row["prompt"][0]["content"]
    except (LookupError, TypeError) as exc:
        raise DataError(f"row {number}: no message in 'prompt', expected a list of role and content") from exc
    if not isinstance(content, str):
        raise DataError(f"row {number}: the message is {str(content)[:40]!r}, expected text")
    return content

r"""The judge's prompts: two that are built in, those of the user's own files, and those read off a data set.

A template is text with three placeholders: ``{problem}``, ``{reference}``, and either ``{paragraphs}`` (the solution
cut, each paragraph between tags with its index) or ``{solution}`` (the paragraphs with blank lines between). All other
braces mean themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_fapo.errors import DataError, SettingsError
from verl_fapo.imitation import escape, find_headings, unescape

MAX_TEMPLATE_BYTES = 2**20

_PLACEHOLDER = re.compile(r"\{(problem|reference|paragraphs|solution)\}")
# Nobody could tell where one value ends and the next begins.
_ADJACENT = re.compile(rf"{_PLACEHOLDER.pattern}[^\S\n]*+{_PLACEHOLDER.pattern}")
_TAG_LINE = re.compile(r"(?m)^[^\S\n]*+</?paragraph_[0-9]+>|</?paragraph_[0-9]+>[^\S\n]*+$")
# What looks like a placeholder; the braces after a TeX command, as in \boxed{index}, are its own.
_WORD = re.compile(r"\\[A-Za-z]+\*?\{[^{}\n]*\}|\{([a-z][a-z_]{2,})\}")
_HEADING_LINE = re.compile(
    r"(?m)^(?=[^\n]*[A-Za-z])(?:([*_# ]*\[[^\[\]\n]+\][*_: ]*)|(#+ [^\n]+)|(\*\*[^\n]+\*\*:?)|[^\n]+:)$"
)

_TASK = """\
Here are a problem, its reference answer, and a solution to check. %s

[Problem]
{problem}

[Reference answer]
{reference}

[Solution]
%s

Go through the solution paragraph by paragraph and say of each whether its reasoning is right. A right final answer \
does not excuse a wrong paragraph. Then give the index of the earliest wrong paragraph, or -1 if there is none, \
in \\boxed{}."""


@dataclass(frozen=True, slots=True)
class Template:
    """A checked template."""

    text: str
    """With placeholders, each of the three there once."""

    headings: tuple[str, ...]
    """Its lines like ``[Problem]``, which no other text in the prompt may imitate."""

    def render(self, problem: str, reference: str, paragraphs: list[str]) -> str:
        """The judge's user message; a value's lines that imitate the message are escaped."""
        values = {
            "problem": escape(problem, self.headings),
            "reference": escape(reference, self.headings),
            "paragraphs": "\n\n".join(_tagged(i, escape(text, self.headings)) for i, text in enumerate(paragraphs)),
            "solution": escape("\n\n".join(paragraphs), self.headings),
        }
        return self._fill(values)

    def read_paragraphs(self, prompt: str) -> list[str]:
        """The paragraphs between the tags of a prompt, as :meth:`render` was given them.

        Of a template with ``{paragraphs}`` only: ``{solution}`` leaves no tags, and this is an empty list then.
        """
        return [unescape(text, self.headings) for text in tagged_paragraphs(prompt)]

    def _fill(self, values: dict[str, str]) -> str:
        # In one pass: a placeholder within a value is text.
        return _PLACEHOLDER.sub(lambda match: values[match[1]], self.text)


def judge_prompt(
    problem: str, reference: str, paragraphs: list[str], *, template: str | Template = "paragraphs"
) -> str:
    """The judge's user message.

    Args:
        problem: the task given to the policy.
        reference: its reference answer.
        paragraphs: the solution, as :func:`~verl_fapo.critique.split_paragraphs` cuts it.
        template: name of one that is built in.
    """
    return BUILT_IN[template].render(problem, reference, paragraphs)


def tagged_paragraphs(prompt: str) -> list[str]:
    """What stands between ``<paragraph_i>`` and ``</paragraph_i>`` lines, for i from 0 as far as they go."""
    return _tagged_part(prompt)[0]


def _tagged(index: int, text: str) -> str:
    return f"<paragraph_{index}>\n{text}\n</paragraph_{index}>"


def _tagged_part(prompt: str) -> tuple[list[str], int, int]:
    """The paragraphs, and where the first tag begins and the last one ends."""
    paragraphs: list[str] = []
    first, end = max(prompt.find("<paragraph_0>\n"), 0), 0
    while (start := prompt.find(opening := f"<paragraph_{len(paragraphs)}>\n", end)) >= 0:
        start += len(opening)
        stop = prompt.find(closing := f"\n</paragraph_{len(paragraphs)}>", start)
        if stop < 0:
            break
        paragraphs.append(prompt[start:stop])
        end = stop + len(closing)
    return paragraphs, first, end


def read_template(name: str) -> Template:
    """A built-in template by its name, or the one in a file.

    Raises:
        SettingsError: there is no such file, or what is in it is no template.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    key = f"fapo.judge.template={name!r}"
    try:
        if not Path(name).is_file():
            raise SettingsError(f"{key}: no such file; name {', '.join(BUILT_IN)}, or the path of a template file")
        with Path(name).open("rb") as file:
            content = file.read(MAX_TEMPLATE_BYTES + 1)
        if len(content) > MAX_TEMPLATE_BYTES:
            raise SettingsError(f"{key}: more than {MAX_TEMPLATE_BYTES} bytes; name a template file")
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as exc:
        raise SettingsError(f"{key}: no text in UTF-8 that can be read ({exc}); name a template file") from exc
    return parse_template(text, where=key)


def parse_template(text: str, *, where: str = "template") -> Template:
    """Check a template file's text. The line feed that ends its last line is no part of the template.

    Raises:
        SettingsError: a placeholder is missing, doubled, misspelled or not kept apart from the next, or a line begins
            or ends with a paragraph's tag; names ``where``, the line and what is expected.
    """
    text = text.removesuffix("\n")
    expected = "expected {problem}, {reference} and either {paragraphs} or {solution}, each once"
    seen: dict[str, int] = {}
    for match in _WORD.finditer(text):
        if match[1] and not _PLACEHOLDER.fullmatch(match[0]):
            line = text.count("\n", 0, match.start()) + 1
            raise SettingsError(f"{where}, line {line}: {match[0]} is no placeholder; {expected}")
    for match in _PLACEHOLDER.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        kind = "solution" if match[1] == "paragraphs" else match[1]
        if kind in seen:
            raise SettingsError(f"{where}, line {line}: {match[0]} after line {seen[kind]}; {expected}")
        seen[kind] = line
    for kind, name in {
        "problem": "{problem}",
        "reference": "{reference}",
        "solution": "{paragraphs} or {solution}",
    }.items():
        if kind not in seen:
            raise SettingsError(f"{where}, lines 1 to {text.count(chr(10)) + 1}: no {name}; {expected}")
    if match := _ADJACENT.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise SettingsError(f"{where}, line {line}: nothing between {{{match[1]}}} and {{{match[2]}}}; {expected}")
    if match := _TAG_LINE.search(text):
        line = text.count("\n", 0, match.start()) + 1
        said = f"{match[0].strip()} begins or ends it, as only {{paragraphs}} may"
        raise SettingsError(f"{where}, line {line}: {said}; {expected}")
    return Template(text=text, headings=find_headings(text))


BUILT_IN = {
    "paragraphs": parse_template(
        _TASK
        % (
            "The solution is cut into paragraphs, each between tags that carry its index, counted from 0.",
            "{paragraphs}",
        )
    ),
    "raw": parse_template(
        _TASK % ("The paragraphs of the solution are separated by blank lines and counted from 0.", "{solution}")
    ),
}


def derive_template(prompts: str | Iterable[str]) -> Template:
    """The template that prompts with tagged paragraphs were made from, such as those of FAPO-Critic.

    Before the tags each prompt must have three heading lines of one style (``[Math Problem]``, ``## Problem``,
    ``**Problem**`` or ``Problem:``): the last three that all of them share. Problem and reference answer are what
    follows the first two.

    Args:
        prompts: one, or better several: the more problems, the surer.

    Raises:
        DataError: they are not made from one template; names the row, from 1.
    """
    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts:
        raise DataError("no prompts; expected some with the tags <paragraph_0> ... </paragraph_0>")
    heads = [_head(prompt, row) for row, prompt in enumerate(prompts, 1)]
    end = _tagged_part(prompts[0])[2]
    shared = set.intersection(*({match[0] for match in _HEADING_LINE.finditer(head)} for head in heads))
    marks = [match for match in _HEADING_LINE.finditer(heads[0]) if match[0] in shared]
    marks = [match for match in marks if _style(match) == _style(marks[-1])][-3:]
    if len(marks) < 3 or heads[0][marks[2].end() :].strip():
        raise DataError(
            "row 1: expected three heading lines of one style (problem, reference answer, solution), such as "
            f"[Math Problem], that all rows share; found {len(marks)} before <paragraph_0>"
        )
    head = heads[0]
    problem = _value_between(head, marks[0].end(), marks[1].start())
    reference = _value_between(head, marks[1].end(), marks[2].start())
    text = (
        f"{head[: problem[0]]}{{problem}}{head[problem[1] : reference[0]]}{{reference}}{head[reference[1] :]}"
        f"{{paragraphs}}{prompts[0][end:]}"
    )
    try:
        template = parse_template(text + "\n", where="the prompts' own wording")
    except SettingsError as exc:
        raise DataError(str(exc)) from exc
    for row, prompt in enumerate(prompts, 1):
        _check_row(template, prompt, row)
    return template


def _style(heading: re.Match[str]) -> tuple[bool, ...]:
    return tuple(group is not None for group in heading.groups())


def _head(prompt: str, row: int) -> str:
    paragraphs, start, _ = _tagged_part(prompt)
    if not paragraphs:
        raise DataError(f"row {row}: no paragraphs between <paragraph_0> and </paragraph_0> in the prompt")
    return prompt[:start]


def _value_between(text: str, start: int, end: int) -> tuple[int, int]:
    value = text[start:end]
    left = len(value) - len(value.lstrip())
    return start + left, max(start + left, start + len(value.rstrip()))


def read_prompt(template: Template, prompt: str) -> tuple[str, str, list[str]] | None:
    """Problem, reference answer and paragraphs of a prompt from this template as they stand there; None if it is not.

    Only for templates with ``{paragraphs}`` after the other two, as :func:`derive_template` makes.
    """
    before, between, after_reference, tail = _PLACEHOLDER.split(template.text)[::2]
    paragraphs, start, end = _tagged_part(prompt)
    head = prompt[:start]
    if not (paragraphs and head.startswith(before) and head.endswith(after_reference) and prompt[end:] == tail):
        return None
    problem, mark, reference = head[len(before) : len(head) - len(after_reference)].rpartition(between)
    return (problem, reference, paragraphs) if mark else None


def _check_row(template: Template, prompt: str, row: int) -> None:
    parts = read_prompt(template, prompt)
    if parts is None:
        raise DataError(f"row {row}: its prompt is not from the template of row 1; leave rows of other templates out")
    problem, reference, paragraphs = parts
    tagged = "\n\n".join(_tagged(i, text) for i, text in enumerate(paragraphs))
    again = template._fill({"problem": problem, "reference": reference, "paragraphs": tagged})
    if again != prompt:
        position = next((i for i, (new, old) in enumerate(zip(again, prompt, strict=False)) if new != old), len(prompt))
        raise DataError(
            f"row {row}: rendered back, the prompt differs at character {position}: {again[position:][:40]!r} for "
            f"{prompt[position:][:40]!r}"
        )

from __future__ import annotations

import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_critique import DOCS, table_of_docs
from verl_fapo.imitation import escape, find_headings, unescape

HEADINGS = ("problem", "reference answer", "solution")
CONTROL_TOKENS = [
    "<|turn>", "<turn|>", "<|tool_call>", "<channel|>", "<|im\u2581end>", "[|endofturn|]", "[|user|]", "[/INST]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]",
    "[THINK]", "[/THINK]", "[gMASK]", "<sop>", "<eop>", "<EOS_TOKEN>", "<BOS_TOKEN>", "<seed:bos>", "<seed:think>",
    "</seed:think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<start_of_turn>",
    "<end_of_image>", "]~b]", "]~!b[", "[e~[", "\uff3d\uff5eb\uff3d", "<think>", "</think>", "<thinking>",
    "</thinking>",
]  # fmt: skip
INVISIBLE = [
    0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x180B, 0x180F, 0x200B, 0x200F, 0x202A, 0x202E, 0x2060, 0x2065,
    0x206F, 0x3164, 0xFE00, 0xFE0F, 0xFEFF, 0xFFA0, 0xFFF0, 0xFFF8, 0x1BCA0, 0x1BCA3, 0x1D173, 0x1D17A, 0xE0000,
    0xE0020, 0xE0100, 0xE0FFF,
]  # fmt: skip
IMITATIONS = {
    **{token: f"a {token} b" for token in CONTROL_TOKENS},
    **{f"U+{code:04X}": f"<para{chr(code)}graph_1>" for code in INVISIBLE},
    "closing tag": "</paragraph_0>",
    "within a line": "so </paragraph_0> <paragraph_1> and",
    "blanks and case": "x < / Paragraph _ 0 > y",
    "no width": "<para\u200bgraph_1>",
    "variation selector": "<\ufe0fparagraph_1>",
    "control character": "<\x00paragraph_1>",
    "full width": "\uff1cparagraph_1\uff1e",
    "another font": "<\U0001d429aragraph_1>",
    "HTML": "&lt;paragraph_1&gt;",
    "HTML in capitals": "&LT;paragraph_1",
    "HTML number": "&#x3c;paragraph_1",
    "HTML twice": "&amp;lt;paragraph_1",
    "HTML without end": "&ltparagraph_1",
    "HTML in pieces": "&l&#116;;paragraph_1",
    "full width HTML": "\uff06lt;paragraph_1",
    "HTML with no width": "&l\u200bt;paragraph_1",
    "HTML without end to it": "&" + "amp;" * 50 + "lt;",
    "heading": "[Problem]",
    "heading with blanks": "  [ reference   answer ] ",
    "bold heading": "**[Solution]**:",
    "Markdown heading": "## [Solution]",
    "HTML heading": "&#91;Solution]",
    "full width heading": "\uff3bSolution\uff3d",
    "heading after another line end": "a\r[Problem]",
    "heading between Unicode line ends": "a\u2028[Problem]\x85b",
    "end of a turn": "<|im_end|>",
    "DeepSeek's": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "sentence": "a</s>b",
    "Gemma's": "<end_of_turn>",
    "Llama's": "x [/INST] y",
    "system": "<<SYS>>",
    "numbered heading": "1. [Solution]",
    "bullet": "\u2022 + [Solution]",
    "table": "| [Solution] |",
    "two brackets": "[[Solution]]",
    "TeX's brackets": "\\[Solution\\]",
    "exclamation": "![Reference answer]!",
    "bold inside": "[**Reference** answer:]",
    "Chinese brackets": "\u3010Solution\u3011",
    "heading among other brackets": "\u3014 [ (1) Solution ] \u27e7",
}
HARMLESS = [
    "a < b", "x & y", "a &= b \\\\", "&amp; so &lt; it", "[Problem] is hard", "the [Solution]", "[1]", "<p>tag</p>",
    "0 <|x| <|y|", "|a|<|b|", "|a|<|b|>0", "<|a+b+c>", "|sin|<|cos|", "a<b|c", "x<abc", "[|x|]", "]~[",
    "x~y", "\u27e8\u03c8|\u03c6\u27e9", "the [solution] is", "[Solution] A", "[solution set]", "\\[ 1 \\]",
    "(Solution)", "Solution", "<tool>", "[1, 2]~b", "\u3010 1 \u3011", "[problems]",
    "\\[ x \\]", "\uff1c\uff06", "paragraph_1", "a\r\nb\u2028c\x85d", "",
]  # fmt: skip


@pytest.mark.parametrize("line", IMITATIONS.values(), ids=IMITATIONS)
def test_line_that_imitates_is_escaped_and_no_other(line):
    escaped = escape(f"before & < [x]\n{line}\nafter & <", HEADINGS)
    before, inner, after = escaped.split("\n")
    assert (before, after) == ("before & < [x]", "after & <")
    assert inner != line and not {"<", "\uff1c"} & set(inner)
    assert unescape(escaped, HEADINGS) == f"before & < [x]\n{line}\nafter & <"


def test_escape_changes_as_little_as_it_can():
    assert escape("a [b] </paragraph_0> & c") == "a [b] &lt;/paragraph_0> &amp; c"
    assert escape("## [Solution]", HEADINGS) == "## &#91;Solution]"
    assert escape("\uff1cparagraph_0>") == "&#65308;paragraph_0>"


def test_control_tokens_in_the_docs_are_escaped():
    section = (DOCS / "judge.md").read_text("utf-8").partition("3. a control token")[2].partition("\n\n")[0]
    tokens = re.findall(r"`([^`]+)`", section)
    assert len(tokens) > 25
    for token in tokens:
        assert escape(f"a {token.replace('...', 'end')}") != f"a {token.replace('...', 'end')}", token


def test_examples_in_the_docs():
    rows = table_of_docs("Text that imitates the prompt")
    for text, escaped in rows:
        text = text.strip("`")
        assert escape(text, HEADINGS) == (text if escaped == "the same" else escaped.strip("`"))
    assert len(rows) == 4


@pytest.mark.parametrize("line", HARMLESS)
def test_other_lines_stay_as_they_are(line):
    assert escape(line, HEADINGS) == line


def test_headings_are_the_templates_own():
    assert escape("[Math Problem]", HEADINGS) == "[Math Problem]"
    assert find_headings("1. [Problem]\n[[ Reference answer ]]\n[1]\n\\[x\n") == HEADINGS[:2]
    assert find_headings("Text [x]\n[Problem]\n\n**[Reference  Answer]**: \n[] [y] z\n") == HEADINGS[:2]


ATTACK = st.lists(st.sampled_from([
    "<", ">", "/", "paragraph", "_0", "&", "lt", ";", "amp", "#60", "#91;", "#x3c;", "\n", "\r", "\u2028", "&#10;", "[",
    "problem", "Solution", "]", "|", "im_end", " ", "\u200b", "\uff1c", "\uff06", "\uff3b", "INST", "*", "s", "\ufe0f",
    "&lt;", "&amp;", "~b", "]~b]", "\u3010", "\\[", "1", "<|turn>", "\uff5e", "\uffa0", "\x00", "\u017f", "\ud800", "x",
])).map("".join)  # fmt: skip


@given(ATTACK | st.text())
def test_escape_is_undone_and_leaves_no_tag(text):
    escaped = escape(text, HEADINGS)
    assert unescape(escaped, HEADINGS) == text
    assert "</paragraph" not in escaped and "<paragraph" not in escaped and "<|im_end|>" not in escaped
    for line, new in zip(text.split("\n"), escaped.split("\n"), strict=True):
        assert (escape(line, HEADINGS) == line) == (new == line)


def test_everything_that_passes_for_an_escaped_character_is_known():
    for code in range(0x80, 0x110000):
        if set(unicodedata.normalize("NFKC", chr(code))) & set("<&["):
            assert chr(code) in "\ufe60\uff06\ufe64\uff1c\ufe47\uff3b"
        assert "~" not in unicodedata.normalize("NFKC", chr(code)) or chr(code) == "\uff5e"


DEGENERATE = {
    "angles": "<" * 1_000_000,
    "blanks": "<" + " " * 1_000_000,
    "slashes": "< / " * 250_000,
    "headings": "[Problem] " * 100_000,
    "dress": "*" * 1_000_000 + "\n[Problem",
    "brackets": "[" * 1_000_000 + "x",
    "headings in brackets": "[1[" * 300_000 + "Problem" + "]1]" * 300_000 + "x",
    "tildes": "]~" * 500_000,
    "bars": "<|abc" * 200_000,
    "words": "<" + "abc" * 300_000 + "|>",
    "HTML": "&lt;" * 250_000,
    "HTML inside HTML": "&" + "amp;" * 250_000,
    "tags": "".join(f"<paragraph_{i}>\n" for i in range(60_000)),
    "line ends": "\r" * 1_000_000 + "[Problem]",
    "marks out of order": "a" + "\u0301" * 250_000 + "\u0327" * 250_000,
    "ligatures": "\ufdfa" * 330_000,
    "control tokens": "<|" + "a" * 1_000_000,
    "lines": "<\n" * 500_000 + "<paragraph",
}
DEGENERATE_TEMPLATES = {
    "brackets": "[" * 1_000_000 + "x",
    "closed brackets": "[1]" * 300_000 + "x",
    "names": "[x]" * 300_000,
    "open names": "[x" * 500_000,
}


@pytest.mark.timeout(60)  # linear time is a fraction of a second, quadratic time many minutes
@pytest.mark.parametrize("text", DEGENERATE_TEMPLATES.values(), ids=DEGENERATE_TEMPLATES)
def test_headings_are_found_in_linear_time(text):
    find_headings(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", DEGENERATE.values(), ids=DEGENERATE)
def test_degenerate_text_takes_linear_time(text):
    escape(text, HEADINGS)

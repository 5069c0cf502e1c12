# ruff: noqa: RUF001
"""One spelling for answers that look the same: blanks, Unicode, delimiters, fonts, short fractions, thousands."""

from __future__ import annotations

import re
import unicodedata

from verl_fapo.answers.numbers import DECIMAL

_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒﹣－", "-"),
        **dict.fromkeys("  \u2002\u2003\u2004\u2005\u2006\u2007\u2008 \u200a \u205f　", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
        **dict.fromkeys("‘’", "'"),
        **dict.fromkeys("“”", '"'),
        **{char: f"^{{{digit}}}" for char, digit in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-", strict=True)},
        **{char: f"_{{{digit}}}" for char, digit in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)},
        "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ", "÷": "/", "∕": "/", "⁄": "/", "∗": "*",
        "±": "\\pm ", "∞": "\\infty ", "π": "\\pi ", "Π": "\\Pi ", "√": "\\sqrt ", "°": "^{\\circ}", "º": "^{\\circ}",
        "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "∪": "\\cup ",
        "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "θ": "\\theta ", "α": "\\alpha ", "β": "\\beta ",
        "γ": "\\gamma ", "λ": "\\lambda ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}",
        "。": ".", "…": "\\dots ", "¢": " cents", "‰": "\\text{permille}",
    }
)  # fmt: skip
_JOINED_POWERS = re.compile(r"(?<=[\d-])\}\^\{(?=[\d-])")
_VULGAR = re.compile("([¼-¾⅐-⅞])")
_DELIMITER = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?(?!\d)")
_STYLE = re.compile(
    r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|boxed|fbox|rm|bf|it|sf|tt|cal|centering)(?![A-Za-z])|"
    r"\\(?:color|textcolor|phantom|hphantom|vphantom)\s*\{[^{}]*\}|\\text\s*\{\s*\}"
)
_MATH_SHIFT = re.compile(r"(\\\\|\\\$)|\$|\\[()\[\]]")
_THOUSANDS = re.compile(r"(?<=\d)(?:(?:,|\{,\}) ?\\! ?|\{,\}|\{\\,\}|,\\,|\\[,!;: ]|~|\{ \})(?=\d{3}(?!\d))")
_SPACE = re.compile(
    r"(\\\\)|\\(?:[,;:>! ]|(?:quad|qquad|enspace|thinspace|medspace|thickspace|hfill)(?![A-Za-z]))|~|"
    r"\\[hv]space\*?\{[^{}]*\}"
)
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|sc|up|md|sl)?|mbox|hbox|math(?:rm|bf|sf|it|tt|normal)|operatorname\*?|emph|"
    r"boldsymbol|symbf|bm|pmb|underline)\s*(?=\{)"
)
_PLAIN_TEXT = re.compile(r"\\text\{([^{}]*)\}")
FUNCTIONS = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|pi|inf|infinity|lim|max|min|gcd|lcm", re.IGNORECASE
)
_AFTER_NUMBER = re.compile(r"[\d}]\s*\Z")
_PHRASE = re.compile(
    r"\A\s*(?:\\text\{\s*)?(?:the |The )?(?:final |Final )?[Aa]nswer(?: is\b:?|:)\s*\}?\s*(?=\S)(?!not\b)"
)
_ENVIRONMENT = re.compile(
    r"\\(?:begin|end)\{(?:aligned|align\*?|equation\*?|gathered|split)\}|(?<=\\\\)\[\d+\s*(?:pt|ex|em|mm)\]"
)
_FRACTION = re.compile(r"\\[dtc]?frac(?![a-z])|\\surd(?![a-z])")
_TAKES = {"\\frac": 2, "\\binom": 2, "\\sqrt": 1}
_ARGUMENT = re.compile(r"\s*(?:\\[A-Za-z]+|[^\s{}])")
_OF_ROOT = re.compile(r"\s*(?:\(([^()]*)\)|(\d+))")
_INDEX = re.compile(r"\s*\[[^\[\]]*\]")
_GROUP = re.compile(r"\s*\{")
_BRACE = re.compile(r"\\[\\{}]|[{}]")
_TAKER = re.compile(r"\\(?:frac|binom|sqrt)(?![A-Za-z])")
_CHOOSE = re.compile(r"\{([^{}]*)\\choose([^{}]*)\}")
_ASCII_RELATION = re.compile(r"<=|>=|(?<![\w!)}])!=|(?<= )!=|==")
_ASCII_RELATIONS = {"<=": "\\le ", ">=": "\\ge ", "!=": "\\ne ", "==": "="}
_SYNONYM_COMMANDS = re.compile(r"\\(varnothing|[lc]dots|dotsc?|tbinom|dbinom)(?![A-Za-z])")
_SYNONYM_NAMES = {"varnothing": "\\emptyset", "tbinom": "\\binom", "dbinom": "\\binom"}
_BLANKS = re.compile(r"\s+")
_TRAILING = re.compile(r"(?:(?<![.\s])\s*\.(?=\s*\Z)|[\s,;:]|\\\\|(?<!\\)\\(?![A-Za-z{}%$&,\\]))+\Z")


def clean(text: str) -> str:
    """One spelling for what looks the same: blanks, Unicode, delimiters, fonts, short fractions, thousands."""
    if not text.isascii():
        text = _VULGAR.sub(lambda m: _vulgar_fraction(m.group()), text).translate(_UNICODE)
        text = unicodedata.normalize("NFKC", _JOINED_POWERS.sub("", text))
    text = _PHRASE.sub("", _MATH_SHIFT.sub(_kept, _BLANKS.sub(" ", text)))
    if "=" in text:
        text = _ASCII_RELATION.sub(lambda m: _ASCII_RELATIONS[m.group()], text)
    if "\\" in text or "~" in text or "{" in text:
        if _ENVIRONMENT.search(text):
            text = _ENVIRONMENT.sub("", text if "matrix" in text or "array" in text else text.replace("&", ""))
        text = _STYLE.sub(" ", _DELIMITER.sub(" ", text))
        text = _SPACE.sub(_kept, _THOUSANDS.sub("", text))
        text = _PLAIN_TEXT.sub(_unwrapped, _TEXT.sub(r"\\text", text))
        text = _SYNONYM_COMMANDS.sub(
            lambda m: _SYNONYM_NAMES.get(m.group(1), "\\dots"), _CHOOSE.sub(r"\\binom{\1}{\2}", text)
        )
        text = _whole_arguments(_FRACTION.sub(lambda m: "\\sqrt" if "surd" in m.group() else "\\frac", text))
    if text.startswith("**") and text.endswith("**"):
        text = text.strip("*")
    text = _TRAILING.sub("", text).strip()
    return _BLANKS.sub(" ", text)


def _whole_arguments(text: str) -> str:
    r"""Braces around the arguments of ``\frac12``, ``\sqrt 2``, ``\sqrt(2)``."""
    out, at = [], 0
    while taker := _TAKER.search(text, at):
        out.append(text[at : taker.end()])
        at = taker.end()
        if taker.group() == "\\sqrt" and (index := _INDEX.match(text, at)):
            out.append(index.group().strip())
            at = index.end()
        for _ in range(_TAKES[taker.group()]):
            argument, at = _argument(text, at, of_root=taker.group() == "\\sqrt")
            out.append(argument)
    return "".join([*out, text[at:]])


def _argument(text: str, at: int, *, of_root: bool) -> tuple[str, int]:
    """The next argument with its braces, and where it ends."""
    if group := _GROUP.match(text, at):
        inner, end = _group(text, group.end() - 1)
        return "{" + _whole_arguments(inner) + "}" if end else text[at:], end or len(text)
    if of_root and (match := _OF_ROOT.match(text, at)):
        return f"{{{match.group(1) or match.group(2)}}}", match.end()
    if match := _ARGUMENT.match(text, at):
        return f"{{{match.group().strip()}}}", match.end()
    return "", at


def _group(text: str, start: int) -> tuple[str, int]:
    """What stands in the braces that begin at ``start``, and where they end; 0 if they are not closed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += (brace.group() == "{") - (brace.group() == "}")
        if depth == 0:
            return text[start + 1 : brace.start()].strip(), brace.end()
    return "", 0


def _kept(match: re.Match) -> str:
    """A line break of a matrix, or a dollar sign."""
    return match.group(1) or " "


def _vulgar_fraction(char: str) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", char).partition("\u2044")
    return f"\\frac{{{top}}}{{{bottom}}}"


def _unwrapped(match: re.Match) -> str:
    """Text of one symbol or of a number is mathematics, but for a unit behind a number."""
    inner = match.group(1).strip()
    if (
        len(inner) == 1
        and inner.isalpha()
        and inner not in "eid"
        and _AFTER_NUMBER.search(match.string, 0, match.start())
    ):
        return match.group()
    if FUNCTIONS.fullmatch(inner) and not inner.lower().startswith("inf"):
        return f"\\{inner} "
    return inner if len(inner) == 1 or DECIMAL.fullmatch(inner) else match.group()

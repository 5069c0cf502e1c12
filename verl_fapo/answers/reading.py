r"""From the spelling of an answer to what it says: numbers, words, tuples, intervals, sets, matrices, relations.

Nothing is evaluated but arithmetic on rational numbers of bounded size; what remains, such as ``\sqrt{2}+x``, is an
:class:`Expression`, and whether two of these are equal is for :mod:`verl_fapo.answers.symbolic` to say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from verl_fapo.answers.forms import Chain, Expression, Form, Items, Named, Number, Quantity, Range, Relation, Words
from verl_fapo.answers.numbers import MAX_DEPTH, Arithmetic, read_decimal, read_number
from verl_fapo.answers.spelling import FUNCTIONS
from verl_fapo.answers.tokens import TOKEN, split, squeezed, strip, wraps
from verl_fapo.answers.units import DEGREES, KNOWN_UNITS, MONEY, MONEY_BEHIND, POWER, TAIL, unit_name
from verl_fapo.settings import AnswerSettings

# "$1,000.99", "1,000 miles"
_GROUPED_DIGITS = re.compile(r"[^\d,()\[\]{}]*(?<!\d)[1-9]\d{0,2}(?:,\d{3})+(?!\d|,)[^,)\]]*")
_LETTER_UNIT = re.compile(r"[+-]?[\d.,]+ [mgshl]")
# "(B) 16"
_OPTION = re.compile(r"(?:\\text\{)?\s*\([A-J]\)\s*\}?\s*([-\d\\(].*)", re.DOTALL)
_COMMA_NUMBER = re.compile(r"[+-]?\d{1,100},\d{1,100}")
_EQUALS = {"=": "=", "\\equiv": "\\equiv", "\\approx": "\\approx", "\\simeq": "\\approx", "\\doteq": "\\approx",
           "\\in": "\\in", "\\sim": "\\sim", "\\cong": "\\cong"}  # fmt: skip
_ORDER = {"<": "<", ">": ">", "\\lt": "<", "\\gt": ">", "\\le": "<=", "\\leq": "<=", "\\leqslant": "<=", "\\leqq": "<=",
          "\\ge": ">=", "\\geq": ">=", "\\geqslant": ">=", "\\geqq": ">=", "\\ne": "!=", "\\neq": "!="}  # fmt: skip
_RELATIONS = _EQUALS | _ORDER
_JOINTS = re.compile(r"\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}")
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|hat|bar|measuredangle|Delta|mathcal)\s*)?"
    r"(?:[A-Za-z]|[A-Z]{2,4}|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|theta|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi"
    r"|chi|psi|omega|kappa|eta|zeta|ell|Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega)(?![A-Za-z])"
    r"|\\text\{[A-Za-z ]{1,30}\}|\{[A-Z]{1,4}\}|\|[A-Z]{1,2}\|)(?:_(?:\w|\{[^{}]{1,12}\}))?(?:\^\{?[*]\}?)?"
)
_DENIED = re.compile(
    r"\b(?:not|no|never|wrong|incorrect|false|half|twice|double|un\w+|without|except|minus)\b", re.IGNORECASE
)
_CALL = re.compile(r"[A-Za-w](?:_\w)?'{0,3}(?:\^\{-1\})?\([^()=<>]{1,20}\)")
_VALUES = {"\\pi", "\\infty", "\\emptyset", "\\frac", "\\sqrt", "e", "i"}
_CONSTANT = {"\\frac", "\\sqrt", "\\pi", "\\cdot", "\\times", "\\div", "\\binom", "\\infty", "\\circ", "\\log", "\\ln",
             "\\sin", "\\cos", "\\tan", "\\overline", "\\dot", "\\degree", "\\pm"}  # fmt: skip
_BRACKETS = {
    "(": "(", "[": "[", "\\{": "{", "\\lbrace": "{", "\\lbrack": "[", "\\langle": "<", ")": ")", "]": "]", "\\}": "}",
    "\\rbrace": "}", "\\rbrack": "]", "\\rangle": ">",
}  # fmt: skip
_WHOLE_LINE = (Expression("-\\infty"), Expression("\\infty"))
_MATRIX = re.compile(r"\\begin\{(?:[pbB]?matrix|smallmatrix|array)\}")
# Of a single letter are only articles before a longer word: a-b is a difference.
_WORDS = re.compile(r"(?:(?:[Aa]n?|[Tt]he) )?[^\W\d_]{2,}(?:(?:[ '.-]| a )[^\W\d_]{2,})*")
_VOWEL = re.compile(r"[aeiou]|[^\x00-\x7f]", re.IGNORECASE)


def readings(text: str, options: AnswerSettings) -> list[Form]:
    """What a cleaned answer may mean, the likeliest first: ``1,000`` is a number, or two of them."""
    tokens = TOKEN.findall(text)
    forms = [_read(tokens, options, 0)]
    if _COMMA_NUMBER.fullmatch(text):
        if isinstance(forms[0], Number):
            if not re.search(r",0", text):
                forms.append(_read_list(tokens, options, 0, loose=False) or forms[0])
        elif options.decimal_comma:
            forms.append(read_decimal(text.replace(",", ".")))
    if options.letter_with_text and (option := _OPTION.fullmatch(text)):
        forms.append(_read(TOKEN.findall(option.group(1)), options, 0))
    return forms


def _read(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form:
    tokens = strip(tokens)
    text = "".join(tokens)
    if depth > MAX_DEPTH or not tokens:
        return Expression(squeezed(text))
    if (number := read_number(text)) is not None:
        return number
    if tokens[0] == "\\text" and len(tokens) > 2 and wraps(tokens[1:]):  # mathematics in it
        return _read(tokens[2:-1], options, depth + 1)
    if _GROUPED_DIGITS.fullmatch(text):
        return _read([token for token in tokens if token != ","], options, depth + 1)
    for read in READERS:
        if (form := read(tokens, options, depth + 1)) is not None:
            return form
    return _read_leaf(text, tokens, options)


def _read_list(tokens: Sequence[str], options: AnswerSettings, depth: int, *, loose: bool = True) -> Form | None:
    marked = [
        "," if token == ";" or (token.startswith("\\text{") and _JOINTS.fullmatch(token))
        or (token in ("and", "or") and 0 < i < len(tokens) - 1) else token
        for i, token in enumerate(tokens)
    ]  # fmt: skip
    parts, _ = split(marked, ",")
    if loose and any(part[:1] == [" "] for part in parts[1:]):  # "1,000, 2,000"
        parts = _joined_thousands(parts)
    parts = [part for part in map(strip, parts) if part]
    if len(parts) < 2:
        return _read(parts[0], options, depth) if parts and len(parts[0]) < len(tokens) else None
    forms = [_read(part, options, depth) for part in parts]
    if any(isinstance(form, Range | Relation) for form in forms) and any("and" in token for token in tokens):
        return Expression(squeezed("".join(tokens)))  # both at once: no list of alternatives
    return Items("list", _with_names(forms))


def _joined_thousands(parts: list[Sequence[str]]) -> list[Sequence[str]]:
    joined: list[list[str]] = []
    for part in parts:
        if (
            joined
            and re.fullmatch(r"\d{3}(\.\d+)?", "".join(part))
            and re.search(r"(?:\A|\D)\d{1,3}(?:,\d{3})*\Z", "".join(joined[-1]))
        ):
            joined[-1] += [",", *part]
        else:
            joined.append(list(part))
    return joined


def _with_names(forms: list[Form]) -> tuple[Form, ...]:
    """``n = 1, 2, 3`` names all of its values."""
    if isinstance(forms[0], Named) and not any(isinstance(form, (Named, Relation, Range)) for form in forms[1:]):
        return (Named(forms[0].name, Items("list", (forms[0].value, *forms[1:])), ""),)
    return tuple(forms)


def _name(tokens: Sequence[str]) -> str | None:
    """The name that a left side is: a symbol, ``f(x)``, ``(p, q)``, ``S_{ABC} : S``; None if it is more than that."""
    text = squeezed("".join(strip(tokens)))
    if len(text) > 60:
        return None
    if "\\text" in text and _DENIED.search(text):
        return None
    if _CALL.fullmatch(text) and not re.match(r"[a-c]\(\d", text):
        return text
    inner = text[1:-1] if text[:1] == "(" and text[-1:] == ")" else text
    if re.fullmatch(r"\\frac\{[A-Z]{2,3}\}\{[A-Z]{2,3}\}|[A-Z]{2,3}/[A-Z]{2,3}", text):
        return text  # a ratio of segments
    names = re.split(r"[,:]", inner)
    fine = all(_NAME.fullmatch(name) and name not in _VALUES for name in names)
    return text if fine and (len(names) == 1 or "," not in inner or inner != text) else None


def _read_relation(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    parts, found = split(tokens, _RELATIONS)
    if parts and found and not strip(parts[0]) and len(found) == 1 and found[0] in ("=", "\\approx"):
        return _read(parts[1], options, depth)
    if not found or not all(strip(part) for part in parts):
        return None
    operators = [_RELATIONS[token] for token in found]
    sides = [squeezed("".join(strip(part))) for part in parts]
    name = _name(parts[0])
    if name is None and operators == ["="] and _name(parts[1]) is not None and not _has_letters(parts[0]):
        parts, sides, name = parts[::-1], sides[::-1], _name(parts[1])  # "5 = x"
    latex = "".join(tokens)
    if set(operators) <= {"=", "\\approx"}:
        if name is not None:
            value = _chain(parts[1:], operators[1:], options, depth)
            num = name.count(",") + 1 if name[0] == "(" else 1
            if num == 1 or (isinstance(value, Items) and value.brackets == "()" and len(value.items) == num):
                return Named(name, value, latex)
        if not any(map(_has_letters, parts)):
            return _chain(parts, operators, options, depth)
    elif operators == ["\\in"] and name is not None:
        return Named(name, _read(parts[1], options, depth), "")
    elif set(operators) <= {"<", "<=", ">", ">="} and (interval := _interval(parts, operators, options, depth)):
        return Range(*interval, latex)
    if len(operators) == 1:
        return Relation(sides[0], operators[0], sides[1])
    return Expression(squeezed(latex))


def _chain(parts: Sequence[Sequence[str]], operators: Sequence[str], options: AnswerSettings, depth: int) -> Form:
    """``a = b`` says two spellings of one value; ``a \approx b`` says a."""
    exact = [parts[0], *(part for part, operator in zip(parts[1:], operators, strict=True) if operator == "=")]
    values = tuple(_read(part, options, depth) for part in exact)
    return values[0] if len(values) == 1 else Chain(values)


def _has_letters(tokens: Sequence[str]) -> bool:
    """Whether there may be an unknown in it."""
    return any(token[0].isalpha() and token not in ("e", "i") for token in tokens) or any(
        token.startswith("\\") and token[1:2].isalpha() and not token.startswith(("\\text", "\\begin", "\\end"))
        and token not in _CONSTANT for token in tokens
    )  # fmt: skip


def _interval(
    parts: Sequence[Sequence[str]], operators: Sequence[str], options: AnswerSettings, depth: int
) -> tuple[str, Items] | None:
    """The name in ``a < x < b``, ``x < b`` or ``a < x``, and where it lies."""
    falling = operators[0][0] == ">"
    if any((operator[0] == ">") is not falling for operator in operators):
        return None
    if falling:
        parts, operators = parts[::-1], operators[::-1]
    if len(parts) == 2:
        if (name := _name(parts[0])) is not None:
            low, high, ends = None, parts[1], ("", operators[0])
        elif (name := _name(parts[1])) is not None:
            low, high, ends = parts[0], None, (operators[0], "")
        else:
            return None
    elif len(parts) == 3 and (name := _name(parts[1])) is not None:
        (low, _, high), ends = parts, operators
    else:
        return None
    brackets = ("[" if ends[0].endswith("=") else "(") + ("]" if ends[1].endswith("=") else ")")
    first = _read(low, options, depth) if low is not None else Expression("-\\infty")
    last = _read(high, options, depth) if high is not None else Expression("\\infty")
    return name, Items(brackets, (first, last))


def _read_union(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    parts, found = split(tokens, {"\\cup"})
    if found and all(strip(part) for part in parts):
        return Items("union", tuple(_read(part, options, depth) for part in parts))
    return None


def _read_ratio(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    """``3 : 4``, and ``3:30``."""
    parts, found = split(tokens, {":", "\\colon"})
    if found and all(strip(part) for part in parts):
        return Items(":", tuple(_read(part, options, depth) for part in parts))
    return None


def _read_plus_minus(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    if tokens.count("\\pm") + tokens.count("\\mp") != 1:
        return None
    i = next(i for i, token in enumerate(tokens) if token in ("\\pm", "\\mp"))
    plus = [*tokens[:i], *(["+"] if strip(tokens[:i]) else []), *tokens[i + 1 :]]
    minus = [*tokens[:i], "-", *tokens[i + 1 :]]
    return Items("list", (_read(plus, options, depth), _read(minus, options, depth)))


def _read_brackets(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    pair = _BRACKETS.get(tokens[0], "") + _BRACKETS.get(tokens[-1], "")
    if tokens[0] == "{" and tokens[-1] == "}" and wraps(tokens):
        return _read(tokens[1:-1], options, depth)
    if len(pair) != 2 or not wraps(tokens) or (pair[0] in "{<") != (pair[1] in "}>"):
        return None
    parts, _ = split(tokens[1:-1], {",", ";"})
    if pair == "{}" and (builder := _set_builder(tokens[1:-1], options, depth)):
        return builder
    if not all(strip(part) for part in parts):
        return Expression("\\emptyset") if pair == "{}" and len(parts) == 1 else None
    if pair == "{}":
        if any(token in ("|", "\\mid", ":", "\\dots") for token in tokens):
            return None
        return Items("set", _with_names([_read(part, options, depth) for part in parts]))
    if len(parts) == 1:
        inner = _read(parts[0], options, depth)
        return inner if pair == "()" or (isinstance(inner, Items) and inner.brackets == "matrix") else None
    items = tuple(_read(part, options, depth) for part in parts)
    return Expression("\\mathbb{R}") if pair == "()" and items == _WHOLE_LINE else Items(pair, items)


def _set_builder(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Range | None:
    r"""``x \mid x > 2``."""
    parts, found = split(tokens, {"|", "\\mid", ":"})
    if len(found) != 1 or _name(split(parts[0], {"\\in"})[0][0]) is None:
        return None
    form = _read_relation(strip(parts[1]), options, depth) if strip(parts[1]) else None
    return form if isinstance(form, Range) else None


def _read_matrix(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    if not (_MATRIX.match(tokens[0]) and tokens[-1].startswith("\\end{") and wraps(tokens)):
        return None
    rows = [row for row in split(tokens[1:-1], {"\\\\"})[0] if strip(row)]
    cells = [[_read(cell, options, depth) for cell in split(row, {"&"})[0]] for row in rows]
    return Items("matrix", tuple(Items("matrix", tuple(row)) for row in cells))


def _read_quantity(tokens: Sequence[str], options: AnswerSettings, depth: int) -> Form | None:
    text = "".join(tokens)
    text = MONEY_BEHIND.sub(r"\2\1", text) if MONEY_BEHIND.fullmatch(text) else text
    money = MONEY.match(text)
    if money:
        unit = {"€": "€", "£": "£", "¥": "¥", "\\pounds": "£", "\\euro": "€"}.get(money.group(2), "$")
        if money.group(2).startswith("Rs"):
            unit = "rs"
        inner = _read(TOKEN.findall(money.group(1) + text[money.end() :]), options, depth)
        same = isinstance(inner, Quantity) and inner.unit == unit
        return inner if same else Quantity(inner, unit) if isinstance(inner, (Number, Expression)) else None
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![a-z])", text):
        return None  # its degrees are the function's
    degrees = list(DEGREES.finditer(text))
    if len(degrees) == 1 and degrees[0].start() > 0:
        rest = re.sub(r"\\text|[{}\s]", "", text[degrees[0].end() :]).upper()
        if rest in ("", "C", "F"):
            return _quantity(text[: degrees[0].start()], f"deg{rest.lower()}", options, depth)
    match = TAIL.fullmatch(text)
    if match is None:
        return None
    if match["percent"]:
        return _quantity(match["head"], "%", options, depth) if not match["power"] else None
    words = (match["inner"] if match["text"] else match["plain"]).strip()
    if not match["text"] and len(words) == 1 and not _LETTER_UNIT.fullmatch(f"{match['head']} {words}"):
        return None  # 10 - 4 n
    apart = not match["text"] and text[match.start("plain") - 1] == " "
    unit = unit_name(words, spelled_out=bool(match["text"]), apart=apart)
    if unit is None or (not match["text"] and not re.search(r"(?:\d|\\pi)[\s)}\]]*\Z", match["head"])):
        return None
    if match["power"]:
        unit += POWER.sub(r"^\1", match["power"])
    return _quantity(match["head"], unit, options, depth)


def _quantity(head: str, unit: str, options: AnswerSettings, depth: int) -> Form | None:
    tokens = TOKEN.findall(head)
    if _has_letters(tokens) and unit not in KNOWN_UNITS:
        return None  # "x bar" is no number of bars
    value = _read(tokens, options, depth)
    return Quantity(value, unit) if isinstance(value, (Number, Expression)) else None


def _read_leaf(text: str, tokens: Sequence[str], options: AnswerSettings) -> Form:
    if (value := Arithmetic(tokens, mixed_numbers=options.mixed_numbers).value()) is not None:
        return Number(value)
    if re.fullmatch(r"[-+.\d ]+", text):
        return Expression(text)  # several numbers
    if len(tokens) == 1 and text.startswith("\\text{"):
        inner = text[6:-1].strip()
        if inner.lower() in ("infinity", "inf"):
            return Expression("\\infty")
        if re.search(r"[\d=]", inner):
            return _read(TOKEN.findall(inner), options, MAX_DEPTH - 3)
        inner = inner[1:-1] if inner[:1] == "(" and inner[-1:] == ")" else inner
        return read_number(inner) or Words(" ".join(inner.rstrip(".").split()))
    words = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())
    if words.lower() in ("infinity", "inf", "+infinity", "-infinity"):
        return Expression("-\\infty" if words[0] == "-" else "\\infty")
    if _WORDS.fullmatch(words) and len(words) > 2 and _VOWEL.search(words.split()[-1]) and not FUNCTIONS.match(words):
        return Words(words)
    return Expression(squeezed(text).removeprefix("+"))


READERS = (
    _read_list,
    _read_relation,
    _read_union,
    _read_ratio,
    _read_brackets,
    _read_matrix,
    _read_plus_minus,
    _read_quantity,
)
"""Tried in this order; what none of them takes is a leaf."""

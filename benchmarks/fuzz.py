"""Does any text make a parser raise, hang or run code? ``python benchmarks/fuzz.py --inputs 1000000``

Each input is made by mutating texts of tests/answers/corpus.jsonl, of the verdict grammar and of the imitation rule:
cut, doubled, swapped, spliced with one another, and with the pieces that parsers stumble over. Every target gets every
input; Math-Verify is left out (its process is killed on time, which the tests show). A failure prints its input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.table import Table

from verl_fapo.answers import comparison, final_answer, verify
from verl_fapo.critique import parse_verdict, split_paragraphs
from verl_fapo.errors import FAPOError
from verl_fapo.imitation import escape, unescape
from verl_fapo.templates import judge_prompt, parse_template, tagged_paragraphs

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "answers" / "corpus.jsonl"
SLOW_SECONDS = 1.0
MAX_CHARS = 4000
HEADINGS = ("problem", "solution")
PIECES = [
    *("\\boxed{", "\\fbox", "}", "{", "\\{", "\\}", "\\\\", "\\frac", "\\sqrt", "\\text{", "\\begin{pmatrix}", "&"),
    *("<think>", "</think>", "<paragraph_0>", "</paragraph_1>", "\uff1cparagraph_2>", "<|im_end|>", "[Problem]"),
    *("&lt;", "&amp;", "&#60;", "**[Solution]**", "\n\n", "\r\n", "\u2028", "\x00", "\u200b", "\ud800", "{problem}"),
    *("-1", "\u22121", "3, 5", "9" * 50, "9^{9^{9}}", "__import__('os').abort()", "1e999", "½", "²", "∞", " and ", "%"),
]


def compare(text: str) -> None:
    verify(f"\\boxed{{{text}}}", text[::2])
    verify(text, "\\frac{1}{2}")


def fill_prompt(text: str) -> None:
    paragraphs = split_paragraphs(text)
    assert len(tagged_paragraphs(judge_prompt("p", "r", paragraphs))) == len(paragraphs)
    assert unescape(escape(text, HEADINGS), HEADINGS) == text


def template(text: str) -> None:
    with contextlib.suppress(FAPOError):
        parse_template(text)


TARGETS: dict[str, Callable[[str], object]] = {
    "answers: box": final_answer,
    "answers: comparison": compare,
    "critique: verdict": lambda text: parse_verdict(text, num_paragraphs=4),
    "critique: paragraphs": split_paragraphs,
    "prompt: tags and escapes": fill_prompt,
    "template file": template,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="texts for every target (default: 100000)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: 1)")
    options = parser.parse_args()
    if options.inputs < 1:
        parser.error("expected --inputs of 1 or more")
    signal.signal(signal.SIGALRM, too_slow)
    comparison.WORKER.ask = lambda *args, **kwargs: None
    seeds = [text for line in CORPUS.read_text(encoding="utf-8").splitlines() for text in texts(json.loads(line))]
    rng = random.Random(options.seed)
    seconds, worst = dict.fromkeys(TARGETS, 0.0), dict.fromkeys(TARGETS, 0.0)
    for _ in range(options.inputs):
        text = mutated(rng, seeds)
        for name, target in TARGETS.items():
            started = time.perf_counter()
            signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
            try:
                target(text)
            except BaseException:
                print(f"{name} fails on {text!r}", file=sys.stderr)
                raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            took = time.perf_counter() - started
            seconds[name] += took
            worst[name] = max(worst[name], took)
    table = Table("target", "inputs", "mean, us", "worst, ms")
    for name in TARGETS:
        mean, longest = seconds[name] / options.inputs * 1e6, worst[name] * 1e3
        table.add_row(name, f"{options.inputs:,}", f"{mean:.0f}", f"{longest:.1f}")
    Console(width=100).print(table)


def too_slow(signum: int, frame: object) -> NoReturn:
    raise TimeoutError(f"more than {SLOW_SECONDS} s")


def texts(row: dict) -> tuple[str, str]:
    return row["prediction"], row["ground_truth"]


def mutated(rng: random.Random, seeds: list[str]) -> str:
    text = rng.choice(seeds)
    for _ in range(rng.randint(1, 6)):
        at, end = sorted(rng.randint(0, len(text)) for _ in range(2))
        how = rng.random()
        if how < 0.2:
            text = text[:at] + text[end:]
        elif how < 0.5:
            text = text[:at] + rng.choice(PIECES) + text[at:]
        elif how < 0.6:
            text = text[:end] + text[at:end] * rng.choice((1, 2, 30)) + text[end:]
        elif how < 0.75:
            text = text[:at] + rng.choice(seeds) + text[end:]
        elif how < 0.9:
            text = (
                text[:at]
                + chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x110000))))
                + text[at:]
            )
        else:
            text = text[at:end][::-1] + text
    return text[:MAX_CHARS]


if __name__ == "__main__":
    main()

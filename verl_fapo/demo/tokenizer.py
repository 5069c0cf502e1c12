r"""A tokenizer whose tokens are the phrases of the world and of the prompts, so that texts are short.

``7``, `` + ``, ``5``, `` = ``, ``12``, ``.\n\n`` are six tokens; a fixed line of the judge's template is one.
Everything is found by rendering, so it goes along when a wording changes. Other ASCII text is told by its characters,
and what is not ASCII is ``<|unk|>``. Decoding gives back the text to the letter.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from verl_fapo.data import problem_row
from verl_fapo.demo.world import MAX_VALUE, NUM_STEPS, imperfect_solution, perfect_critique, problems, solution
from verl_fapo.templates import judge_prompt

SPECIAL = ("<|pad|>", "<|end|>", "<|unk|>", "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUM_RENDERED = 1000
"""Problems from which the phrases are taken; enough to see each many times."""
MAX_PARAGRAPHS = NUM_STEPS + 4

# A label like "Step 1: ", or a number, or what stands between them up to the end of a sentence or line.
_PHRASE = re.compile(r"[A-Z]\w+ \d+: |\d+|[^\d\n]+?(?:\. |(?=\d)|$|\n+)|\n+")
_LINE = re.compile(r"\n*[^\n]+\n*")
_BLANK = "\0"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer that policy and judge share."""
    words = sorted({*_fixed_lines(), *_phrases()} - set(string.printable))
    vocabulary = [*SPECIAL, *string.printable, *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<|unk|>"))
    longest_first = sorted(words, key=len, reverse=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*map(_literal, longest_first), r"[\s\S]"])), behavior="isolated"
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _fixed_lines() -> Iterator[str]:
    """Lines of the prompts that are the same for every problem."""
    row = problem_row(_BLANK, "", data_source="", split="", index=0)
    for prompt in (row["prompt"][-1]["content"], judge_prompt(_BLANK, _BLANK, [_BLANK] * MAX_PARAGRAPHS)):
        for passage in prompt.split(_BLANK):
            yield from _LINE.findall(passage)


def _phrases() -> Iterator[str]:
    rng = random.Random(0)
    yield from map(str, range(MAX_VALUE + 1))
    for problem in islice(problems("train", seed=0), NUM_RENDERED):
        flawed, _ = imperfect_solution(problem, rng, error_rate=0.5)
        right = solution(problem)
        critiques = [perfect_critique(problem, text) for text in (right, flawed, f"{right}\n\n{right}", "?")]
        for text in (problem.question, right, *critiques):
            yield from _PHRASE.findall(text)


def _literal(text: str) -> str:
    """A pattern for the tokenizers' regex engine that matches ``text``."""
    return re.sub(r"([^A-Za-z0-9\n ])", r"\\\1", text)

"""Supervised training of a small Llama from scratch; ``python -m verl_fapo.demo.training policy FOLDER SEED``."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from verl_fapo.demo.lessons import Lesson, apprentice_lessons, judge_lessons, policy_lessons
from verl_fapo.demo.tokenizer import make_tokenizer

HEAD_DIM = 32
"""One of those that vLLM's attention on CPUs knows."""

INITIAL_SCALE = 0.06
"""Standard deviation of the first weights; models this narrow learn sooner from larger ones than the usual 0.02."""

ATTENTION_GAIN = 0.7

NOT_SCORED = -100
WARM_SHARE, COOL_SHARE = 0.1, 0.5
"""Of the steps, in which the learning rate rises at the beginning and falls at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one model is made."""

    lessons: Callable[[int], Iterator[Lesson]]
    width: int
    num_layers: int
    num_steps: int
    batch_size: int
    learning_rate: float


JUDGE = Recipe(lessons=judge_lessons, width=64, num_layers=2, num_steps=700, batch_size=32, learning_rate=4e-3)
RECIPES = {
    "policy": Recipe(lessons=policy_lessons, width=64, num_layers=2, num_steps=400, batch_size=64, learning_rate=5e-3),
    "judge": JUDGE,
    "apprentice": replace(JUDGE, lessons=apprentice_lessons),
}


def save_trained(recipe: Recipe, folder: Path, *, seed: int, say: Callable[[str], None]) -> None:
    """Train a model as ``recipe`` says and save it with its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, width=recipe.width, num_layers=recipe.num_layers)
    lessons = recipe.lessons(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step / recipe.num_steps))
    for step in range(recipe.num_steps):
        loss = answer_loss(model, *batch(list(islice(lessons, recipe.batch_size)), tokenizer))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 50 == 0:
            say(f"{step + 1} of {recipe.num_steps} steps, loss {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_model(tokenizer: PreTrainedTokenizerFast, *, width: int, num_layers: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=num_layers,
            num_attention_heads=width // HEAD_DIM,
            num_key_value_heads=width // HEAD_DIM,
            max_position_embeddings=4096,
            initializer_range=INITIAL_SCALE,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    for layer in model.model.layers:
        compare_at_first(layer.self_attn)
    return model


@torch.no_grad()
def compare_at_first(attention: torch.nn.Module) -> None:
    """Start attention at looking for like tokens and subtracting what it finds, so that equals cancel out.

    A judge has to tell equal from unequal, which ordinary weights learn late, as no token alone says anything of it.

    Source: mimetic initialization, arXiv:2305.09828.
    """
    for query in attention.q_proj.weight.split(HEAD_DIM):
        torch.nn.init.orthogonal_(query, ATTENTION_GAIN)
    for value in attention.v_proj.weight.split(HEAD_DIM):
        torch.nn.init.orthogonal_(value, ATTENTION_GAIN)
    attention.k_proj.weight.copy_(attention.q_proj.weight)
    attention.o_proj.weight.copy_(-attention.v_proj.weight.T)


def answer_loss(model: LlamaForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labelled tokens.

    Args:
        tokens: [B, T] ids, padded on the right, so that causal attention needs no mask.
        labels: [B, T] the same ids where they are scored, ``NOT_SCORED`` elsewhere.
    """
    hidden = model.model(input_ids=tokens).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    scored = wanted != NOT_SCORED
    return cross_entropy(model.lm_head(hidden[scored]), wanted[scored])


def batch(lessons: list[Lesson], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Tokens and labels, [B, T]; only the answers are scored."""
    prompts = [chat(lesson.prompt, tokenizer) for lesson in lessons]
    answers = [tokenizer.encode(lesson.answer + tokenizer.eos_token) for lesson in lessons]
    shape = len(lessons), max(map(len, map(list.__add__, prompts, answers)))
    tokens, labels = torch.full(shape, tokenizer.pad_token_id), torch.full(shape, NOT_SCORED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return tokens, labels


def chat(prompt: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """A user's message as the servers encode it."""
    message = {"role": "user", "content": prompt}
    return tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)


def _rate(progress: float) -> float:
    return min(1.0, progress / WARM_SHARE + 1e-3, (1 - progress) / COOL_SHARE)


def _end_with_parent() -> None:
    """End this process when the one that holds our standard input does, however it ended."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    name, target, seed = sys.argv[1:]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    save_trained(RECIPES[name], Path(target), seed=int(seed), say=lambda text: print(text, flush=True))

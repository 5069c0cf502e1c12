"""How good are the two models of the demo? ``python benchmarks/tiny_world.py --seed 1``

Warms them up, or takes them from the cache, and measures them on validation problems, which neither has seen.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_fapo.answers import verify
from verl_fapo.critique import parse_verdict, split_paragraphs
from verl_fapo.demo.lessons import judge_question
from verl_fapo.demo.training import chat
from verl_fapo.demo.warmup import tiny_models
from verl_fapo.demo.world import Problem, first_flaw, imperfect_solution, problems, slip, solution
from verl_fapo.settings import JudgeSettings

BATCH = 256
Answered = list[tuple[Problem, str]]


class Writer:
    """A model that answers prompts in batches."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def answers(self, prompts: list[str], *, max_tokens: int, **sampling: object) -> list[str]:
        return [
            text
            for start in range(0, len(prompts), BATCH)
            for text in self._batch(prompts[start : start + BATCH], max_new_tokens=max_tokens, **sampling)
        ]

    def _batch(self, prompts: list[str], **sampling: object) -> list[str]:
        ids = [chat(prompt, self.tokenizer) for prompt in prompts]
        inputs = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        tokens = self.model.generate(**inputs, **sampling)
        return self.tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_right(problem: Problem, text: str) -> bool:
    return verify(text, str(problem.answer)).correct


def measure_policy(policy: Writer, asked: list[Problem]) -> tuple[dict[str, float], Answered]:
    """Rates of the policy, and its right answers."""
    prompts = [problem.prompt for problem in asked]
    sampled = policy.answers(prompts, max_tokens=64, do_sample=True, temperature=1.0, top_k=0)
    greedy = policy.answers(prompts, max_tokens=64, do_sample=False)
    right = [(problem, text) for problem, text in zip(asked, sampled, strict=True) if is_right(problem, text)]
    return {
        "right": len(right) / len(asked),
        "flawed among right": sum(first_flaw(*pair) >= 0 for pair in right) / max(1, len(right)),
        "greedy right": sum(map(is_right, asked, greedy)) / len(asked),
    }, right


def measure_judge(judge: Writer, judged: Answered) -> dict[str, float]:
    """How the judge's verdicts agree with the checker's; ``flawed`` is the positive class."""
    default = JudgeSettings()
    sampling = {"do_sample": True, "temperature": default.temperature, "top_p": default.top_p, "top_k": 0}
    critiques = judge.answers([judge_question(*pair) for pair in judged], max_tokens=80, **sampling)
    truths = [first_flaw(*pair) for pair in judged]
    verdicts = [
        parse_verdict(critique, num_paragraphs=len(split_paragraphs(text))).index
        for critique, (_, text) in zip(critiques, judged, strict=True)
    ]
    pairs = list(zip(truths, verdicts, strict=True))
    flawed = sum(truth >= 0 for truth in truths)
    called = sum(verdict is not None and verdict >= 0 for verdict in verdicts)
    found = sum(truth >= 0 and verdict is not None and verdict >= 0 for truth, verdict in pairs)
    return {
        "judged": len(judged),
        "precision": found / max(1, called),
        "recall": found / max(1, flawed),
        "F1": 2 * found / max(1, called + flawed),
        "F1 of always flawed": 2 * flawed / (len(judged) + flawed),
        "clean called flawed": (called - found) / max(1, len(judged) - flawed),
        "unknown": sum(verdict is None for verdict in verdicts) / len(judged),
        "index agrees": sum(truth == verdict for truth, verdict in pairs) / len(judged),
    }


def made(asked: list[Problem], make: Callable[[Problem, random.Random], str]) -> Answered:
    rng = random.Random(0)
    return [(problem, make(problem, rng)) for problem in asked]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num", type=int, default=1000, help="validation problems")
    parser.add_argument("--cache", type=Path, help="take the models from here if they are there; default: make them")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        started_at = time.monotonic()
        policy, judge = map(
            Writer, tiny_models(options.cache or Path(temporary), ["policy", "judge"], seed=options.seed, say=print)
        )
        print(f"{'warm-up seconds':40} {time.monotonic() - started_at:.1f}")
    torch.manual_seed(options.seed)
    asked = list(islice(problems("test", seed=options.seed), options.num))
    rates, right = measure_policy(policy, asked)
    show("policy", rates)
    show("judge of the policy's right answers", measure_judge(judge, right))
    show("judge of right solutions", measure_judge(judge, made(asked, lambda problem, _: solution(problem))))
    for rate in (0.05, 0.4):
        texts = made(asked, lambda problem, rng, rate=rate: imperfect_solution(problem, rng, error_rate=rate)[0])
        right = [pair for pair in texts if is_right(*pair)]
        show(f"judge of right answers, error rate {rate:g}", measure_judge(judge, right))
    slips = made(asked, lambda problem, rng: slip(solution(problem), rng))
    show("judge of slips with a right answer", measure_judge(judge, [pair for pair in slips if is_right(*pair)]))


def show(title: str, rates: dict[str, float]) -> None:
    print(title)
    for name, value in rates.items():
        print(f"  {name:38} {value:.3f}" if name != "judged" else f"  {name:38} {value}")


if __name__ == "__main__":
    main()

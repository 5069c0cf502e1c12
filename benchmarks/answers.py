"""Who is right about answers, and at what price? ``python benchmarks/answers.py``

Five verifiers in one run, in turns: ours; the rule of the public FAPO recipe (the box in the last 300 characters,
both sides normalised by ``math_dapo``); veRL's ``math_reward`` and ``math_dapo``; Math-Verify as veRL calls it. The
times are those of the real rollouts of rollouts_math.jsonl, one call at a time in this process, our cache emptied
before each round; a first question starts our process of Math-Verify, which is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from verl.utils.reward_score import math_dapo, math_reward
from verl.utils.reward_score.math_verify import _verify_in_subprocess as math_verify_of_verl

from verl_fapo.answers import verification, verify

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def ours(solution: str, ground_truth: str) -> bool:
    return verify(solution, ground_truth).correct


def fapo_recipe(solution: str, ground_truth: str) -> bool:
    box = math_dapo.last_boxed_only_string(solution[-300:])
    if box is None:
        return False
    answer = math_dapo.normalize_final_answer(math_dapo.remove_boxed(box))
    return answer == math_dapo.normalize_final_answer(ground_truth)


def verl_math_reward(solution: str, ground_truth: str) -> bool:
    return bool(math_reward.compute_score(solution, ground_truth))


def verl_math_dapo(solution: str, ground_truth: str) -> bool:
    return math_dapo.compute_score(solution, ground_truth, strict_box_verify=True)["score"] > 0


def math_verify(solution: str, ground_truth: str) -> bool:
    return bool(math_verify_of_verl(f"\\boxed{{{ground_truth}}}", solution))


VERIFIERS: dict[str, Callable[[str, str], bool]] = {
    "verl_fapo": ours,
    "FAPO recipe's rule": fapo_recipe,
    "veRL math_reward": verl_math_reward,
    "veRL math_dapo, boxed": verl_math_dapo,
    "Math-Verify as in veRL": math_verify,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="over all rollouts, in turns (default: 5)")
    parser.add_argument(
        "--data", type=Path, default=DATA, help="folder of answers_visible.jsonl and rollouts_math.jsonl"
    )
    options = parser.parse_args()
    if options.rounds < 1 or not (options.data / "rollouts_math.jsonl").is_file():
        parser.error(f"expected --rounds of 1 or more, and the shared data in --data, which is {options.data}")
    rounds = options.rounds
    answers, rollouts = (read(options.data / name) for name in ("answers_visible.jsonl", "rollouts_math.jsonl"))
    cases = [(row["prediction"], row["ground_truth"], expected(row)) for row in answers]
    labelled = [(row["response"], row["ground_truth"], row["correct"]) for row in rollouts]
    ours("\\boxed{\\sqrt{8}}", "2\\sqrt{2}")
    times: dict[str, list[float]] = {name: [] for name in VERIFIERS}
    for _ in range(rounds):
        verification._compare.cache_clear()
        for solution, ground_truth, _ in labelled:
            for name, verifier in VERIFIERS.items():
                times[name].append(timed(verifier, solution, ground_truth))
    table = Table("verifier", "answers right", "false positives", "rollouts right", "median, us", "ratio", "worst, us")
    base = statistics.median(times["verl_fapo"])
    for name, verifier in VERIFIERS.items():
        said = [(verdict(verifier, solution, truth), right) for solution, truth, right in cases]
        on_rollouts = sum(verdict(verifier, solution, truth) == right for solution, truth, right in labelled)
        median = statistics.median(times[name])
        table.add_row(
            name,
            f"{sum(a == b for a, b in said)} of {len(said)}",
            str(sum(a and not b for a, b in said)),
            f"{on_rollouts} of {len(labelled)}",
            f"{median:.1f}",
            f"{median / base:.1f}",
            f"{max(times[name]):.0f}",
        )
    Console(width=120).print(table)
    print("contract rows count by the leaning in the file; con-01 (order of a list counts) is wrong by our default")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def expected(row: dict) -> bool:
    return row["leaning"] if row["expected"] == "contract" else row["expected"]


def verdict(verifier: Callable[[str, str], bool], solution: str, ground_truth: str) -> bool:
    try:
        return verifier(solution, ground_truth)
    except Exception:  # a verifier that fails has not said yes
        return False


def timed(verifier: Callable[[str, str], bool], solution: str, ground_truth: str) -> float:
    started = time.perf_counter()
    verdict(verifier, solution, ground_truth)
    return (time.perf_counter() - started) * 1e6


if __name__ == "__main__":
    main()

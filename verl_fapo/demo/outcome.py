"""What training changed in the small world, where a program can tell the truth about every paragraph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from verl_fapo.demo.world import first_flaw, read_problem
from verl_fapo.errors import DataError
from verl_fapo.run_folder import RunFolder

Z = 1.96
"""Half a 95 % interval, in standard errors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Counts of one validation; ``flawed`` is of right answers."""

    problems: int
    right: int
    flawed: int
    """By the world's checker."""

    called: int
    """Flawed by the judge."""

    found: int
    """Flawed by both."""

    @property
    def accuracy(self) -> float:
        return self.right / self.problems

    @property
    def flawed_ratio(self) -> float:
        return self.flawed / max(1, self.right)

    @property
    def judge_f1(self) -> float:
        """F1 of the judge's ``flawed``."""
        return 2 * self.found / max(1, self.called + self.flawed)

    @property
    def baseline_f1(self) -> float:
        """F1 of a judge that finds every right answer flawed."""
        return 2 * self.flawed / max(1, self.right + self.flawed)


def validations(run: RunFolder) -> list[Validation]:
    """The validations of a run in the small world, in order.

    None if their right answers were not judged, or are to problems of another world.
    """
    counts: dict[int, Counter[str]] = {}
    for rollout in run.scored():
        if rollout["validation"]:
            if rollout["correct"] != rollout["judged"]:
                return []
            counts.setdefault(rollout["step"], Counter(right=0, flawed=0, called=0, found=0)).update(
                problems=1, right=rollout["correct"]
            )
    for record in run.judged():
        if record["validation"]:
            try:
                flawed = first_flaw(read_problem(record["problem"]), record["solution"]) >= 0
            except DataError:
                return []
            called = record["verdict"] == "flawed"
            counts[record["step"]].update(flawed=flawed, called=called, found=flawed and called)
    return [Validation(**counts[step]) for step in sorted(counts)]


def gain(before: Validation, after: Validation) -> tuple[float, float]:
    """The accuracy gained, and half its 95 % interval (normal approximation, samples taken as independent)."""
    variance = sum(v.accuracy * (1 - v.accuracy) / v.problems for v in (before, after))
    return after.accuracy - before.accuracy, Z * math.sqrt(variance)


QUALITIES = {
    "accuracy": "accuracy",
    "precision": "precision",
    "recall": "recall",
    "F1": "f1",
    "distance": "index_distance",
    "flags clean": "clean_flagged_rate",
    "invalid": "invalid_rate",
}
"""Columns and metrics."""


def quality_table(run: RunFolder) -> Table:
    """A row a validation of a judge in training, with the metrics of the manager ``fapo_genrm``."""
    table = Table(title="validation of the judge, by the truth of its prompts")
    for column in ("step", *QUALITIES):
        table.add_column(column, justify="right")
    for line in run.metrics():
        found = [line.get(f"fapo_validation/steps_critic/{name}") for name in QUALITIES.values()]
        if any(value is not None for value in found):
            table.add_row(str(line["step"]), *("-" if value is None else f"{value:.3f}" for value in found))
    return table


def outcome_table(named: Iterable[tuple[str, Validation]]) -> Table:
    """A row a validation."""
    table = Table(title="validation, against the checker of every paragraph")
    for column in (
        "",
        "problems",
        "right",
        "flawed among right",
        "the judge says",
        "judge's F1",
        "F1 of always flawed",
    ):
        table.add_column(column, justify="right")
    for name, v in named:
        called = v.called / max(1, v.right)
        table.add_row(
            name, str(v.problems), f"{v.accuracy:.1%}", f"{v.flawed_ratio:.1%}", f"{called:.1%}",
            f"{v.judge_f1:.2f}", f"{v.baseline_f1:.2f}",
        )  # fmt: skip
    return table

"""Rewards of FAPO (arXiv:2510.22543)."""

from __future__ import annotations

from verl_fapo.critique import Verdict


def fapo_reward(correct: bool, verdict: Verdict | None, *, penalty: float, on_unknown: str = "keep") -> float:
    """Outcome reward, less ``penalty`` if a right answer was reached by wrong reasoning.

    R_FAPO = R - lambda * [correct and flawed], with R = +1 for a right answer and -1 for a wrong one.

    Args:
        correct: the final answer matches the reference.
        verdict: the judge's; None for a rollout that was not judged. A wrong answer's is ignored.
        penalty: lambda, in reward units.
        on_unknown: ``keep`` leaves a right answer without a verdict its reward, ``penalise`` treats it as flawed.
    """
    if not correct:
        return -1.0
    if verdict is None:
        return 1.0
    flawed = verdict.kind == "flawed" or (verdict.kind == "unknown" and on_unknown == "penalise")
    return 1.0 - penalty * flawed

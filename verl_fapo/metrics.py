"""What the reward managers' extras say about a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl_fapo.errors import JudgeError

FEWEST_JUDGED = 20


def step_metrics(extras: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Shares and counts over the rollouts of a step.

    Args:
        extras: [B] ``reward_extra_info`` of the manager ``fapo``.

    Returns:
        ``fapo/*``. A share whose denominator is empty is left out rather than called 0.
    """
    if not extras:
        return {}
    totals = {key: sum(extra[key] for extra in extras) for key in ("acc", "judged", "flawed", "unknown")}
    metrics = {
        "fapo/accuracy": totals["acc"] / len(extras),
        "fapo/judged": totals["judged"],
        "fapo/flawed": totals["flawed"],
        "fapo/unknown": totals["unknown"],
    }
    if verdicts := totals["judged"] - totals["unknown"]:
        metrics["fapo/flawed_rate"] = totals["flawed"] / verdicts
    if totals["judged"]:
        metrics["fapo/unknown_rate"] = totals["unknown"] / totals["judged"]
        metrics["fapo/judge_seconds"] = sum(extra["judge_seconds"] for extra in extras) / totals["judged"]
    return metrics


class JudgeHealth:
    """Notices a judge that gives no verdicts.

    Judgements add up over steps until there are :data:`FEWEST_JUDGED`, so that one unlucky judgement in a step
    with two does not end a run.
    """

    def __init__(self, max_unknown_rate: float) -> None:
        self._max_unknown_rate = max_unknown_rate
        self._judged = self._unknown = 0.0

    def check(self, extras: Sequence[Mapping[str, float]]) -> None:
        """Add a step's rollouts.

        Raises:
            JudgeError: the share of unknown verdicts is above ``fapo.judge.max_unknown_rate``.
        """
        self._judged += sum(extra["judged"] for extra in extras)
        self._unknown += sum(extra["unknown"] for extra in extras)
        if self._judged < FEWEST_JUDGED:
            return
        rate, judged = self._unknown / self._judged, self._judged
        self._judged = self._unknown = 0.0
        if rate > self._max_unknown_rate:
            raise JudgeError(
                f"{rate:.0%} of the last {judged:.0f} judgements gave no verdict, more than "
                f"fapo.judge.max_unknown_rate={self._max_unknown_rate:g}; 'reason' in the run folder's records says why"
            )

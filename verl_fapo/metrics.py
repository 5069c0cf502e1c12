"""What the reward managers' extras say about a training step, and about a validation."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verl_fapo.errors import JudgeError
from verl_fapo.theory import Phase, Shares, mean_reward, phase, reward_variance

logger = logging.getLogger(__name__)

FEWEST_JUDGED = 20
GROUP_ACCURACIES = (0.25, 0.5, 0.75, 1.0)
"""Upper ends of the buckets by which the flawed rate is split."""

SAME_REWARD = 1e-6

Extras = Mapping[str, float | str]
"""``reward_extra_info`` of a rollout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRollout:
    """One rollout of a training step."""

    key: str
    """veRL's, ``uid_session_index``."""

    reward: float
    extras: Extras

    @property
    def id(self) -> str:
        """``uid_session``, as in the run folder."""
        return self.key.rpartition("_")[0]

    @property
    def index(self) -> int:
        """Of the sequence, where an agent loop made several."""
        return int(self.key.rpartition("_")[2])

    @property
    def group(self) -> str:
        """The prompt's ``uid``."""
        return self.id.rpartition("_")[0]


def fapo_metrics(rollouts: Sequence[ScoredRollout], *, penalty: float, on_unknown: str) -> dict[str, float]:
    """Counts, shares and times over a step of the manager ``fapo``.

    alpha, beta and gamma are shares of fully correct, wrong and flawed rollouts, as they were treated: an unknown
    verdict is correct (``keep``), flawed (``penalise``), or that rollout has no part (``neutral``). The predicted mean
    and std of the reward are those of the three rewards with these shares (arXiv:2510.22543, appendix A); what is
    measured differs from them by the shaping of long responses, and by nothing else.

    Returns:
        ``fapo/*``. What has an empty denominator, or is infinite, is left out rather than called 0.
    """
    if not rollouts:
        return {}
    extras = [rollout.extras for rollout in rollouts]
    return {
        "fapo/accuracy": _mean(extra["acc"] for extra in extras),
        **_judgement_metrics(extras),
        **_group_metrics(rollouts, on_unknown=on_unknown),
        **_reward_metrics(rollouts, penalty=penalty, on_unknown=on_unknown),
    }


def _judgement_metrics(extras: Sequence[Extras]) -> dict[str, float]:
    judged = [extra for extra in extras if extra["judged"]]
    reasons = Counter(extra["reason"] for extra in judged if extra["unknown"])
    asked = [extra["judge_seconds"] for extra in judged if not extra["from_memory"]]
    metrics = {
        "fapo/judged": float(len(judged)),
        "fapo/flawed": sum(extra["flawed"] for extra in judged),
        "fapo/unknown": sum(extra["unknown"] for extra in judged),
        **{f"fapo/unknown/{reason}": float(count) for reason, count in reasons.items()},
        "fapo/from_memory": sum(extra["from_memory"] for extra in judged),
        "fapo/judge_tokens": sum(extra["judge_tokens"] for extra in judged),
    }
    if asked:
        metrics["fapo/judge_seconds/p50"], metrics["fapo/judge_seconds/p99"] = np.percentile(asked, [50, 99]).tolist()
    if judged:
        metrics["fapo/unknown_rate"] = metrics["fapo/unknown"] / len(judged)
    return metrics | _flawed_rate("fapo/flawed_rate", judged)


def wait_seconds(rollouts: Sequence[ScoredRollout]) -> float:
    """From the end of a batch's last rollout to its last reward: then only judgements are waited for."""
    extras = [rollout.extras for rollout in rollouts]
    ends = (max((extra[name] for extra in extras), default=0.0) for name in ("scored_at", "generated_at"))
    return next(ends) - next(ends)


def _group_metrics(rollouts: Sequence[ScoredRollout], *, on_unknown: str) -> dict[str, float]:
    buckets: dict[float, list[Extras]] = defaultdict(list)
    for group in _groups(rollouts):
        accuracy = _mean(rollout.extras["acc"] for rollout in group)
        buckets[next(end for end in GROUP_ACCURACIES if accuracy <= end)] += [rollout.extras for rollout in group]
    metrics = {"fapo/groups_without_variance": _groups_without_variance(rollouts, on_unknown=on_unknown)}
    for end, extras in sorted(buckets.items()):
        metrics |= _flawed_rate(f"fapo/flawed_rate/group_accuracy_to_{end:g}", extras)
    return metrics


def _groups(rollouts: Iterable[ScoredRollout]) -> list[list[ScoredRollout]]:
    groups: dict[str, list[ScoredRollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group].append(rollout)
    return [*groups.values()]


def _groups_without_variance(rollouts: Iterable[ScoredRollout], *, on_unknown: str = "keep") -> float:
    rewards = [[r.reward for r in group if not _is_left_out(r, on_unknown)] for group in _groups(rollouts)]
    return _mean(not group or max(group) - min(group) < SAME_REWARD for group in rewards)


def _is_left_out(rollout: ScoredRollout, on_unknown: str) -> bool:
    return on_unknown == "neutral" and bool(rollout.extras["unknown"])


def _reward_metrics(rollouts: Iterable[ScoredRollout], *, penalty: float, on_unknown: str) -> dict[str, float]:
    rollouts = [r for r in rollouts if not _is_left_out(r, on_unknown)]
    if not rollouts:
        return {}
    right = sum(bool(r.extras["acc"]) for r in rollouts)
    flawed = sum(
        bool(r.extras["acc"] and (r.extras["flawed"] or (r.extras["unknown"] and on_unknown == "penalise")))
        for r in rollouts
    )
    shares = Shares.from_counts(fully_correct=right - flawed, wrong=len(rollouts) - right, flawed=flawed)
    rewards = np.array([r.reward for r in rollouts])
    metrics = {
        "fapo/alpha": float(shares.alpha),
        "fapo/beta": float(shares.beta),
        "fapo/gamma": float(shares.gamma),
        "fapo/phase": float(list(Phase).index(phase(shares, penalty))),
        "fapo/reward_mean": float(rewards.mean()),
        "fapo/reward_mean_predicted": float(mean_reward(shares, penalty)),
        "fapo/reward_std": float(rewards.std()),
        "fapo/reward_std_predicted": math.sqrt(reward_variance(shares, penalty)),
    }
    return metrics | ({"fapo/rho": float(shares.rho)} if math.isfinite(shares.rho) else {})


def genrm_metrics(rollouts: Sequence[ScoredRollout]) -> dict[str, float]:
    """How well a judge in training judges, over a step of the manager ``fapo_genrm``: ``fapo_genrm/*``."""
    if not rollouts:
        return {}
    rewards = np.array([rollout.reward for rollout in rollouts])
    metrics = {
        **judge_quality([rollout.extras for rollout in rollouts]),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "groups_without_variance": _groups_without_variance(rollouts),
    }
    return {f"fapo_genrm/{name}": value for name, value in metrics.items()}


def judge_quality(extras: Sequence[Extras]) -> dict[str, float]:
    """Verdicts against the truth, with "flawed" as what is to be found.

    An invalid verdict finds nothing and flags nothing. What has an empty denominator is left out.
    """
    called, truly = ([bool(extra[name]) for extra in extras] for name in ("flawed", "truly_flawed"))
    found = [a and b for a, b in zip(called, truly, strict=True)]
    clean_flagged = [a for a, b in zip(called, truly, strict=True) if not b]
    distances = [extra["distance"] for extra, hit in zip(extras, found, strict=True) if hit]
    metrics = {
        "accuracy": _mean(extra["acc"] for extra in extras),
        "invalid_rate": _mean(extra["unknown"] for extra in extras),
    }
    if any(called):
        metrics["precision"] = sum(found) / sum(called)
    if any(truly):
        metrics["recall"] = sum(found) / sum(truly)
        metrics["f1"] = 2 * sum(found) / (sum(called) + sum(truly))
    if clean_flagged:
        metrics["clean_flagged_rate"] = _mean(clean_flagged)
    if distances:
        metrics["index_distance"] = _mean(distances)
    return metrics


def fapo_validation(extras: Sequence[Extras]) -> dict[str, float]:
    """Accuracy, and where right answers were judged the share of flawed ones among them."""
    return {"accuracy": _mean(extra["acc"] for extra in extras), **_flawed_rate("flawed_rate", extras)}


def by_data_source(
    summarise: Callable[[Sequence[Extras]], Mapping[str, float]], scored: Iterable[tuple[str, Extras]]
) -> dict[str, float]:
    """``fapo_validation/SOURCE/*`` of each data source of a validation."""
    rows: dict[str, list[Extras]] = defaultdict(list)
    for source, extra in scored:
        rows[source].append(extra)
    return {
        f"fapo_validation/{source}/{name}": value
        for source, of_source in rows.items()
        for name, value in summarise(of_source).items()
    }


def _flawed_rate(name: str, extras: Iterable[Extras]) -> dict[str, float]:
    verdicts = [extra["flawed"] for extra in extras if extra["judged"] and not extra["unknown"]]
    return {name: _mean(verdicts)} if verdicts else {}


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


class JudgeHealth:
    """Notices a judge that gives no verdicts.

    Judgements add up over steps until there are :data:`FEWEST_JUDGED`, so that one unlucky judgement in a step
    with two does not end a run.

    Args:
        max_unknown_rate: ``fapo.judge.max_unknown_rate``.
        action: ``fapo.judge.above_max_unknown_rate``.
    """

    def __init__(self, max_unknown_rate: float, action: str = "stop") -> None:
        self._max_unknown_rate = max_unknown_rate
        self._action = action
        self._judged = self._unknown = 0.0

    def check(self, extras: Iterable[Extras]) -> None:
        """Add a step's rollouts.

        Raises:
            JudgeError: the share of unknown verdicts is above ``max_unknown_rate``, and the action is ``stop``.
        """
        judged = [extra for extra in extras if extra["judged"]]
        self._judged += len(judged)
        self._unknown += sum(extra["unknown"] for extra in judged)
        if self._judged < FEWEST_JUDGED:
            return
        rate, judged = self._unknown / self._judged, self._judged
        self._judged = self._unknown = 0.0
        if rate > self._max_unknown_rate:
            problem = (
                f"{rate:.0%} of the last {judged:.0f} judgements gave no verdict, more than "
                f"fapo.judge.max_unknown_rate={self._max_unknown_rate:g}; 'reason' in the run folder's records, or the "
                "log, says why"
            )
            if self._action == "stop":
                raise JudgeError(problem)
            logger.warning(problem)

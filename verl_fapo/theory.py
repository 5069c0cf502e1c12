"""What FAPO's penalty does to a group's rewards and advantages, exactly (arXiv:2510.22543, appendix A).

A group of rollouts has the shares alpha (fully correct), beta (wrong) and gamma (flawed positive: right answer, wrong
reasoning), which sum to 1; rho = alpha / beta. Its rewards are +1, -1 and 1 - lambda; lambda = 0 is GRPO. An advantage
is (r - mean) / std with the population's std sigma. veRL divides by the unbiased std of the G rollouts plus 1e-6:
sigma * sqrt(G / (G - 1)) where the shares are those of the group, so its advantages are sqrt((G - 1) / G) times ours.

Sums and products only, so fractions go in and exact fractions come out; square roots are floats.
docs/theory.md has the formulas in one table, and what they do not promise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Generic, NamedTuple, TypeVar

import numpy as np

Number = float | Fraction
T = TypeVar("T")

SUM_TOLERANCE = 1e-9


class ByClass(NamedTuple, Generic[T]):
    """One thing for each class of rollouts."""

    fully_correct: T
    flawed: T
    wrong: T


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of the three classes in a group or batch.

    Raises:
        ValueError: a share is outside [0, 1] or no number, or they do not sum to 1 within 1e-9.
    """

    alpha: Number
    """Fully correct: right answer, right reasoning. Not all right answers."""

    beta: Number
    """Wrong answer."""

    gamma: Number
    """Flawed positive: right answer, wrong reasoning."""

    def __post_init__(self) -> None:
        shares = (self.alpha, self.beta, self.gamma)
        if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > SUM_TOLERANCE:
            raise ValueError(
                f"alpha={self.alpha}, beta={self.beta}, gamma={self.gamma}: expected shares in [0, 1] that sum to 1"
            )

    @classmethod
    def from_counts(cls, *, fully_correct: int, wrong: int, flawed: int) -> Shares:
        """Exact shares (fractions) of a batch.

        Raises:
            ValueError: a count is negative, or the batch is empty.
        """
        total = fully_correct + wrong + flawed
        if min(fully_correct, wrong, flawed) < 0 or total == 0:
            raise ValueError(
                f"fully_correct={fully_correct}, wrong={wrong}, flawed={flawed}: expected counts that sum to 1 or more"
            )
        return cls(alpha=Fraction(fully_correct, total), beta=Fraction(wrong, total), gamma=Fraction(flawed, total))

    @property
    def rho(self) -> Number:
        """alpha / beta; infinite without wrong answers, NaN where all rollouts are flawed."""
        if self.beta:
            return self.alpha / self.beta
        return math.inf if self.alpha else math.nan


def check_penalty(penalty: Number) -> None:
    """Raise ValueError unless lambda is in [0, 2]: from plain outcome reward to a flawed positive as bad as wrong."""
    if not 0 <= penalty <= 2:
        raise ValueError(f"penalty is {penalty}, expected a number in [0, 2]")


def class_rewards(penalty: Number) -> ByClass[Number]:
    """Reward of each class: 1, 1 - lambda, -1."""
    check_penalty(penalty)
    return ByClass(fully_correct=1, flawed=1 - penalty, wrong=-1)


def mean_reward(shares: Shares, penalty: Number) -> Number:
    """Mean of the rewards: 1 - 2 beta - lambda gamma."""
    rewards = class_rewards(penalty)
    return shares.alpha * rewards.fully_correct + shares.gamma * rewards.flawed + shares.beta * rewards.wrong


def reward_variance(shares: Shares, penalty: Number) -> Number:
    """Population variance sigma^2 of the rewards.

    Equals GRPO's 4 beta (1 - beta) plus lambda gamma (lambda (1 - gamma) - 4 beta). Written as the sum, over pairs of
    classes, of both shares times the squared difference of their rewards: never negative, and 0 exactly where all
    rewards are equal.
    """
    check_penalty(penalty)
    alpha, beta, gamma = shares.alpha, shares.beta, shares.gamma
    return penalty**2 * alpha * gamma + 4 * alpha * beta + (2 - penalty) ** 2 * beta * gamma


def advantages(shares: Shares, penalty: Number) -> ByClass[float]:
    """Advantage (r - mean) / sigma of each class, also of one with share 0; all 0 where sigma is 0."""
    sigma = math.sqrt(reward_variance(shares, penalty))
    if sigma == 0:
        return ByClass(0.0, 0.0, 0.0)
    alpha, beta, gamma = shares.alpha, shares.beta, shares.gamma
    # r - mean as a sum of differences to the other classes: exactly 0 where it should be.
    return ByClass(
        fully_correct=float(penalty * gamma + 2 * beta) / sigma,
        flawed=float((2 - penalty) * beta - penalty * alpha) / sigma,
        wrong=float(-2 * alpha - (2 - penalty) * gamma) / sigma,
    )


def rho_thresholds(penalty: Number) -> tuple[Number, Number]:
    """The two values of rho beyond which the phase changes: 2 / lambda - 1 and 4 / lambda - 1.

    Beyond the first a flawed positive's advantage is negative, beyond the second sigma is larger than GRPO's.
    Both are infinite for lambda = 0.
    """
    check_penalty(penalty)
    if penalty == 0:
        return math.inf, math.inf
    return 2 / penalty - 1, 4 / penalty - 1


def penalty_from_rho_shift(rho_shift: Number) -> Number:
    """The lambda with which flawed positives begin to be pushed out at ``rho_shift``: 2 / (rho_shift + 1).

    The paper's majority-guided choice is ``rho_shift=1``, lambda = 1.

    Raises:
        ValueError: ``rho_shift`` is negative (lambda would be above 2) or not finite (for "never", use penalty 0).
    """
    if not 0 <= rho_shift < math.inf:
        raise ValueError(f"rho_shift is {rho_shift}, expected a finite number of at least 0")
    return 2 / (rho_shift + 1)


class Phase(StrEnum):
    """What a penalty does at the shares of a batch."""

    WARM_UP = "warm-up"
    """rho <= 2 / lambda - 1: flawed positives still have an advantage of at least 0."""

    REFINEMENT = "refinement"
    """Beyond it: flawed positives are pushed out, and sigma is at most GRPO's."""

    LATE_REFINEMENT = "late refinement"
    """rho > 4 / lambda - 1: sigma is above GRPO's, and a flawed positive is pushed harder than GRPO rewards it."""


def phase(shares: Shares, penalty: Number) -> Phase:
    """The phase of a batch, decided in exact arithmetic: on a threshold it is still the earlier phase.

    Without wrong answers rho is infinite: late refinement, or warm-up if lambda = 0. Without fully correct ones rho
    is 0: warm-up for every lambda. All flawed (rho undefined) is warm-up: equal rewards push nothing out.
    """
    check_penalty(penalty)
    alpha, beta = Fraction(shares.alpha), Fraction(shares.beta)
    pull = Fraction(penalty) * (alpha + beta)
    if pull > 4 * beta:
        return Phase.LATE_REFINEMENT
    return Phase.REFINEMENT if pull > 2 * beta else Phase.WARM_UP


class Estimate(NamedTuple):
    """A value measured on samples."""

    value: float
    standard_error: float


class Simulation(NamedTuple):
    """What :func:`simulate` measured."""

    mean: Estimate
    variance: Estimate
    advantages: ByClass[Estimate]


def simulate(shares: Shares, penalty: Number, *, num_rollouts: int, seed: int) -> Simulation:
    """Draw rollouts at random and measure what the functions above compute.

    Standard errors: of the mean sigma / sqrt(n); of the unbiased variance its own formula, with the sample's fourth
    moment; of an advantage the delta method, with the sample's skewness. They are 0 where all rewards are equal.

    Raises:
        ValueError: fewer than two rollouts.
    """
    if num_rollouts < 2:
        raise ValueError(f"num_rollouts is {num_rollouts}, expected at least 2")
    rewards = class_rewards(penalty)
    odds = np.array([shares.alpha, shares.gamma, shares.beta], dtype=float)
    classes = np.random.default_rng(seed).choice(3, size=num_rollouts, p=odds / odds.sum())
    return _measure(np.array(rewards, dtype=float)[classes], rewards)


def _measure(sample: np.ndarray, rewards: ByClass[Number]) -> Simulation:
    n, mean = len(sample), float(sample.mean())
    if np.ptp(sample) == 0:
        zero = Estimate(0.0, 0.0)
        return Simulation(mean=Estimate(float(sample[0]), 0.0), variance=zero, advantages=ByClass(zero, zero, zero))
    variance = float(sample.var(ddof=1))
    skewness, kurtosis = (float(((sample - mean) ** k).mean() / variance ** (k / 2)) for k in (3, 4))
    relative = (kurtosis - (n - 3) / (n - 1)) / n  # variance of the variance's estimate, over variance^2

    def advantage(reward: Number) -> Estimate:
        value = (float(reward) - mean) / math.sqrt(variance)
        return Estimate(value, math.sqrt(max((1 + value * skewness) / n + value**2 * relative / 4, 0.0)))

    return Simulation(
        mean=Estimate(mean, math.sqrt(variance / n)),
        variance=Estimate(variance, variance * math.sqrt(max(relative, 0.0))),
        advantages=ByClass(*map(advantage, rewards)),
    )

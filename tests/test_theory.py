from __future__ import annotations

import contextlib
import io
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from verl_fapo.rewards import fapo_rewards
from verl_fapo.theory import (
    Phase,
    Shares,
    advantages,
    mean_reward,
    penalty_from_rho_shift,
    phase,
    reward_variance,
    rho_thresholds,
    simulate,
)

GRPO = 0
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "theory.md"

counts = st.tuples(*[st.integers(0, 40)] * 3).filter(any)
mixed_counts = st.tuples(*[st.integers(1, 40)] * 3)
penalties = st.fractions(0, 2, max_denominator=64)
positive_penalties = penalties.filter(bool)


def shares_of(counts: tuple[int, int, int]) -> Shares:
    fully_correct, wrong, flawed = counts
    return Shares.from_counts(fully_correct=fully_correct, wrong=wrong, flawed=flawed)


def rollout_rewards(counts: tuple[int, int, int], penalty: Fraction) -> list[Fraction]:
    fully_correct, wrong, flawed = counts
    return [Fraction(1)] * fully_correct + [Fraction(-1)] * wrong + [1 - penalty] * flawed


def mean_of(values: list[Fraction]) -> Fraction:
    return sum(values) / len(values)


def variance_of(values: list[Fraction]) -> Fraction:
    mean = mean_of(values)
    return mean_of([(value - mean) ** 2 for value in values])


# Moments and advantages


def test_worked_by_hand():
    # Rewards 1, 1, -1, 0: mean 1/4, squared deviations 9/16, 9/16, 25/16, 1/16, their mean 11/16.
    shares = Shares.from_counts(fully_correct=2, wrong=1, flawed=1)
    assert mean_reward(shares, 1) == Fraction(1, 4)
    assert reward_variance(shares, 1) == Fraction(11, 16)
    assert advantages(shares, 1) == pytest.approx([3 / math.sqrt(11), -1 / math.sqrt(11), -5 / math.sqrt(11)])


@given(counts=counts, penalty=penalties)
def test_moments_are_those_of_the_rewards_one_by_one(counts, penalty):
    rewards = rollout_rewards(counts, penalty)
    assert mean_reward(shares_of(counts), penalty) == mean_of(rewards)
    assert reward_variance(shares_of(counts), penalty) == variance_of(rewards)


@given(counts=counts, penalty=penalties)
def test_advantages_are_those_of_the_rewards_one_by_one(counts, penalty):
    rewards = rollout_rewards(counts, penalty)
    mean, sigma = mean_of(rewards), math.sqrt(variance_of(rewards))
    by_hand = [float(reward - mean) / sigma if sigma else 0.0 for reward in (1, 1 - penalty, -1)]
    assert advantages(shares_of(counts), penalty) == pytest.approx(by_hand, abs=1e-12)


@given(counts=counts, penalty=penalties)
def test_moments_in_terms_of_grpo(counts, penalty):
    shares = shares_of(counts)
    beta, gamma = shares.beta, shares.gamma
    assert mean_reward(shares, GRPO) == 1 - 2 * beta
    assert reward_variance(shares, GRPO) == 4 * beta * (1 - beta)
    assert mean_reward(shares, penalty) == mean_reward(shares, GRPO) - penalty * gamma
    change = reward_variance(shares, penalty) - reward_variance(shares, GRPO)
    assert change == penalty * gamma * (penalty * (1 - gamma) - 4 * beta)


def published_change(alpha: Fraction, beta: Fraction, gamma: Fraction, penalty: Fraction) -> Fraction:
    return penalty * gamma * (1 - gamma) * (penalty - 4 / (alpha / beta + 1))


@given(counts=mixed_counts, penalty=positive_penalties)
def test_published_variance_holds_for_alpha_without_flawed_positives_and_for_no_other(counts, penalty):
    shares = shares_of(counts)
    change = reward_variance(shares, penalty) - reward_variance(shares, GRPO)
    assert change == published_change(shares.alpha, shares.beta, shares.gamma, penalty)
    all_correct = shares.alpha + shares.gamma
    assert change != published_change(all_correct, shares.beta, shares.gamma, penalty)


@given(counts=counts, penalty=penalties)
def test_advantages_have_mean_0_and_mean_square_1(counts, penalty):
    shares = shares_of(counts)
    weights = [float(share) for share in (shares.alpha, shares.gamma, shares.beta)]
    values = advantages(shares, penalty)
    moments = [sum(w * a**k for w, a in zip(weights, values, strict=True)) for k in (1, 2)]
    assert moments == pytest.approx([0, 1 if reward_variance(shares, penalty) else 0], abs=1e-9)


EQUAL_REWARDS = [
    # fully correct, wrong, flawed, penalty
    pytest.param(8, 0, 0, 1, id="all fully correct"),
    pytest.param(0, 8, 0, 1, id="all wrong"),
    pytest.param(0, 0, 8, 1, id="all flawed"),
    pytest.param(3, 0, 5, 0, id="all right under GRPO"),
    pytest.param(0, 3, 5, 2, id="flawed as bad as wrong"),
]


@pytest.mark.parametrize(("fully_correct", "wrong", "flawed", "penalty"), EQUAL_REWARDS)
def test_equal_rewards_have_advantage_0(fully_correct, wrong, flawed, penalty):
    shares = shares_of((fully_correct, wrong, flawed))
    inexact = Shares(alpha=float(shares.alpha), beta=float(shares.beta), gamma=float(shares.gamma))
    for group in (shares, inexact):
        assert reward_variance(group, penalty) == 0
        assert advantages(group, float(penalty)) == (0, 0, 0)


def test_equal_rewards_have_advantage_0_where_the_shares_sum_to_nearly_1():
    shares = Shares(alpha=0.0, beta=1 / 3, gamma=2 / 3 + 9e-10)
    assert advantages(shares, 2.0) == (0, 0, 0)


@pytest.mark.parametrize("penalty", [0.0, 0.7, 1.0, 2.0])
def test_advantages_of_verl_are_ours_with_the_unbiased_std(penalty):
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    correct = torch.tensor([True] * 6 + [False] * 2)
    flawed = torch.tensor([True] * 2 + [False] * 6)
    rewards = fapo_rewards(correct, flawed, penalty=penalty)[:, None]
    measured, _ = compute_grpo_outcome_advantage(rewards.clone(), torch.ones(8, 1), index=[0] * 8)
    expected = advantages(shares_of((4, 2, 2)), penalty)
    rows = [expected.flawed] * 2 + [expected.fully_correct] * 4 + [expected.wrong] * 2
    assert measured[:, 0].tolist() == pytest.approx([row * math.sqrt(7 / 8) for row in rows], abs=1e-5)


# Thresholds and phases


@given(counts=counts, penalty=penalties)
def test_phase_is_what_the_rewards_do(counts, penalty):
    assume(counts[2])
    rewards = rollout_rewards(counts, penalty)
    grows = variance_of(rewards) > variance_of(rollout_rewards(counts, Fraction(GRPO)))
    pushed_out = 1 - penalty < mean_of(rewards)
    assert not grows or pushed_out
    expected = Phase.LATE_REFINEMENT if grows else Phase.REFINEMENT if pushed_out else Phase.WARM_UP
    assert phase(shares_of(counts), penalty) is expected


@given(counts=counts, penalty=penalties)
def test_phase_follows_the_thresholds_of_rho(counts, penalty):
    shares = shares_of(counts)
    first, second = rho_thresholds(penalty)
    rho = shares.rho  # NaN is above nothing; infinity is not above infinity
    late = rho > second or (rho == math.inf and penalty > 0)
    expected = Phase.LATE_REFINEMENT if late else Phase.REFINEMENT if rho > first else Phase.WARM_UP
    assert phase(shares, penalty) is expected


PHASES = [
    # fully correct, wrong, flawed, penalty, phase
    pytest.param(1, 3, 2, 1.0, Phase.WARM_UP, id="wrong answers dominate"),
    pytest.param(3, 3, 2, 1.0, Phase.WARM_UP, id="on the first threshold"),
    pytest.param(4, 3, 2, 1.0, Phase.REFINEMENT, id="just beyond the first"),
    pytest.param(9, 3, 2, 1.0, Phase.REFINEMENT, id="on the second threshold"),
    pytest.param(10, 3, 2, 1.0, Phase.LATE_REFINEMENT, id="just beyond the second"),
    pytest.param(3, 1, 3, 0.5, Phase.WARM_UP, id="a smaller penalty waits longer"),
    pytest.param(4, 1, 3, 0.5, Phase.REFINEMENT, id="until rho is 3"),
    pytest.param(1, 3, 2, 2.0, Phase.REFINEMENT, id="penalty 2 never waits"),
    pytest.param(8, 1, 1, 0.0, Phase.WARM_UP, id="GRPO never pushes out"),
    pytest.param(6, 0, 2, 0.01, Phase.LATE_REFINEMENT, id="no wrong answers"),
    pytest.param(6, 0, 2, 0.0, Phase.WARM_UP, id="no wrong answers under GRPO"),
    pytest.param(0, 6, 2, 2.0, Phase.WARM_UP, id="no fully correct answers"),
    pytest.param(0, 8, 0, 1.0, Phase.WARM_UP, id="no right answers"),
    pytest.param(0, 0, 8, 1.0, Phase.WARM_UP, id="all flawed"),
    pytest.param(8, 0, 0, 1.0, Phase.LATE_REFINEMENT, id="all fully correct"),
]


@pytest.mark.parametrize(("fully_correct", "wrong", "flawed", "penalty", "expected"), PHASES)
def test_phase(fully_correct, wrong, flawed, penalty, expected):
    assert phase(shares_of((fully_correct, wrong, flawed)), penalty) is expected


@given(rho_shift=st.fractions(0, 100))
def test_flawed_positives_are_pushed_out_just_beyond_rho_shift(rho_shift):
    penalty = penalty_from_rho_shift(rho_shift)
    assert 0 < penalty <= 2
    assert rho_thresholds(penalty)[0] == rho_shift
    at = Shares(alpha=rho_shift / (2 * rho_shift + 2), beta=1 / (2 * rho_shift + 2), gamma=Fraction(1, 2))
    beyond = Shares(alpha=at.alpha + Fraction(1, 10**6), beta=at.beta, gamma=at.gamma - Fraction(1, 10**6))
    assert phase(at, penalty) is Phase.WARM_UP
    assert phase(beyond, penalty) is not Phase.WARM_UP


def test_the_paper_s_default_penalty():
    assert penalty_from_rho_shift(1) == 1
    assert penalty_from_rho_shift(0) == 2
    assert rho_thresholds(1) == (1, 3)
    assert rho_thresholds(0) == (math.inf, math.inf)


# What the paper reads into the second threshold, and what happens


@given(counts=mixed_counts, penalty=positive_penalties)
def test_fully_correct_advantage_exceeds_grpo_s_in_every_phase(counts, penalty):
    shares = shares_of(counts)
    beta, gamma = shares.beta, shares.gamma
    mean, variance = mean_reward(shares, penalty), reward_variance(shares, penalty)
    change = (1 - mean) ** 2 / variance - beta / (1 - beta)
    assert change == penalty * gamma * (4 * beta + penalty * (gamma - beta)) / ((1 - beta) * variance)
    assert change > 0


@given(counts=mixed_counts, penalty=positive_penalties)
@example(counts=(9, 3, 2), penalty=Fraction(1))
def test_flawed_advantage_exceeds_grpo_s_exactly_beyond_the_second_threshold(counts, penalty):
    shares = shares_of(counts)
    square = (1 - penalty - mean_reward(shares, penalty)) ** 2 / reward_variance(shares, penalty)
    grpo, threshold = shares.beta / (1 - shares.beta), rho_thresholds(penalty)[1]
    assert (square > grpo, square == grpo) == (shares.rho > threshold, shares.rho == threshold)


@given(counts=mixed_counts, penalty=positive_penalties)
def test_wrong_advantage_is_smaller_than_grpo_s_in_every_phase(counts, penalty):
    shares = shares_of(counts)
    square = (1 + mean_reward(shares, penalty)) ** 2 / reward_variance(shares, penalty)
    assert square < (1 - shares.beta) / shares.beta


@given(counts=mixed_counts, part=st.fractions(0, 1, max_denominator=64).filter(bool))
def test_mean_absolute_advantage_is_larger_than_grpo_s_beyond_the_second_threshold(counts, part):
    fully_correct, wrong, flawed = counts[0] + counts[1], counts[1], counts[2]
    counts = fully_correct, wrong, flawed
    threshold = Fraction(4 * wrong, fully_correct + wrong)
    penalty = threshold + part * (2 - threshold)
    assert phase(shares_of(counts), penalty) is Phase.LATE_REFINEMENT

    def squared(penalty: Fraction) -> Fraction:
        rewards = rollout_rewards(counts, penalty)
        mean = mean_of(rewards)
        return mean_of([abs(reward - mean) for reward in rewards]) ** 2 / variance_of(rewards)

    assert squared(penalty) > squared(Fraction(GRPO))


@given(counts=mixed_counts, penalty=st.floats(0.1, 1.9))
def test_slopes_of_the_advantages(counts, penalty):
    shares = shares_of(counts)
    alpha, beta, gamma = float(shares.alpha), float(shares.beta), float(shares.gamma)
    step = 1e-4
    higher, lower = advantages(shares, penalty + step), advantages(shares, penalty - step)
    slopes = [(up - down) / (2 * step) for up, down in zip(higher, lower, strict=True)]
    scale = reward_variance(shares, penalty) ** 1.5
    expected = [2 * beta * gamma * (2 - penalty), -4 * alpha * beta, 2 * alpha * gamma * penalty]
    assert slopes == pytest.approx([slope / scale for slope in expected], rel=1e-3, abs=1e-5)


@given(counts=counts, penalty=penalties)
def test_sigma_sets_the_distance_between_fully_correct_and_wrong(counts, penalty):
    variance = reward_variance(shares_of(counts), penalty)
    assume(variance)
    values = advantages(shares_of(counts), penalty)
    assert values.fully_correct - values.wrong == pytest.approx(2 / math.sqrt(variance))


@given(fully_correct=st.integers(1, 40), flawed=st.integers(1, 40), penalty=positive_penalties)
def test_without_wrong_answers_advantages_do_not_depend_on_the_penalty(fully_correct, flawed, penalty):
    values = advantages(shares_of((fully_correct, 0, flawed)), penalty)
    assert values.fully_correct == pytest.approx(math.sqrt(flawed / fully_correct))
    assert values.flawed == pytest.approx(-math.sqrt(fully_correct / flawed))


def test_the_numbers_of_the_document_are_what_its_snippet_prints():
    text = DOCUMENT.read_text()
    snippet, printed = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL)[1] for kind in ("python", "text"))
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(snippet, {})
    assert output.getvalue() == printed


# Monte Carlo


MIXES = [
    # alpha, beta, gamma
    pytest.param(0.5, 0.3, 0.2, id="all three"),
    pytest.param(0.05, 0.8, 0.15, id="mostly wrong"),
    pytest.param(0.9, 0.02, 0.08, id="mostly right"),
    pytest.param(0.7, 0.0, 0.3, id="none wrong"),
    pytest.param(0.0, 0.6, 0.4, id="none fully correct"),
    pytest.param(0.5, 0.5, 0.0, id="none flawed, even"),
    pytest.param(1.0, 0.0, 0.0, id="all fully correct"),
]


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize(("alpha", "beta", "gamma"), MIXES)
def test_samples_agree_with_the_formulas(alpha, beta, gamma, penalty):
    shares = Shares(alpha=alpha, beta=beta, gamma=gamma)
    measured = simulate(shares, penalty, num_rollouts=200_000, seed=7)
    exact = [mean_reward(shares, penalty), reward_variance(shares, penalty), *advantages(shares, penalty)]
    for estimate, value in zip([measured.mean, measured.variance, *measured.advantages], exact, strict=True):
        assert abs(estimate.value - value) <= 4.5 * estimate.standard_error + 1e-12
        assert estimate.standard_error < 0.02 * (1 + abs(value))


def test_standard_errors_are_the_spread_of_repeated_measurements():
    shares = Shares(alpha=0.5, beta=0.3, gamma=0.2)
    runs = [simulate(shares, 1.0, num_rollouts=400, seed=seed) for seed in range(1000)]
    for pick in (
        lambda run: run.mean,
        lambda run: run.variance,
        lambda run: run.advantages.fully_correct,
        lambda run: run.advantages.flawed,
        lambda run: run.advantages.wrong,
    ):
        values, errors = torch.tensor([pick(run) for run in runs], dtype=torch.float64).unbind(1)
        assert errors.mean().item() == pytest.approx(values.std().item(), rel=0.08)


def test_the_same_seed_draws_the_same_rollouts():
    shares = Shares(alpha=0.5, beta=0.3, gamma=0.2)
    first, again, other = (simulate(shares, 1.0, num_rollouts=50, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


# What is refused


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param((0.5, 0.3, 0.3), id="sum above 1"),
        pytest.param((0.5, 0.3, 0.1), id="sum below 1"),
        pytest.param((1.2, -0.2, 0.0), id="negative"),
        pytest.param((math.nan, 0.5, 0.5), id="no number"),
        pytest.param((math.inf, 0.0, 0.0), id="infinite"),
        pytest.param((0.5, 0.3, 0.2 + 2e-9), id="just beyond the tolerance"),
    ],
)
def test_shares_that_are_none_are_refused(shares):
    alpha, beta, gamma = shares
    with pytest.raises(ValueError, match=r"expected shares in \[0, 1\] that sum to 1"):
        Shares(alpha=alpha, beta=beta, gamma=gamma)


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, -1, 2)])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(ValueError, match=f"fully_correct={counts[0]}"):
        shares_of(counts)


@pytest.mark.parametrize("penalty", [-0.1, 2.1, math.nan])
@pytest.mark.parametrize("function", [mean_reward, reward_variance, advantages, phase])
def test_penalty_out_of_range_is_refused(function, penalty):
    with pytest.raises(ValueError, match="penalty is"):
        function(shares_of((1, 1, 1)), penalty)


@pytest.mark.parametrize("rho_shift", [-0.1, math.inf, math.nan])
def test_rho_shift_out_of_range_is_refused(rho_shift):
    with pytest.raises(ValueError, match="rho_shift is"):
        penalty_from_rho_shift(rho_shift)


def test_one_rollout_has_no_spread():
    with pytest.raises(ValueError, match="num_rollouts is 1"):
        simulate(shares_of((1, 1, 1)), 1, num_rollouts=1, seed=0)

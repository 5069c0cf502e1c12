from __future__ import annotations

import math

import pytest

from verl_fapo.errors import JudgeError
from verl_fapo.metrics import (
    JudgeHealth,
    ScoredRollout,
    by_data_source,
    fapo_metrics,
    fapo_validation,
    genrm_metrics,
    judge_quality,
    wait_seconds,
)

RIGHT = {
    "acc": 1.0, "judged": 1.0, "flawed": 0.0, "unknown": 0.0, "reason": "", "from_memory": 0.0, "judge_seconds": 2.0,
    "judge_tokens": 10.0, "generated_at": 100.0, "scored_at": 102.0,
}  # fmt: skip
FLAWED = RIGHT | {"flawed": 1.0, "judge_seconds": 4.0, "scored_at": 104.0}
UNKNOWN = RIGHT | {"unknown": 1.0, "reason": "no_box", "judge_seconds": 6.0}
REMEMBERED = RIGHT | {"from_memory": 1.0, "judge_seconds": 0.1, "judge_tokens": 0.0}
NOT_JUDGED = RIGHT | {"judged": 0.0, "judge_seconds": 0.0, "judge_tokens": 0.0, "scored_at": 100.0}
WRONG = NOT_JUDGED | {"acc": 0.0}
BROKEN = WRONG | {"judged": 1.0, "unknown": 1.0, "reason": "error"}
"""A row that could not be read: its reward is -1 whatever ``on_unknown`` says."""

REWARDS = {"keep": 1.0, "neutral": 1.0, "penalise": 0.0}


def rollouts(*groups: list[dict], unknown_reward: float = 1.0, penalty: float = 1.0) -> list[ScoredRollout]:
    def reward(extra: dict) -> float:
        if extra["unknown"] and extra["acc"]:
            return unknown_reward
        return 2 * extra["acc"] - 1 - penalty * extra["flawed"]

    return [
        ScoredRollout(key=f"u{group}_{session}_0", reward=reward(extra), extras=extra)
        for group, extras in enumerate(groups)
        for session, extra in enumerate(extras)
    ]


STEP = ([RIGHT, FLAWED, WRONG, WRONG], [UNKNOWN, FLAWED, REMEMBERED, FLAWED], [WRONG] * 4)
COUNTS = {
    "fapo/accuracy": 6 / 12,
    "fapo/judged": 6.0,
    "fapo/flawed": 3.0,
    "fapo/unknown": 1.0,
    "fapo/unknown/no_box": 1.0,
    "fapo/unknown_rate": 1 / 6,
    "fapo/from_memory": 1.0,
    "fapo/judge_tokens": 50.0,
    "fapo/judge_seconds/p50": 4.0,
    "fapo/judge_seconds/p99": 5.92,
    "fapo/flawed_rate": 3 / 5,
    "fapo/flawed_rate/group_accuracy_to_0.5": 1 / 2,
    "fapo/flawed_rate/group_accuracy_to_1": 2 / 3,
    "fapo/groups_without_variance": 1 / 3,
}


@pytest.mark.parametrize(
    ("on_unknown", "shares", "rho", "phase", "mean"),
    [
        pytest.param("keep", (3 / 12, 6 / 12, 3 / 12), 0.5, 0.0, -3 / 12, id="keep: an unknown one is correct"),
        pytest.param("penalise", (2 / 12, 6 / 12, 4 / 12), 1 / 3, 0.0, -4 / 12, id="penalise: it is flawed"),
        pytest.param("neutral", (2 / 11, 6 / 11, 3 / 11), 1 / 3, 0.0, -4 / 11, id="neutral: it has no part"),
    ],
)
def test_step_counts_what_happened_and_shares_are_as_rollouts_were_treated(on_unknown, shares, rho, phase, mean):
    step = rollouts(*STEP, unknown_reward=REWARDS[on_unknown])
    metrics = fapo_metrics(step, penalty=1.0, on_unknown=on_unknown)
    alpha, beta, gamma = shares
    std = math.sqrt(alpha + beta - mean**2)
    assert metrics == pytest.approx(
        COUNTS
        | {
            "fapo/alpha": alpha,
            "fapo/beta": beta,
            "fapo/gamma": gamma,
            "fapo/rho": rho,
            "fapo/phase": phase,
            "fapo/reward_mean": mean,
            "fapo/reward_mean_predicted": mean,
            "fapo/reward_std": std,
            "fapo/reward_std_predicted": std,
        }
    )


@pytest.mark.parametrize(
    ("right", "phase"),
    [pytest.param(1, 0.0, id="warm-up"), pytest.param(4, 1.0, id="refinement"), pytest.param(8, 2.0, id="late")],
)
def test_phase_is_a_number_that_grows_with_the_right_rollouts(right, phase):
    step = rollouts([RIGHT] * right + [WRONG] * 2 + [FLAWED])
    assert fapo_metrics(step, penalty=1.0, on_unknown="keep")["fapo/phase"] == phase


@pytest.mark.parametrize(
    ("penalty", "mean", "variance", "phase"),
    [
        pytest.param(0.0, 0.0, 1.0, 0.0, id="0: as without a judge"),
        pytest.param(0.5, -0.125, 1 / 4 + 1 / 2 + 1 / 4 * 0.5**2 - 0.125**2, 0.0, id="0.5"),
        pytest.param(2.0, -0.5, 3 / 4, 1.0, id="2: flawed is as bad as wrong"),
    ],
)
def test_prediction_is_that_of_the_penalty(penalty, mean, variance, phase):
    step = rollouts([RIGHT, FLAWED, WRONG, WRONG], penalty=penalty)
    metrics = fapo_metrics(step, penalty=penalty, on_unknown="keep")
    assert metrics["fapo/reward_mean"] == metrics["fapo/reward_mean_predicted"] == pytest.approx(mean)
    assert metrics["fapo/reward_std"] == pytest.approx(math.sqrt(variance))
    assert metrics["fapo/reward_std_predicted"] == pytest.approx(math.sqrt(variance))
    assert metrics["fapo/phase"] == phase


@pytest.mark.parametrize(
    ("wrong", "flawed", "bucket"),
    [
        pytest.param(6, 1, "0.25", id="2 of 8"),
        pytest.param(5, 1, "0.5", id="3 of 8"),
        pytest.param(4, 1, "0.5", id="4 of 8"),
        pytest.param(2, 1, "0.75", id="6 of 8"),
        pytest.param(1, 1, "1", id="7 of 8"),
        pytest.param(0, 1, "1", id="8 of 8"),
    ],
)
def test_flawed_rate_is_split_by_the_groups_accuracy(wrong, flawed, bucket):
    step = rollouts([WRONG] * wrong + [FLAWED] * flawed + [RIGHT] * (8 - wrong - flawed))
    metrics = fapo_metrics(step, penalty=1.0, on_unknown="keep")
    split = {name: value for name, value in metrics.items() if "group_accuracy" in name}
    assert split == {f"fapo/flawed_rate/group_accuracy_to_{bucket}": flawed / (8 - wrong)}


@pytest.mark.parametrize(
    ("rewards", "share"),
    [
        pytest.param([[1.0, 1.0], [0.0, 1.0]], 0.5, id="one of two groups"),
        pytest.param([[0.1 + 0.2, 0.3]], 1.0, id="up to rounding"),
        pytest.param([[0.5, 0.50001]], 0.0, id="a little is something"),
        pytest.param([[1.0], [0.0]], 1.0, id="groups of one"),
    ],
)
def test_group_without_variance_has_one_reward(rewards, share):
    step = [
        ScoredRollout(key=f"u{group}_{session}_0", reward=reward, extras=RIGHT)
        for group, of_group in enumerate(rewards)
        for session, reward in enumerate(of_group)
    ]
    assert fapo_metrics(step, penalty=1.0, on_unknown="keep")["fapo/groups_without_variance"] == share


@pytest.mark.parametrize("on_unknown", ["keep", "penalise"])
@pytest.mark.parametrize("others", [pytest.param([RIGHT], id="beside another"), pytest.param([], id="alone")])
def test_row_that_could_not_be_scored_is_a_wrong_one(on_unknown, others):
    metrics = fapo_metrics(rollouts([BROKEN, *others]), penalty=1.0, on_unknown=on_unknown)
    assert (metrics["fapo/beta"], metrics["fapo/gamma"]) == (1 / (1 + len(others)), 0.0)
    assert metrics["fapo/reward_mean"] == metrics["fapo/reward_mean_predicted"]


@pytest.mark.parametrize(
    ("on_unknown", "share"),
    [
        pytest.param("keep", 1 / 4, id="keep: those of the wrong"),
        pytest.param("neutral", 3 / 4, id="neutral: and those in which one or none is compared"),
    ],
)
def test_rollout_that_is_left_out_has_no_part_in_the_variance(on_unknown, share):
    step = rollouts([UNKNOWN, WRONG], [UNKNOWN, BROKEN], [WRONG] * 2, [UNKNOWN, WRONG, RIGHT])
    assert fapo_metrics(step, penalty=1.0, on_unknown=on_unknown)["fapo/groups_without_variance"] == share


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        pytest.param([(100.0, 102.0), (101.0, 101.5)], 1.0, id="from the last rollout to the last reward"),
        pytest.param([(100.0, 104.0), (109.0, 109.0)], 0.0, id="judged before the last rollout ends"),
        pytest.param([], 0.0, id="no rollouts"),
    ],
)
def test_wait_is_for_judgements_alone(times, seconds):
    extras = [RIGHT | {"generated_at": generated, "scored_at": scored} for generated, scored in times]
    assert wait_seconds(rollouts(extras)) == seconds


def test_shaping_of_long_responses_is_the_difference_to_the_prediction():
    step = [ScoredRollout(key=one.key, reward=one.reward - 0.5, extras=one.extras) for one in rollouts([RIGHT, WRONG])]
    metrics = fapo_metrics(step, penalty=1.0, on_unknown="keep")
    assert (metrics["fapo/reward_mean"], metrics["fapo/reward_mean_predicted"]) == (-0.5, 0.0)


SECONDS = {"fapo/judge_seconds/p50", "fapo/judge_seconds/p99"}
SOMETIMES = {"fapo/flawed_rate", "fapo/unknown_rate", "fapo/rho", *SECONDS}
ALWAYS = {
    *("fapo/accuracy", "fapo/judged", "fapo/flawed", "fapo/unknown", "fapo/from_memory", "fapo/judge_tokens"),
    *("fapo/groups_without_variance", "fapo/alpha", "fapo/beta", "fapo/gamma", "fapo/phase"),
    *("fapo/reward_mean", "fapo/reward_mean_predicted", "fapo/reward_std", "fapo/reward_std_predicted"),
}


@pytest.mark.parametrize(
    ("step", "left_out"),
    [
        pytest.param([RIGHT, WRONG], set(), id="nothing"),
        pytest.param([NOT_JUDGED, WRONG], {"fapo/flawed_rate", "fapo/unknown_rate", *SECONDS}, id="none judged"),
        pytest.param([UNKNOWN, WRONG], {"fapo/flawed_rate"}, id="all unknown"),
        pytest.param([REMEMBERED, WRONG], SECONDS, id="all remembered"),
        pytest.param([RIGHT], {"fapo/rho"}, id="none wrong"),
        pytest.param([FLAWED], {"fapo/rho"}, id="all flawed"),
    ],
)
def test_what_would_be_a_share_of_nothing_is_left_out(step, left_out):
    metrics = fapo_metrics(rollouts(step), penalty=1.0, on_unknown="keep")
    names = {name for name in metrics if "group_accuracy" not in name and not name.startswith("fapo/unknown/")}
    assert names == (ALWAYS | SOMETIMES) - left_out
    assert any("group_accuracy" in name for name in metrics) == ("fapo/flawed_rate" in metrics)
    assert all(map(math.isfinite, metrics.values()))


def test_step_without_rollouts_has_no_metrics():
    assert fapo_metrics([], penalty=1.0, on_unknown="keep") == {} == genrm_metrics([])


def test_neutral_step_in_which_all_are_unknown_has_no_shares():
    metrics = fapo_metrics(rollouts([UNKNOWN] * 2), penalty=1.0, on_unknown="neutral")
    assert metrics["fapo/unknown"] == 2.0 and "fapo/alpha" not in metrics


def test_group_id_and_index_are_read_from_verls_key():
    one = ScoredRollout(key="a_b_3_12", reward=1.0, extras={})
    assert (one.group, one.id, one.index) == ("a_b", "a_b_3", 12)


def lesson(*, flawed: bool, truly: bool, distance: float = 0.0, unknown: bool = False) -> dict:
    called = flawed and not unknown
    return {
        "acc": float(not unknown and called == truly),
        "flawed": float(called),
        "unknown": float(unknown),
        "truly_flawed": float(truly),
        "distance": distance,
    }


LESSONS = [
    lesson(flawed=True, truly=True, distance=0.0),
    lesson(flawed=True, truly=True, distance=3.0),
    lesson(flawed=False, truly=True),
    lesson(flawed=True, truly=False),
    lesson(flawed=False, truly=False),
    lesson(flawed=False, truly=True, unknown=True),
    lesson(flawed=False, truly=False, unknown=True),
    lesson(flawed=False, truly=False),
]


def test_quality_of_a_judge_in_training():
    assert judge_quality(LESSONS) == pytest.approx(
        {
            "accuracy": 4 / 8,
            "invalid_rate": 2 / 8,
            "precision": 2 / 3,
            "recall": 2 / 4,
            "f1": 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4),
            "clean_flagged_rate": 1 / 4,
            "index_distance": 1.5,
        }
    )


@pytest.mark.parametrize(
    ("lessons", "names"),
    [
        pytest.param([lesson(flawed=False, truly=False)], {"clean_flagged_rate"}, id="none flawed, none called"),
        pytest.param([lesson(flawed=True, truly=True)], {"precision", "recall", "f1", "index_distance"}, id="found"),
        pytest.param([lesson(flawed=False, truly=True, unknown=True)], {"recall", "f1"}, id="invalid finds nothing"),
    ],
)
def test_quality_leaves_out_what_has_no_denominator(lessons, names):
    assert judge_quality(lessons).keys() == names | {"accuracy", "invalid_rate"}


def test_step_of_a_judge_in_training_has_its_quality_and_its_rewards():
    step = [ScoredRollout(key=f"u{i // 4}_{i}_0", reward=i // 4 * (i % 2), extras=e) for i, e in enumerate(LESSONS)]
    assert genrm_metrics(step) == pytest.approx(
        {f"fapo_genrm/{name}": value for name, value in judge_quality(LESSONS).items()}
        | {
            "fapo_genrm/reward_mean": 2 / 8,
            "fapo_genrm/reward_std": math.sqrt(3) / 4,
            "fapo_genrm/groups_without_variance": 1 / 2,
        }
    )


def test_validation_is_summarised_by_data_source():
    scored = [("a", RIGHT), ("b", WRONG), ("a", FLAWED), ("b", NOT_JUDGED), ("a", UNKNOWN), ("a", WRONG)]
    assert by_data_source(fapo_validation, scored) == {
        "fapo_validation/a/accuracy": 0.75,
        "fapo_validation/a/flawed_rate": 0.5,
        "fapo_validation/b/accuracy": 0.5,
    }


def judged(num: int, *, unknown: float = 0.0) -> list[dict]:
    return [{"judged": 1.0, "unknown": unknown}] * num


def test_too_many_unknown_verdicts_stop_the_run():
    with pytest.raises(JudgeError, match=r"55% of the last 20 .*max_unknown_rate=0.5"):
        JudgeHealth(0.5).check(judged(11, unknown=1.0) + judged(9))


def test_or_only_warn(caplog):
    health = JudgeHealth(0.5, "warn")
    for _ in range(2):
        health.check(judged(20, unknown=1.0))
    assert caplog.text.count("100% of the last 20 judgements gave no verdict") == 2


@pytest.mark.parametrize(
    ("rate", "step"),
    [
        pytest.param(0.5, judged(10, unknown=1.0) + judged(10), id="exactly the limit"),
        pytest.param(1.0, judged(40, unknown=1.0), id="1 never stops"),
        pytest.param(0.0, judged(40), id="none unknown"),
        pytest.param(0.0, judged(19, unknown=1.0), id="too few to say"),
        pytest.param(0.0, [{"judged": 0.0, "unknown": 0.0}] * 40, id="none judged"),
    ],
)
def test_run_goes_on(rate, step):
    JudgeHealth(rate).check(step)


def test_judgements_of_small_steps_add_up():
    health = JudgeHealth(0.5)
    health.check(judged(15, unknown=1.0))
    with pytest.raises(JudgeError):
        health.check(judged(5, unknown=1.0))


def test_a_bad_past_does_not_count_for_ever():
    health = JudgeHealth(0.5)
    health.check(judged(10, unknown=1.0) + judged(10))
    health.check(judged(9, unknown=1.0) + judged(11))

from __future__ import annotations

import pytest

from verl_fapo.errors import JudgeError
from verl_fapo.metrics import JudgeHealth, step_metrics


def extras(num: int, *, judged: float = 1.0, flawed: float = 0.0, unknown: float = 0.0) -> list[dict[str, float]]:
    extra = {"acc": judged, "judged": judged, "flawed": flawed, "unknown": unknown, "judge_seconds": 2.0 * judged}
    return [extra] * num


def test_shares_are_over_the_rollouts_and_over_the_judged():
    metrics = step_metrics(extras(4, judged=0.0) + extras(2, flawed=1.0) + extras(1, unknown=1.0) + extras(1))
    assert metrics == {
        "fapo/accuracy": 0.5,
        "fapo/judged": 4.0,
        "fapo/flawed": 2.0,
        "fapo/unknown": 1.0,
        "fapo/flawed_rate": 2 / 3,
        "fapo/unknown_rate": 0.25,
        "fapo/judge_seconds": 2.0,
    }


def test_share_of_nothing_is_left_out():
    assert step_metrics([]) == {}
    assert "fapo/flawed_rate" not in step_metrics(extras(3, judged=0.0))
    assert "fapo/flawed_rate" not in step_metrics(extras(3, unknown=1.0))


def test_too_many_unknown_verdicts_stop_the_run():
    with pytest.raises(JudgeError, match=r"55% of the last 20 .*max_unknown_rate=0.5"):
        JudgeHealth(0.5).check(extras(11, unknown=1.0) + extras(9))


@pytest.mark.parametrize(
    ("rate", "step"),
    [
        pytest.param(0.5, extras(10, unknown=1.0) + extras(10), id="exactly the limit"),
        pytest.param(1.0, extras(40, unknown=1.0), id="1 never stops"),
        pytest.param(0.0, extras(40), id="none unknown"),
        pytest.param(0.0, extras(19, unknown=1.0), id="too few to say"),
        pytest.param(0.0, extras(40, judged=0.0), id="none judged"),
    ],
)
def test_run_goes_on(rate, step):
    JudgeHealth(rate).check(step)


def test_judgements_of_small_steps_add_up():
    health = JudgeHealth(0.5)
    health.check(extras(15, unknown=1.0))
    with pytest.raises(JudgeError):
        health.check(extras(5, unknown=1.0))


def test_a_bad_past_does_not_count_for_ever():
    health = JudgeHealth(0.5)
    health.check(extras(10, unknown=1.0) + extras(10))
    health.check(extras(9, unknown=1.0) + extras(11))

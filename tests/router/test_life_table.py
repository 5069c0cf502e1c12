from __future__ import annotations

import math
import random

import pytest

from verl_fapo.router.life_table import MIN_ENDED, WINDOW, LifeTable


def table(ended=(), censored=(), under_way=()) -> LifeTable:
    made = LifeTable()
    for age in ended:
        made.add(age, ended=True)
    for age in censored:
        made.add(age, ended=False)
    made.refresh(under_way)
    return made


def test_too_little_says_nothing():
    assert table([1.0] * (MIN_ENDED - 1)).hazard(1e6) == 0


def test_hazard_is_that_of_the_distribution():
    rng = random.Random(1)
    ages = [rng.lognormvariate(3, 0.5) for _ in range(WINDOW)]
    made = table(ages)
    for age in (10, 20, 30, 45):
        true = -math.log(sum(other > age for other in ages) / len(ages))
        assert made.hazard(age) == pytest.approx(true, rel=0.2, abs=0.05)


def test_requests_under_way_count_although_they_have_not_ended():
    # Of 400 requests sent at once only the 40 short ones have ended: the others are not late.
    short = [2.0 + index / 40 for index in range(40)]
    assert table(short).hazard(2.9) > 2
    assert table(short, under_way=[3.0] * 360).hazard(2.9) == pytest.approx(0.105, rel=0.15)
    assert table(short, censored=[3.0] * 360).hazard(2.9) == pytest.approx(0.105, rel=0.15)


def test_beyond_the_longest_age_alone_tells_in_the_end():
    made = table([1.0] * 100, under_way=[50.0] * 20)
    assert made.hazard(1.5) < made.hazard(2.5) < 5.5 < made.hazard(50.0) < made.hazard(500.0)


@pytest.mark.parametrize("age", [-1.0, 0.0, 1e-9, 1e9])
def test_any_age_is_in_some_bucket(age):
    made = table([1.0] * 20)
    made.add(age, ended=True)
    made.refresh([age])
    assert made.hazard(age) >= 0


def test_hazard_never_falls():
    rng = random.Random(2)
    made = table([rng.expovariate(0.1) for _ in range(300)], [rng.expovariate(0.1) for _ in range(300)], [5.0, 500.0])
    hazards = [made.hazard(1.1**power) for power in range(-70, 100)]
    assert hazards == sorted(hazards)


def test_it_follows_a_change():
    made = table([1.0] * 5000)
    for _ in range(3000):
        made.add(10.0, ended=True)
    made.refresh([])
    assert made.hazard(5.0) < 1

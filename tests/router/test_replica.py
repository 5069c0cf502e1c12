from __future__ import annotations

import math

import pytest

from verl_fapo.router.replica import FIRST_LIMIT, Replica, Sickness, Timing

TIMING = Timing()


def replica(**fields) -> Replica:
    return Replica("http://r", 0, TIMING, **fields)


def test_scaled_times_are_all_scaled():
    scaled = Timing().scaled(0.02)
    assert scaled.tick == Timing().tick * 0.02 and scaled.max_cool_down == Timing().max_cool_down * 0.02


@pytest.mark.parametrize(
    ("share", "room"),
    [
        pytest.param(0.0, 1, id="at once one"),
        pytest.param(0.5, 16, id="half way half"),
        pytest.param(1.0, 32, id="then all"),
    ],
)
def test_newcomer_gets_more_and_more(share, room):
    new = replica(limit=32)
    new.ramp_from = 100.0
    assert new.room(100.0 + share * TIMING.ramp) == room


@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        pytest.param(None, TIMING.first_pause, id="does not say"),
        pytest.param(7.0, 7.0, id="says"),
        pytest.param(0.0, TIMING.first_pause, id="says at once"),
        pytest.param(1e9, TIMING.max_retry_after, id="says nonsense"),
    ],
)
def test_busy_replica_gets_nothing_for_as_long_as_it_says(asked, seconds):
    busy = replica(limit=8)
    busy.pause(asked, 100.0)
    assert busy.room(100.0 + seconds - 0.01) == 0
    assert busy.room(100.0 + seconds + 0.01) == 1
    assert not busy.sickness


def test_pauses_and_cool_downs_grow_and_stay_bounded():
    poor = replica()
    pauses, cool_downs = [], []
    for _ in range(40):
        poor.paused_until = -math.inf
        poor.pause(None, 0.0)
        pauses.append(poor.paused_until)
        poor.fall_sick(Sickness.FAILING, 0.0)
        cool_downs.append(poor.retry_at)
    assert pauses[:3] == [0.5, 1.0, 2.0] and pauses[-1] == TIMING.max_pause
    assert cool_downs[:3] == [1.0, 2.0, 4.0] and cool_downs[-1] == TIMING.max_cool_down


@pytest.mark.parametrize(
    ("loads", "limit"),
    [
        pytest.param([(10, 0)], FIRST_LIMIT, id="not full"),
        pytest.param([(3, 20)], FIRST_LIMIT, id="a burst that has just arrived"),
        pytest.param([(30, 20), (32, 20)], 32, id="full"),
        pytest.param([(30, 20), (32, 20), (32, 0)], 33, id="full no more"),
        pytest.param([(64, 0), (96, 0)], 144, id="never full"),
    ],
)
def test_limit_is_learned_from_the_engine(loads, limit):
    learner = replica()
    learner.copies = dict.fromkeys(range(200))
    if loads == [(10, 0)]:
        learner.copies = {}
    for load in loads:
        learner.learn_limit(*load)
    assert learner.limit == limit


def test_given_limit_stays():
    given = replica(limit=4, limit_is_given=True)
    given.learn_limit(1, 5)
    given.learn_limit(1, 5)
    assert given.limit == 4


def test_silence_is_measured_by_what_peers_answer_meanwhile():
    quiet = replica()
    quiet.sign_of_life((100, 50.0, 7.0))
    quiet.expect(20.0)
    # Of 60 expected of its peers they gave 60, 30, none.
    assert quiet.unlikely_silence((160, 130.0, 10.0)) == pytest.approx(20.0)
    assert quiet.unlikely_silence((130, 130.0, 10.0)) == pytest.approx(10.0)
    assert quiet.unlikely_silence((100, 130.0, 10.0)) == 0
    assert quiet.unlikely_silence((100, 70.0, 10.0)) == 0  # no peers
    assert quiet.unlikely_silence((160, 130.0, 8.0)) == 0  # a moment


def test_speed_is_answers_given_over_answers_expected():
    slow, quick = replica(), replica()
    for speedy, expected in ((slow, 40.0), (quick, 10.0)):
        speedy.expect(expected)
        for _ in range(20):
            speedy.answer(was_expected=True, tokens=1.0, seconds=1.0, of_all=(0, 0.0, 0.0))
    assert slow.speed < 0.6 < 1.6 < quick.speed

"""The router's decisions, by the clock of the test."""

from __future__ import annotations

import random

import pytest

from verl_fapo.errors import RouterError
from verl_fapo.router.dispatcher import Copy, Dispatcher, Outcome, Ticket, Why
from verl_fapo.router.replica import Sickness

URLS = ("http://a", "http://b", "http://c")


def dispatcher(*urls: str, **settings) -> Dispatcher:
    made = Dispatcher(**{"limit": 2, **settings})
    for url in urls or URLS:
        made.add(url, 0.0)
    return made


def submit(made: Dispatcher, count: int = 1, *, now: float = 0.0, size: int = 100) -> list[Ticket]:
    tickets = [Ticket(size=size, kind="POST /x", now=now) for _ in range(count)]
    for ticket in tickets:
        assert made.submit(ticket)
    return tickets


def answer_400(made: Dispatcher) -> float:
    """Play requests of a hundred tokens that take a second each; the time at the end."""
    now = 0.0
    for _ in range(400):
        submit(made, now=now)
        (copy,) = made.take(now)
        list(made.tick(now + 0.9))
        now += 1.0
        made.end(copy, Outcome.ANSWERED, now, tokens=100)
    return now


def where(copies: list[Copy]) -> str:
    return "".join(copy.replica.url[-1] for copy in copies)


class World:
    """Plays requests against replicas with a speed each, in virtual time; not the one that the rules were made with."""

    def __init__(self, speeds: dict[str, float], **settings) -> None:
        self.made = dispatcher(*speeds, **{"limit": 8, **settings})
        self.speeds = speeds
        self.ends: dict[Copy, float] = {}
        self.answered: dict[Ticket, float] = {}
        self.wasted = self.now = 0.0
        self.rng = random.Random(0)
        self.lengths: dict[Ticket, float] = {}

    def start(self, copies, now: float) -> None:
        for copy in copies:
            speed = self.speeds[copy.replica.url]
            self.ends[copy] = now + self.lengths[copy.ticket] / speed if speed else float("inf")

    def run(self, count: int, seconds: float) -> None:
        made, step, now = self.made, 0.1, self.now
        end = now + seconds
        for ticket in submit(made, count, now=now):
            self.lengths[ticket] = self.rng.lognormvariate(2.3, 0.5)
        while now < end and len(self.answered) < count:
            now += step
            for copy in [copy for copy, end in self.ends.items() if end <= now]:
                if copy not in self.ends:
                    continue
                del self.ends[copy]
                if made.end(copy, Outcome.ANSWERED, now, tokens=self.lengths[copy.ticket]):
                    self.answered[copy.ticket] = now
                    for other in [c for c in copy.ticket.copies if c.why is not Why.TRIAL]:
                        del self.ends[other]
                        self.wasted += (now - other.started) * self.speeds[other.replica.url]
                        made.end(other, Outcome.CANCELLED, now)
            self.start(made.take(now), now)
            if round(now / step) % 5 == 0:
                self.start(made.tick(now), now)
                for copy in made.given_up:
                    if self.ends.pop(copy, None) is not None:
                        made.end(copy, Outcome.CANCELLED, now)
                made.given_up.clear()
        self.now = now


def test_emptiest_is_next_and_ties_go_to_the_first():
    made = dispatcher()
    submit(made, 6)
    assert where(made.take(0.0)) == "abcabc"


def test_requests_wait_when_all_replicas_work_on_all_they_can():
    made = dispatcher("http://a")
    submit(made, 3)
    first, _ = made.take(0.0)
    assert made.num_waiting == 1
    assert made.end(first, Outcome.ANSWERED, 1.0, tokens=1)
    assert where(made.take(1.0)) == "a" and made.num_waiting == 0


@pytest.mark.parametrize("policy", ["least_requests", "round_robin"])
def test_other_policies_hold_nothing_back(policy):
    made = dispatcher(policy=policy)
    submit(made, 9)
    assert where(made.take(0.0)) == "abcabcabc"


def test_longest_goes_first_but_not_for_ever():
    made = dispatcher("http://a", limit=1)
    (running,) = submit(made)
    assert where(made.take(0.0)) == "a"
    short, long_, late = (
        *submit(made, size=50, now=1.0),
        *submit(made, size=500, now=2.0),
        *submit(made, size=500, now=99),
    )
    order = []
    copy = running.copies[0]
    for now in (100.0, 101.0, 102.0):
        made.end(copy, Outcome.ANSWERED, now, tokens=1)
        (copy,) = made.take(now)
        order.append(copy.ticket)
    assert order == [long_, short, late]


def test_failed_request_goes_to_each_replica_once_before_it_comes_back():
    made = dispatcher()
    (ticket,) = submit(made)
    visited, now = "", 0.0
    for _ in range(6):
        (copy,) = made.take(now)
        visited += where([copy])
        assert not made.end(copy, Outcome.FAILED, now)
        assert list(made.take(now)) == []  # a pause first
        now += 10.0
    assert sorted(visited[:3]) == sorted(visited[3:]) == ["a", "b", "c"]
    assert not ticket.done


def test_pauses_between_tries_grow_and_are_jittered_but_the_same_in_every_run():
    def pauses() -> list[float]:
        made, now, found = dispatcher("http://a"), 0.0, []
        submit(made)
        (copy,) = made.take(now)
        for _ in range(5):
            made.end(copy, Outcome.FAILED, now)
            made.replicas["http://a"].failures = 0
            began = now
            while not (copies := list(made.take(now))):
                now += 0.001
            (copy,) = copies
            found.append(now - began)
        return found

    first = pauses()
    assert first == pauses()
    assert 0.02 < first[0] < 0.06 and first[4] > 0.3


def test_three_failures_in_a_row_make_a_replica_sick_and_time_or_a_probe_makes_it_well():
    made = dispatcher("http://a", "http://b", limit=100)
    a = made.replicas["http://a"]
    submit(made, 8)
    for copy in [copy for copy in made.take(0.0) if copy.replica is a][:3]:
        assert not a.sickness
        made.end(copy, Outcome.FAILED, 0.0)
    assert a.sickness is Sickness.FAILING
    assert set(where(made.take(0.2))) == {"b"}
    list(made.tick(0.9))
    assert a.sickness
    list(made.tick(1.1))
    assert not a.sickness and a.room(1.1) <= 1
    made.probed(a, healthy=True, now=2.0)


def test_request_that_fails_everywhere_makes_no_replica_but_its_first_suspect():
    made = dispatcher()
    for _ in range(2):
        submit(made)
        now = 0.0
        for _ in range(3):
            (copy,) = made.take(now)
            made.end(copy, Outcome.FAILED, now)
            now += 10.0
        made.withdraw(copy.ticket)
    assert [replica.failures for replica in made.replicas.values()] == [2, 0, 0]


def test_busy_replica_is_waited_for_and_not_sick():
    made = dispatcher("http://a")
    submit(made)
    for now in (0.0, 51.0, 102.0, 153.0):
        (copy,) = made.tick(now)
        assert not made.end(copy, Outcome.BUSY, now, retry_after=50.0)
        assert list(made.tick(now + 49.0)) == []
    assert made.num_waiting == 1 and not copy.replica.sickness


def test_busy_replica_leaves_the_request_to_another_at_once():
    made = dispatcher("http://a", "http://b")
    submit(made)
    (copy,) = made.take(0.0)
    made.end(copy, Outcome.BUSY, 0.0, retry_after=None)
    assert where(made.take(0.0)) == "b"


def test_answer_that_only_counts_if_there_is_no_better_is_passed_on_in_the_end():
    made = dispatcher()
    submit(made)
    for last in (False, False, True):
        now = 10.0 * last
        (copy,) = made.take(now)
        assert made.end(copy, Outcome.ELSEWHERE, now) is last


def test_unreachable_replica_leaves_its_requests_to_others_and_the_first_answer_wins():
    made = dispatcher("http://a", "http://b")
    (ticket,) = submit(made)
    (first,) = made.take(0.0)
    for _ in range(3):
        made.probed(first.replica, healthy=False, now=15.0)
    assert first.replica.sickness is Sickness.UNREACHABLE
    (second,) = made.take(15.0)
    assert (where([second]), second.why) == ("b", Why.RESCUE)
    assert made.end(second, Outcome.ANSWERED, 20.0, tokens=5)
    assert not made.end(first, Outcome.CANCELLED, 20.0)
    assert ticket.done and not ticket.copies
    made.probed(first.replica, healthy=True, now=21.0)
    assert not first.replica.sickness


def test_replica_that_answers_requests_is_alive_whatever_its_probes_say():
    made = dispatcher("http://a")
    a = made.replicas["http://a"]
    for now in range(6):
        made.probed(a, healthy=False, now=now)
        submit(made)
        (copy,) = made.take(now)
        made.end(copy, Outcome.ANSWERED, now, tokens=1)
    assert not a.sickness


def test_request_whose_second_copy_is_lost_too_gets_a_third():
    made = dispatcher("http://a", "http://b")
    submit(made)
    (first,) = made.take(0.0)
    for now, lost in ((1.0, first.replica), (2.0, made.replicas["http://b"])):
        for _ in range(3):
            made.probed(lost, healthy=False, now=now)
        list(made.take(now))
    made.add("http://c", 3.0)
    assert where(made.take(3.0)) == "c"


@pytest.mark.parametrize("why", [Sickness.SILENT, Sickness.FAILING, Sickness.UNREACHABLE])
def test_sick_replica_is_tried_again_when_no_other_is_left(why):
    made = dispatcher("http://a", "http://b")
    a, b = made.replicas.values()
    a.fall_sick(why, 0.0)
    for _ in range(3):
        for replica in (a, b):
            made.probed(replica, healthy=False, now=0.0)
    submit(made)
    assert where(made.tick(0.5)) == ""
    assert where(made.tick(2.0)) == "a"


def test_requests_that_all_hang_at_the_only_replica_left_go_on_when_others_are_back():
    made = dispatcher("http://a", "http://b", "http://c", limit=50)
    now = answer_400(made)
    for _ in range(5):  # and some that took long
        submit(made, now=now)
        (copy,) = made.take(now)
        now += 12.0
        made.end(copy, Outcome.ANSWERED, now, tokens=100)
    back = [made.replicas["http://b"], made.replicas["http://c"]]
    for replica in back:
        replica.fall_sick(Sickness.UNREACHABLE, now)
    submit(made, 15, now=now)
    assert where(made.tick(now)) == 15 * "a"
    for replica in back:
        made.probed(replica, healthy=True, now=now + 5.0)
    sent = [copy for second in range(5, 20) for copy in made.tick(now + second)]
    assert len(sent) == 15 and set(where(sent)) == {"b", "c"}


def test_request_that_could_not_be_hedged_is_rescued_when_its_replica_is_lost():
    made = dispatcher("http://a", "http://b", hedge_budget=0.0, limit=1)
    submit(made, 2)
    first, second = made.take(0.0)
    made._urge(first, Why.HEDGE)  # without credit
    for _ in range(3):
        made.probed(first.replica, healthy=False, now=1.0)
    made.end(second, Outcome.ANSWERED, 2.0, tokens=1)
    assert where([*made.take(2.0), *made.tick(3.0)]) == "b"


def test_request_that_failed_at_the_only_replica_left_comes_back_to_it():
    made = dispatcher("http://a", "http://b")
    submit(made)
    (copy,) = made.take(0.0)
    made.end(copy, Outcome.FAILED, 0.0)
    for _ in range(3):
        made.probed(made.replicas["http://b"], healthy=False, now=0.0)
    assert where(made.take(10.0)) == "a"


@pytest.mark.parametrize(
    ("main", "trial", "delivered"),
    [
        pytest.param(Outcome.BUSY, Outcome.ANSWERED, True, id="busy, and the trial answers"),
        pytest.param(Outcome.FAILED, Outcome.ANSWERED, True, id="fails, and the trial answers"),
        pytest.param(Outcome.FAILED, Outcome.FAILED, False, id="both fail"),
        pytest.param(Outcome.FAILED, Outcome.CANCELLED, False, id="fails, and the trial is given up"),
        pytest.param(Outcome.BUSY, Outcome.BUSY, False, id="both are busy"),
    ],
)
def test_request_with_a_trial_waits_once_and_not_when_it_is_answered(main, trial, delivered):
    made = dispatcher("http://a", "http://b", limit=8)
    made.replicas["http://a"].fall_sick(Sickness.SILENT, 0.0)
    (ticket,) = submit(made)
    (first,) = made.take(0.0)
    (second,) = made.tick(2.0)
    assert second.why is Why.TRIAL
    made.end(first, main, 3.0)
    assert made.num_waiting == 1
    assert made.end(second, trial, 3.005, tokens=5) is delivered
    assert made.num_waiting == (not delivered)
    sent = [copy for now in (4.0, 5.0, 20.0) for copy in made.tick(now)]
    assert [copy.ticket for copy in sent if copy.why is not Why.TRIAL] == [ticket] * (not delivered)
    assert made.num_waiting == 0


def test_answer_that_all_replicas_give_makes_nobody_sick():
    made = dispatcher()
    for now in range(0, 60, 10):
        submit(made)
        for _ in range(3):
            (copy,) = made.take(now)
            made.end(copy, Outcome.ELSEWHERE, now)
    assert all(replica.serving for replica in made.replicas.values())


def test_drained_replica_that_is_added_again_serves_on():
    made = dispatcher("http://a", "http://b")
    a = made.replicas["http://a"]
    submit(made)
    list(made.take(0.0))
    made.drain("http://a")
    assert made.add("http://a", 5.0) is a and a.serving and len(a.copies) == 1


def test_hedge_that_loses_costs_no_more_than_the_answer_that_won():
    made = dispatcher("http://a", "http://b", limit=50)
    now = answer_400(made)
    credit = made.token_credit
    submit(made, now=now)
    (first,) = made.take(now)
    second = next(copy for later in range(1, 1000) for copy in made.tick(now + later))
    made.end(second, Outcome.ANSWERED, now + 1000, tokens=120)
    made.end(first, Outcome.CANCELLED, now + 1000)
    assert credit + 6 - 120 <= made.token_credit < credit


def test_both_copies_may_fail_and_the_request_goes_on():
    made = dispatcher("http://a", "http://b")
    (ticket,) = submit(made)
    (first,) = made.take(0.0)
    for _ in range(3):
        made.probed(first.replica, healthy=False, now=1.0)
    (second,) = made.take(1.0)
    assert not made.end(first, Outcome.FAILED, 2.0)
    assert made.num_waiting == 0  # its second copy goes on
    assert not made.end(second, Outcome.FAILED, 3.0)
    assert made.num_waiting == 1 and not ticket.done
    assert where(made.take(9.0)) == "b"


def test_hanging_replica_is_found_by_its_silence_and_nothing_is_lost():
    world = World({"http://a": 1.0, "http://b": 1.0, "http://c": 1.0, "http://d": 0.0})
    world.run(200, 400)
    assert len(world.answered) == 200
    assert world.made.replicas["http://d"].sickness is Sickness.SILENT
    assert world.made.counts["fell silent"] == 1
    assert world.made.counts["rescue"] >= 8
    assert world.now < 1.6 * sum(world.lengths.values()) / 24


def test_slow_replica_does_not_hold_the_others_up():
    world = World({"http://a": 1.0, "http://b": 1.0, "http://c": 1.0, "http://d": 0.1})
    world.run(300, 800)
    assert len(world.answered) == 300
    assert world.now < 1.5 * sum(world.lengths.values()) / (24 + 0.8)
    assert world.wasted < 0.05 * sum(world.lengths.values())


@pytest.mark.parametrize("seed", range(5))
def test_healthy_replicas_get_no_second_copies(seed):
    world = World(dict.fromkeys(["http://a", "http://b", "http://c", "http://d"], 1.0))
    world.rng.seed(seed)
    world.run(400, 800)
    assert len(world.answered) == 400
    counts = world.made.counts
    assert counts["rescue"] == counts["trial"] == 0 and counts["hedge"] <= 4
    assert world.wasted < 0.01 * sum(world.lengths.values())


def test_replicas_that_are_all_slower_than_before_are_not_silent():
    world = World(dict.fromkeys(["http://a", "http://b", "http://c"], 1.0))
    world.run(200, 800)
    for url in world.speeds:
        world.speeds[url] = 0.2
    answered = len(world.answered)
    world.answered.clear()
    world.run(200, 3000)
    assert answered == len(world.answered) == 200
    assert world.made.counts["fell silent"] == 0


def test_overdue_request_gets_a_second_copy_within_the_budget():
    def play(budget: float) -> int:
        made = dispatcher("http://a", "http://b", limit=50, hedge_budget=budget)
        now = answer_400(made)
        submit(made, 30, now=now)
        list(made.take(now))
        for second in range(120):
            list(made.tick(now + second))
        return made.counts["hedge"]

    assert play(0.0) == 0
    # Two thousand tokens of credit buy second copies of a hundred tokens, half of it each.
    assert 15 <= play(0.05) <= 30
    assert play(0.001) <= 1


def test_replica_that_fell_silent_is_tried_with_a_copy_that_nobody_waits_for():
    world = World({"http://a": 1.0, "http://b": 1.0, "http://c": 0.0})
    world.run(150, 300)
    made, c = world.made, world.made.replicas["http://c"]
    assert c.sickness is Sickness.SILENT and made.counts["trial"] >= 1
    world.speeds["http://c"] = 1.0
    world.answered.clear()
    world.ends |= {copy: 0.0 for copy in world.ends if copy.replica is c}
    world.run(150, 300)
    assert not c.sickness and c.answered > 5


def test_queue_has_a_bound():
    made = dispatcher("http://a", limit=1, max_waiting=3)
    submit(made)
    list(made.take(0.0))
    submit(made, 3)
    assert not made.submit(Ticket(size=1, kind="x", now=0.0))


def test_what_nobody_waits_for_any_more_leaves_the_queue():
    made = dispatcher("http://a", limit=1)
    tickets = submit(made, 5000)
    (running,) = made.take(0.0)
    for ticket in tickets:
        made.withdraw(ticket)
    assert made.num_waiting == 0 and len(made._waiting._heap) < 2000
    made.end(running, Outcome.CANCELLED, 1.0)
    assert list(made.take(1.0)) == []


def test_drained_replica_ends_what_it_has_and_gets_no_more():
    made = dispatcher("http://a", "http://b")
    submit(made, 2)
    a, _ = made.take(0.0)
    made.drain("http://a")
    submit(made, 3)
    assert set(where(made.take(0.0))) == {"b"}
    assert made.end(a, Outcome.ANSWERED, 1.0, tokens=1)
    with pytest.raises(RouterError, match="no replica 'http://x'; there are http://a, http://b"):
        made.drain("http://x")


def test_replica_that_was_removed_and_comes_again_is_a_newcomer():
    made = dispatcher("http://a", "http://b")
    submit(made)
    (copy,) = made.take(0.0)
    made.end(copy, Outcome.ANSWERED, 1.0, tokens=1)
    made.remove("http://a")
    again = made.add("http://a", 5.0)
    assert again.index == 2 and again.room(5.0) == 1
    assert made.add("http://a", 6.0) is again


def test_requests_without_replicas_wait_for_one():
    made = Dispatcher(limit=2)
    submit(made, 3)
    assert list(made.take(0.0)) == [] and list(made.tick(1.0)) == []
    made.add("http://a", 2.0)
    assert where(made.take(2.0)) == "aa"


def test_random_events_never_lose_or_double_a_request():
    rng = random.Random(5)
    made = dispatcher(*(f"http://{index}" for index in range(6)), limit=3, max_waiting=10_000)
    waiting_for, delivered, running, now = set(), set(), [], 0.0
    for _ in range(20_000):
        now += rng.expovariate(5)
        match rng.randrange(8):
            case 0 | 1 if len(waiting_for) < 200:
                waiting_for |= {*submit(made, rng.randrange(3), now=now, size=rng.randrange(1000))}
            case 2:
                running += list(made.tick(now))
                for copy in made.given_up:
                    if copy in running:
                        running.remove(copy)
                        made.end(copy, Outcome.CANCELLED, now)
                made.given_up.clear()
            case 3 if waiting_for and rng.random() < 0.1:
                ticket = rng.choice(sorted(waiting_for, key=lambda ticket: ticket.serial))
                made.withdraw(ticket)
                waiting_for.remove(ticket)
                for copy in list(ticket.copies):
                    running.remove(copy)
                    made.end(copy, Outcome.CANCELLED, now)
            case 4:
                replica = rng.choice(list(made.replicas.values()))
                made.probed(replica, healthy=rng.random() < 0.7, now=now)
            case _ if running:
                copy = running.pop(rng.randrange(len(running)))
                outcome = rng.choices(
                    [Outcome.ANSWERED, Outcome.FAILED, Outcome.BUSY, Outcome.ELSEWHERE], [10, 2, 1, 1]
                )[0]
                if made.end(copy, outcome, now, tokens=rng.randrange(1, 99)):
                    assert copy.ticket not in delivered
                    delivered.add(copy.ticket)
                    waiting_for.remove(copy.ticket)
                    for other in [c for c in copy.ticket.copies if c.why is not Why.TRIAL]:
                        running.remove(other)
                        made.end(other, Outcome.CANCELLED, now)
        running += list(made.take(now))
        assert sum(len(replica.copies) for replica in made.replicas.values()) == len(running)
        assert made.num_waiting == sum(ticket.place is not None for ticket in waiting_for)
        assert all(ticket.place is not None or ticket.copies for ticket in waiting_for)
    for _ in range(2000):  # whoever is left is answered
        now += 1.0
        running += [*made.take(now), *made.tick(now)]
        for copy in running:
            if made.end(copy, Outcome.ANSWERED, now, tokens=1):
                waiting_for.remove(copy.ticket)
        running = [copy for copy in running if copy in copy.ticket.copies]
    assert waiting_for == set()
    assert made.num_waiting == 0

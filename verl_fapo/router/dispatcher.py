"""Who is next, who gets a second copy, who is sick: the router's decisions, without sockets and without a clock."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from verl_fapo.errors import RouterError
from verl_fapo.router.life_table import LifeTable
from verl_fapo.router.replica import FAILURES_UNTIL_SICK, Replica, Sickness, Timing

SILENT = 12.0
"""A replica is silent if its peers would have given so many answers meanwhile: by chance one time in e^12."""

OVERDUE = 5.5
"""A request is overdue if its cumulative hazard is above: of its peers one in e^5.5 takes longer."""

MAX_CREDIT_ANSWERS = 1000
"""Unspent credit for second copies is that of so many answers at most."""

MAX_KINDS = 16
LONG = 3.0
"""Requests so many times longer than the mean count as equally long."""

MAX_SET_ASIDE = 64
"""So many waiting requests are looked at beyond one that every free replica has failed."""

TRIAL_LATE = 3.0
"""A trial has failed at this cumulative hazard: of its peers one in twenty takes longer."""

_serial = itertools.count()


class Outcome(Enum):
    """How a try ended."""

    ANSWERED = "answered"
    """With something for the client, be it a refusal (4xx)."""

    FAILED = "failed"
    """Broken connection, 5xx, or nonsense: try again."""

    ELSEWHERE = "elsewhere"
    """An answer that only counts if no other replica has a better one: a redirect, 501."""

    BUSY = "busy"
    """429 or 503: wait."""

    CANCELLED = "cancelled"
    """By us."""


class Why(StrEnum):
    """Why a copy was sent."""

    FIRST = "first"
    RETRY = "retry"
    HEDGE = "hedge"
    """The request is overdue."""

    RESCUE = "rescue"
    """Its replica fell silent or out of reach."""

    TRIAL = "trial"
    """To see whether a sick replica is well again; the request does not depend on it."""


class Queue:
    """Tickets in the order of a key, from which any can be taken out."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Ticket]] = []
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, ticket: Ticket, key: float) -> None:
        """Put a ticket in, which leaves where it waited before; ties go to the ticket that came first."""
        if ticket.place is not None:
            ticket.place.remove(ticket)
        ticket.place, ticket.entry = self, next(_serial)
        heapq.heappush(self._heap, (key, ticket.serial, ticket.entry, ticket))
        self._live += 1

    def first(self) -> tuple[float, Ticket] | None:
        """The lowest key and its ticket."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][3]) if self._heap else None

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out."""
        ticket.place = None
        self._live -= 1
        if len(self._heap) > 1024 and len(self._heap) > 2 * self._live:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[float, int, int, Ticket]) -> bool:
        return entry[3].place is self and entry[3].entry == entry[2]


@dataclass(eq=False, slots=True)
class Ticket:
    """A request as the decisions see it.

    Args:
        size: bytes of its body; longer ones go first.
        kind: requests of a kind take about equally long.
        now: seconds.
    """

    size: int
    kind: str
    now: float
    priority: float = 0.0
    copies: list[Copy] = field(default_factory=list)
    tried: set[Replica] = field(default_factory=set)
    failures: int = 0
    sent: int = 0
    place: Queue | None = None
    """Where it waits, with the entry that is its own: others of it there are out of date."""

    entry: int = 0
    hedged: bool = False
    tokens: float = 0.0
    """Of the answer that it got."""

    done: bool = False
    serial: int = field(default_factory=lambda: next(_serial))

    @property
    def num_tries(self) -> int:
        """Copies under way that can be relied on."""
        return sum(copy.why is not Why.TRIAL and not copy.replica.is_lost for copy in self.copies)


@dataclass(eq=False, slots=True)
class Copy:
    """A try of a request at a replica."""

    ticket: Ticket
    replica: Replica
    why: Why
    started: float
    seen: float
    """When its age was last looked at."""

    urgent: bool = False
    """A second copy is to be sent."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to choose."""

    score: Callable[[Replica], float]
    """The lowest is next; ties go to the replica that came first."""

    holds_back: bool
    """Whether requests wait in the router when all replicas work on all that they can."""


POLICIES = {
    "measured_speed": Policy(lambda replica: (len(replica.copies) + 1) / replica.speed, holds_back=True),
    "least_requests": Policy(lambda replica: len(replica.copies), holds_back=False),
    "round_robin": Policy(lambda replica: replica.sent, holds_back=False),
}


class Dispatcher:
    """The state of all requests and replicas.

    Every method takes the time; what it decides is what :meth:`take` gives. Cost of a decision: logarithmic in the
    number of replicas and of waiting requests; of a :meth:`tick`: linear in replicas and requests under way.

    Args:
        policy: a name in :data:`POLICIES`.
        limit: requests that a replica works on at once; None to learn it.
        hedge_budget: tokens that second copies may cost, as a share of those answered.
        max_waiting: requests beyond this are refused.
    """

    def __init__(
        self,
        *,
        policy: str = "measured_speed",
        limit: int | None = None,
        hedge_budget: float = 0.05,
        max_waiting: int = 20_000,
        timing: Timing | None = None,
        seed: int = 0,
    ) -> None:
        self.timing = timing or Timing()
        self.replicas: dict[str, Replica] = {}
        self.counts: Counter[str] = Counter()
        self.answers = 0
        self.token_credit = 0.0
        """Tokens that second copies may still cost."""

        self.given_up: list[Copy] = []
        """Copies that the caller is to cancel after a :meth:`tick`."""

        self._policy = POLICIES[policy]
        self._limit = limit
        self._hedge_budget = hedge_budget
        self._hedges_under_way = 0
        self._max_waiting = max_waiting
        self._random = random.Random(seed)
        self._index = itertools.count()
        self._arrivals = itertools.count(1)
        self._waiting, self._later = Queue(), Queue()
        self._free: list[tuple[float, int, int, Replica]] = []
        self._urgent: deque[tuple[Copy, Why]] = deque()
        self._tables: dict[str, LifeTable] = {}
        self._best_speed = 1.0
        self._quick_room = 1.0
        self._tokens = self._seconds = self._expected = 0.0
        self._mean_size = 0.0

    # --- replicas -----------------------------------------------------------------------------------------------------

    def add(self, url: str, now: float) -> Replica:
        """Send requests to a base URL, few at first unless it is among the first of all."""
        known = self.replicas.get(url)
        if known is not None:
            if known.draining:
                known.draining, known.ramp_from = False, now
                self._offer(known, now)
            return known
        replica = Replica(url, next(self._index), self.timing, limit_is_given=self._limit is not None)
        replica.limit = self._limit or replica.limit
        replica.sign_of_life(self._of_all(now))
        if self.answers:
            replica.ramp_from = now
        self.replicas[url] = replica
        self._offer(replica, now)
        return replica

    def drain(self, url: str) -> None:
        """Send nothing more to a replica, which may finish what it has.

        Raises:
            RouterError: there is no such replica.
        """
        self._get(url).draining = True

    def remove(self, url: str) -> Replica:
        """Forget a replica; the caller ends what it works on with :attr:`Outcome.FAILED`.

        Raises:
            RouterError: there is no such replica.
        """
        replica = self._get(url)
        replica.removed = True
        del self.replicas[url]
        return replica

    def probed(self, replica: Replica, *, healthy: bool, now: float) -> None:
        """Its ``/health`` was asked."""
        if not healthy:
            replica.failed_probes += 1
            if replica.failed_probes >= FAILURES_UNTIL_SICK and not replica.sickness:
                self._fall_sick(replica, Sickness.UNREACHABLE, now)
            return
        replica.failed_probes = 0
        if replica.sickness == Sickness.UNREACHABLE or (
            replica.sickness == Sickness.FAILING and now >= replica.retry_at
        ):
            replica.recover(now, self._of_all(now))
            self._offer(replica, now)

    def _get(self, url: str) -> Replica:
        if url not in self.replicas:
            raise RouterError(f"no replica {url!r}; there are {', '.join(self.replicas) or 'none'}")
        return self.replicas[url]

    def loaded(self, replica: Replica, load: tuple[int, int] | None, now: float) -> None:
        """Its engine said how many requests it works on, and how many wait in it; None if it never will."""
        if load is None:
            replica.limit = math.inf
        else:
            replica.learn_limit(*load)
        self._offer(replica, now)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _of_all(self, now: float) -> tuple[float, float, float]:
        return self.answers, self._expected, now

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._later)

    @property
    def mean_seconds(self) -> float:
        """Mean time of an answer."""
        return self._seconds / self.answers if self.answers else 0.0

    def submit(self, ticket: Ticket) -> bool:
        """Take a request; False if too many wait already."""
        if self.num_waiting >= self._max_waiting:
            return False
        self._mean_size += (ticket.size - self._mean_size) / min(1000, next(self._arrivals))
        length = ticket.size / (LONG * self._mean_size or 1)
        ticket.priority = ticket.now - self.timing.patience * min(1.0, length)
        self._waiting.push(ticket, ticket.priority)
        return True

    def withdraw(self, ticket: Ticket) -> None:
        """The client is gone or its time is up; the caller ends its copies with :attr:`Outcome.CANCELLED`."""
        ticket.done = True
        if ticket.place is not None:
            ticket.place.remove(ticket)

    def take(self, now: float) -> Iterator[Copy]:
        """The copies to be sent now."""
        while (first := self._later.first()) and first[0] <= now:
            self._waiting.push(first[1], first[1].priority)
        yield from self._take_urgent(now)
        yield from self._take_waiting(now)

    def end(
        self, copy: Copy, outcome: Outcome, now: float, *, tokens: float = 0.0, retry_after: float | None = None
    ) -> bool:
        """A try ended; True if its answer is for the client, whose other copies but trials the caller then cancels.

        Args:
            tokens: length of the answer.
            retry_after: seconds that a busy replica asked for.
        """
        ticket, replica, age = copy.ticket, copy.replica, now - copy.started
        self._look_at(copy, now)
        del replica.copies[copy]
        ticket.copies.remove(copy)
        deliver = False
        self._hedges_under_way -= copy.why is Why.HEDGE
        if copy.why is Why.TRIAL:
            replica.on_trial = False
        if outcome is Outcome.ANSWERED:
            deliver = self._answered(copy, age, tokens, now)
        elif outcome is Outcome.CANCELLED:
            self._cancelled(copy, age)
        elif outcome is Outcome.BUSY:
            replica.pause(retry_after, now)
            replica.sign_of_life(self._of_all(now))
            self.counts["busy"] += 1
        elif outcome is Outcome.ELSEWHERE:
            replica.sign_of_life(self._of_all(now))
            ticket.tried.add(replica)
            deliver = not ticket.done and not ticket.num_tries and not self._untried(ticket)
        else:
            self._failed(copy, now)
        if deliver:
            self.withdraw(ticket)
        elif not ticket.done and not ticket.num_tries and ticket.place is None:
            self._try_again(ticket, outcome, now)
        self._offer(replica, now)
        return deliver

    def _answered(self, copy: Copy, age: float, tokens: float, now: float) -> bool:
        ticket, replica = copy.ticket, copy.replica
        table = self._table(ticket.kind)
        late, was_expected = table.hazard(age) >= TRIAL_LATE, table.known and tokens > 0
        if tokens:
            table.add(age, ended=True)
            self.answers += 1
            self._tokens += tokens
            self._seconds += age
            cap = self._hedge_budget * MAX_CREDIT_ANSWERS * self._tokens / self.answers
            self.token_credit = min(cap, self.token_credit + self._hedge_budget * tokens)
        if copy.why is Why.TRIAL and late:
            replica.cool_down(now)
        elif copy.why is Why.TRIAL:
            replica.recover(now, self._of_all(now))
        elif now > replica.ramp_from + replica.timing.ramp:
            replica.relapses = 0
        replica.answer(was_expected=was_expected, tokens=tokens, seconds=age, of_all=self._of_all(now))
        if ticket.done:
            return False
        ticket.tokens = tokens
        if copy.why in (Why.HEDGE, Why.RESCUE):
            self.counts["second copies that won"] += 1
        return True

    def _cancelled(self, copy: Copy, age: float) -> None:
        self._table(copy.ticket.kind).add(age, ended=False)
        if copy.ticket.hedged and copy.ticket.done:
            replica = copy.replica
            speed = replica.tokens / replica.seconds if replica.seconds else self._tokens / (self._seconds or 1)
            self.token_credit -= min(copy.ticket.tokens, age * speed)

    def _failed(self, copy: Copy, now: float) -> None:
        ticket, replica = copy.ticket, copy.replica
        self.counts["failures"] += 1
        ticket.failures += 1
        if copy.why is Why.TRIAL:
            replica.cool_down(now)
        # A request that failed elsewhere before may be to blame itself.
        elif not ticket.tried:
            replica.failures += 1
            if replica.failures >= FAILURES_UNTIL_SICK and not replica.sickness:
                self._fall_sick(replica, Sickness.FAILING, now)
        ticket.tried.add(replica)

    def _fall_sick(self, replica: Replica, why: Sickness, now: float) -> None:
        replica.fall_sick(why, now)
        self.counts[f"fell {why}"] += 1
        if replica.is_lost:
            self._rescue(replica)

    def _try_again(self, ticket: Ticket, outcome: Outcome, now: float) -> None:
        ticket.priority = ticket.now - 2 * self.timing.patience  # it waited its turn once
        if outcome is Outcome.FAILED:
            pause = min(self.timing.max_retry, self.timing.first_retry * 2 ** min(ticket.failures - 1, 30))
            self._later.push(ticket, now + self._random.uniform(0.5, 1) * pause)
        else:
            self._waiting.push(ticket, ticket.priority)

    def _untried(self, ticket: Ticket) -> bool:
        working = {copy.replica for copy in ticket.copies}
        return any(
            replica.serving and replica not in ticket.tried and replica not in working
            for replica in self.replicas.values()
        )

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _offer(self, replica: Replica, now: float) -> None:
        """Put a replica, or what changed of it, among the free ones."""
        replica.version += 1
        if replica.room(now) > 0 or (not self._policy.holds_back and replica.serving and now >= replica.paused_until):
            heapq.heappush(self._free, (self._policy.score(replica), replica.index, replica.version, replica))

    def _pick(self, ticket: Ticket, now: float, *, quick: bool) -> Replica | None:
        """The best free replica that is not known to fail this request; a ``quick`` one on demand."""
        if ticket.tried and not self._untried(ticket):
            ticket.tried.clear()  # no other is left, or not any more
        aside, chosen = [], None
        while self._free:
            entry = heapq.heappop(self._free)
            replica = entry[3]
            if entry[2] != replica.version or not replica.serving:
                continue
            has_it = replica in ticket.tried or any(copy.replica is replica for copy in ticket.copies)
            if not has_it and self._is_worth_it(replica, quick=quick):
                chosen = replica
                break
            aside.append(entry)
        for entry in aside:
            heapq.heappush(self._free, entry)
        return chosen

    def _is_worth_it(self, replica: Replica, *, quick: bool) -> bool:
        # Even a long request is to end on a slow replica before it would on a quick one, for which it must wait until
        # those before it have gone through.
        if not quick and not self._policy.holds_back:
            return True
        slowness = self._best_speed / replica.speed
        return slowness <= 2 or (not quick and slowness <= 1 + len(self._waiting) / (LONG * self._quick_room))

    def _send(self, ticket: Ticket, replica: Replica, why: Why, now: float) -> Copy:
        copy = Copy(ticket, replica, why, now, now)
        if not replica.copies:
            replica.sign_of_life(self._of_all(now))  # silence begins with something to answer
        ticket.copies.append(copy)
        ticket.sent += 1
        replica.copies[copy] = None
        replica.sent += 1
        self.counts[why] += 1
        self._offer(replica, now)
        return copy

    def _take_urgent(self, now: float) -> Iterator[Copy]:
        for _ in range(len(self._urgent)):
            if not self._free:
                return
            copy, why = self._urgent.popleft()
            ticket, rival = copy.ticket, copy.replica
            copy.urgent = False
            if ticket.done or copy not in ticket.copies or ticket.num_tries > (why is Why.HEDGE):
                continue
            if ticket.place is not None or (why is Why.HEDGE and not self._can_afford_hedge()):
                continue
            replica = self._pick(ticket, now, quick=True)
            if replica is None:
                self._urge(copy, why)
                continue
            ticket.tried.add(rival)
            ticket.hedged |= why is Why.HEDGE
            self._hedges_under_way += why is Why.HEDGE
            yield self._send(ticket, replica, why, now)

    def _rescue(self, lost: Replica) -> None:
        for copy in lost.copies:
            if not copy.ticket.done and not copy.ticket.num_tries:
                self._urge(copy, Why.RESCUE)

    def _urge(self, copy: Copy, why: Why) -> None:
        if not copy.urgent:
            copy.urgent = True
            self._urgent.append((copy, why))

    def _can_afford_hedge(self) -> bool:
        mean_tokens = self._tokens / self.answers if self.answers else math.inf
        return self.token_credit > (self._hedges_under_way + 1) * mean_tokens

    def _take_waiting(self, now: float) -> Iterator[Copy]:
        aside = []
        while self._free and len(aside) < MAX_SET_ASIDE and (first := self._waiting.first()):
            ticket = first[1]
            self._waiting.remove(ticket)
            replica = self._pick(ticket, now, quick=False)
            if replica is not None:
                yield self._send(ticket, replica, Why.RETRY if ticket.sent else Why.FIRST, now)
                continue
            aside.append(ticket)
            if not ticket.tried:
                break  # nobody is free for anybody
        for ticket in aside:
            self._waiting.push(ticket, ticket.priority)

    # --- looking at what is under way ---------------------------------------------------------------------------------

    def tick(self, now: float) -> Iterator[Copy]:
        """Look at all that is under way: who is silent, what is overdue, who is tried again. Gives what to send."""
        self._refresh_tables(now)
        self._compare_speeds(now)
        for replica in self.replicas.values():
            for copy in replica.copies:
                self._look_at(copy, now)
            if replica.serving and replica.unlikely_silence(self._of_all(now)) > SILENT:
                self._fall_sick(replica, Sickness.SILENT, now)
            elif replica.is_lost:
                self._rescue(replica)
            elif self._hedge_budget:
                self._hedge_overdue(replica, now)
        yield from self._take_trials(now)
        self._free.clear()
        for replica in self.replicas.values():
            self._offer(replica, now)
        yield from self.take(now)

    def _refresh_tables(self, now: float) -> None:
        ages: dict[str, list[float]] = {kind: [] for kind in self._tables}
        for replica in self.replicas.values():
            for copy in replica.copies:
                # Of a replica that gave no sign of life since, it is not known whether it works on it at all.
                if copy.started < replica.at_sign[2]:
                    ages.setdefault(self._kind(copy.ticket.kind), []).append(now - copy.started)
        for kind, table in self._tables.items():
            table.refresh(ages[kind])

    def _compare_speeds(self, now: float) -> None:
        serving = [replica for replica in self.replicas.values() if replica.serving]
        self._best_speed = max((replica.speed for replica in serving), default=1.0)
        quick = (replica.capacity for replica in serving if 2 * replica.speed >= self._best_speed)
        self._quick_room = sum(quick) or 1

    def _hedge_overdue(self, replica: Replica, now: float) -> None:
        for copy in replica.copies:
            ticket = copy.ticket
            if ticket.done or ticket.num_tries > 1:
                continue
            if self._table(ticket.kind).hazard(now - copy.started) >= OVERDUE:
                self._urge(copy, Why.HEDGE)

    def _look_at(self, copy: Copy, now: float) -> None:
        table = self._table(copy.ticket.kind)
        # No request, however late, is missed more than so much.
        then, by_now = (min(OVERDUE, table.hazard(when - copy.started)) for when in (copy.seen, now))
        expected = by_now - then
        copy.replica.expect(expected)
        self._expected += expected
        copy.seen = now

    def _take_trials(self, now: float) -> Iterator[Copy]:
        some_serve = any(replica.serving for replica in self.replicas.values())
        for replica in self.replicas.values():
            if replica.draining or now < max(replica.retry_at, replica.paused_until):
                continue
            if replica.sickness and not some_serve:
                replica.recover(now, self._of_all(now))  # there is no better one
            elif replica.sickness is Sickness.FAILING:
                # What answers its probes, or has none, is tried with requests that can go elsewhere.
                if not replica.failed_probes:
                    replica.recover(now, self._of_all(now))
            elif replica.on_trial:
                self._give_up_late_trial(replica, now)
            elif replica.sickness is Sickness.SILENT or self._is_slow_and_idle(replica):
                ticket = self._ticket_for_trial(replica)
                if ticket is not None:
                    replica.on_trial = True
                    yield self._send(ticket, replica, Why.TRIAL, now)

    def _is_slow_and_idle(self, replica: Replica) -> bool:
        return replica.serving and not replica.copies and self._best_speed > 2 * replica.speed

    def _give_up_late_trial(self, replica: Replica, now: float) -> None:
        for copy in replica.copies:
            if copy.why is Why.TRIAL and self._table(copy.ticket.kind).hazard(now - copy.started) >= TRIAL_LATE:
                replica.on_trial = False
                replica.cool_down(now)
                self.given_up.append(copy)

    def _ticket_for_trial(self, sick: Replica) -> Ticket | None:
        """A young request that another replica has, so that it does not depend on the trial."""
        for replica in self.replicas.values():
            if replica is sick or not replica.serving or not replica.copies:
                continue
            ticket = next(reversed(replica.copies)).ticket
            if not ticket.done and len(ticket.copies) == 1:
                return ticket
        return None

    def _kind(self, kind: str) -> str:
        return kind if kind in self._tables or len(self._tables) < MAX_KINDS else next(iter(self._tables))

    def _table(self, kind: str) -> LifeTable:
        kind = self._kind(kind)
        if kind not in self._tables:
            self._tables[kind] = LifeTable()
        return self._tables[kind]

"""What the router knows of one replica: load, speed, health. No input or output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """The router's times, in seconds."""

    tick: float = 0.5
    """Between two looks at what is under way."""

    probe: float = 5.0
    """Between two probes of a replica, and the longest wait for its reply."""

    silence: float = 2.0
    """No replica is silent before."""

    ramp: float = 10.0
    """Until a replica that is new or was sick is given all it can hold."""

    first_retry: float = 0.05
    """Pause before a failed request is tried again; it doubles with each failure ..."""

    max_retry: float = 5.0
    """... up to this."""

    first_pause: float = 0.5
    """Pause of a replica that is too busy and does not say for how long; it doubles ..."""

    max_pause: float = 8.0
    """... up to this."""

    max_retry_after: float = 60.0
    """No ``Retry-After`` is taken for more."""

    first_cool_down: float = 1.0
    """Until a sick replica is tried again; it doubles each time that it is still sick ..."""

    max_cool_down: float = 30.0
    """... up to this."""

    patience: float = 60.0
    """How long the longest of all requests may go before a short one that came earlier."""

    def scaled(self, factor: float) -> Timing:
        """All times multiplied, for simulations whose clock is not ours."""
        return Timing(**{item.name: getattr(self, item.name) * factor for item in fields(self)})


class Sickness(StrEnum):
    """Why a replica gets no requests."""

    NONE = ""
    FAILING = "failing"
    """Several tries in a row failed."""

    UNREACHABLE = "unreachable"
    """Its ``/health`` fails."""

    SILENT = "silent"
    """It answers nothing although its peers answer such requests."""


FAILURES_UNTIL_SICK = 3
FIRST_LIMIT = 64
"""Requests that a replica is given at once until its limit is known."""

PRIOR = 4.0
"""Answers that a replica of which nothing is known is taken to have given at its peers' speed."""

MEMORY = 200.0
"""Expected answers after which the older ones lose half their weight."""


@dataclass(eq=False, slots=True)
class Replica:
    """One server.

    Attributes:
        url: base URL.
        index: its place in the order of arrival; breaks ties.
        limit: requests that it works on at once; infinity if that can not be known.
    """

    url: str
    index: int
    timing: Timing
    limit: float = FIRST_LIMIT
    limit_is_given: bool = False
    limit_is_learned: bool = False
    copies: dict = field(default_factory=dict)
    """Requests under way there, the oldest first."""

    draining: bool = False
    removed: bool = False
    sickness: Sickness = Sickness.NONE
    retry_at: float = 0.0
    """When a sick replica is tried again."""

    on_trial: bool = False
    relapses: int = 0
    ramp_from: float = -math.inf
    paused_until: float = -math.inf
    failures: int = 0
    pauses: int = 0
    failed_probes: int = 0
    sent: int = 0
    answered: int = 0
    expected: float = 0.0
    """Answers that its peers would have given to what it was sent."""

    given: float = 0.0
    """Answers that it gave; with ``expected`` over the last few hundred."""

    silence: float = 0.0
    """Expected answers since its last sign of life."""

    at_sign: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Answers of all replicas, those that were expected of them, and the time, at its last sign of life."""

    tokens: float = 0.0
    """Written lately; in ``seconds`` of requests, so that their ratio is the speed of one request."""

    seconds: float = 0.0
    running_when_full: int = 0
    """What the engine last said to run while others waited in it; 0 if none did."""

    version: int = 0
    """Counts what was said of it in the queue of the free; the last is true."""

    @property
    def speed(self) -> float:
        """Speed relative to the average of all replicas."""
        return (self.given + PRIOR) / (self.expected + PRIOR)

    @property
    def capacity(self) -> float:
        """``limit`` as a number to reckon with."""
        return self.limit if self.limit < math.inf else FIRST_LIMIT

    @property
    def serving(self) -> bool:
        return not (self.sickness or self.draining or self.removed)

    @property
    def is_lost(self) -> bool:
        """Whether what it works on is not to be waited for."""
        return self.removed or self.sickness in (Sickness.SILENT, Sickness.UNREACHABLE)

    def room(self, now: float) -> float:
        """How many more requests it may be given."""
        if not self.serving or now < self.paused_until:
            return 0
        limit, share = self.limit, (now - self.ramp_from) / self.timing.ramp
        if share < 1:
            limit = max(1, int(self.capacity * share))
        return limit - len(self.copies)

    def expect(self, answers: float) -> None:
        """Its peers would have given so many answers more meanwhile."""
        self.expected += answers
        self.silence += answers
        if self.expected > MEMORY:
            self.expected /= 2
            self.given /= 2

    def answer(self, *, was_expected: bool, tokens: float, seconds: float, of_all: tuple[float, float, float]) -> None:
        """It answered a request, of a kind of which it is known whether it ``was_expected``."""
        self.answered += 1
        self.given += was_expected
        self.tokens = 0.95 * self.tokens + tokens
        self.seconds = 0.95 * self.seconds + seconds
        self.failures = self.pauses = self.failed_probes = 0
        self.sign_of_life(of_all)

    def sign_of_life(self, of_all: tuple[float, float, float]) -> None:
        """It lives; ``of_all`` replicas there were so many answers, and so many expected, until now."""
        self.silence = 0.0
        self.at_sign = of_all

    def unlikely_silence(self, of_all: tuple[float, float, float]) -> float:
        """Answers that it owes by what its peers answered meanwhile, who may all be slower than they used to be."""
        answers, expected, seconds = (now - then for now, then in zip(of_all, self.at_sign, strict=True))
        of_peers = expected - self.silence
        if of_peers <= 0 or seconds < self.timing.silence:
            return 0.0
        return self.silence * min(1.0, answers / of_peers)

    def pause(self, seconds: float | None, now: float) -> None:
        """It is too busy (429 or 503), for ``seconds`` if it says so."""
        least = min(self.timing.max_pause, self.timing.first_pause * 2 ** min(self.pauses, 30))
        self.pauses += 1
        pause = max(least, min(seconds or 0.0, self.timing.max_retry_after))
        self.paused_until = max(self.paused_until, now + pause)
        # What it holds now is what it can hold.
        share = min(1.0, len(self.copies) / self.capacity)
        self.ramp_from = max(self.ramp_from, self.paused_until - share * self.timing.ramp)

    def fall_sick(self, why: Sickness, now: float) -> None:
        """Send it nothing until it was tried again."""
        self.sickness = why
        self.cool_down(now)

    def cool_down(self, now: float) -> None:
        """Wait before it is tried again, longer each time."""
        seconds = self.timing.first_cool_down * 2 ** min(self.relapses, 30)
        self.retry_at = now + min(self.timing.max_cool_down, seconds)
        self.relapses += 1

    def recover(self, now: float, of_all: tuple[float, float, float]) -> None:
        """Send it more and more again; the next failure makes it sick again."""
        self.sickness, self.on_trial = Sickness.NONE, False
        self.failures = FAILURES_UNTIL_SICK - 1
        self.failed_probes = 0
        self.given = self.expected = 0.0
        self.ramp_from = now
        self.sign_of_life(of_all)

    def learn_limit(self, running: int, waiting: int) -> None:
        """Learn ``limit`` from what the engine says that it works on, and holds in its own queue."""
        if self.limit_is_given:
            return
        before, self.running_when_full = self.running_when_full, running if waiting > 0 else 0
        if self.running_when_full and before:  # twice, since a burst that just arrived waits a moment anywhere
            self.limit, self.limit_is_learned = max(before, running), True
        elif waiting == 0 and len(self.copies) >= self.limit:
            # It may hold more: of short requests, say, more than of long ones.
            self.limit += 1 if self.limit_is_learned else self.limit // 2

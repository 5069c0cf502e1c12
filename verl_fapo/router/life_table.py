"""How long requests take, learned also from those that have not ended yet."""

from __future__ import annotations

import math
from collections.abc import Iterable

FIRST_SECONDS = 1e-3
PER_DOUBLING = 8
NUM_BUCKETS = 24 * PER_DOUBLING
"""From a millisecond to four hours and a half."""

WINDOW = 1024
"""After so many answers the older half loses half its weight."""

MIN_ENDED = 16
"""Fewer answers say nothing of how long the next takes."""


class LifeTable:
    """Cumulative hazard of a request's end by its age: an actuarial life table over buckets of age.

    The chance that a request like the recorded ones is older than ``age`` is ``exp(-hazard(age))``. Requests that are
    still under way, or were given up, count as at risk up to their age and no further (censored), so that a burst of
    which only the short ones have ended does not make the rest look late. (Cutler and Ederer, "Maximum utilization of
    the life table method in analyzing survival", 1958.)
    """

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_BUCKETS
        self._censored = [0.0] * NUM_BUCKETS
        self._total = 0.0
        self._hazard: list[float] | None = None

    def add(self, age: float, *, ended: bool) -> None:
        """Record a request that was answered (``ended``) or given up at ``age`` seconds."""
        counts = self._ended if ended else self._censored
        counts[_bucket(age)] += 1
        self._total += ended
        if self._total > WINDOW:
            self._ended = [count / 2 for count in self._ended]
            self._censored = [count / 2 for count in self._censored]
            self._total /= 2

    def refresh(self, ages: Iterable[float]) -> None:
        """Take those under way, with their ages in seconds, into account from now on."""
        if self._total < MIN_ENDED:
            self._hazard = None
            return
        censored = self._censored.copy()
        for age in ages:
            censored[_bucket(age)] += 1
        longest = max(bucket for bucket, ended in enumerate(self._ended) if ended)
        at_risk = sum(self._ended) + sum(censored)
        cumulative, hazard = 0.0, []
        for bucket, (ended, gone) in enumerate(zip(self._ended, censored, strict=True)):
            exposed = at_risk - gone / 2
            if bucket > longest + PER_DOUBLING:
                cumulative += 1.0  # at twice the age of any that ended, age alone tells
            elif bucket > longest:
                cumulative += 0.5 / (max(0.0, exposed) + 1)
            elif ended:
                # The half keeps it finite where all that were left ended.
                cumulative -= math.log1p(-ended / (max(ended, exposed) + 0.5))
            hazard.append(cumulative)
            at_risk -= ended + gone
        self._hazard = hazard

    @property
    def known(self) -> bool:
        """Whether there is enough to tell."""
        return self._hazard is not None

    def hazard(self, age: float) -> float:
        """Cumulative hazard at ``age`` seconds; 0 while too little is known."""
        return self._hazard[_bucket(age)] if self._hazard is not None else 0.0


def _bucket(age: float) -> int:
    if age <= FIRST_SECONDS:
        return 0
    return min(NUM_BUCKETS - 1, int(PER_DOUBLING * math.log2(age / FIRST_SECONDS)))

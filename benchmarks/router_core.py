"""The router's decisions alone, at sizes that no machine here has: python benchmarks/router_core.py

Plays requests through the dispatcher in virtual time, first all waiting at once, then as many as there are places, and
measures real seconds. A decision is a request sent or ended.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
import time
from collections.abc import Sequence

from verl_fapo.router.dispatcher import Dispatcher, Outcome, Ticket, Why


def play(num_replicas: int, num_requests: int, *, limit: int, seed: int) -> tuple[float, float]:
    """Microseconds a decision, and milliseconds of the longest tick, of one step of the judge's."""
    rng = random.Random(seed)
    made = Dispatcher(limit=limit, max_waiting=num_requests, seed=seed)
    for index in range(num_replicas):
        made.add(f"http://{index}", 0.0)
    serial, ends, ticks = itertools.count(), [], []
    decisions, deciding = 0, 0.0

    def start(copies, now: float) -> int:
        for copy in copies:
            heapq.heappush(ends, (now + rng.lognormvariate(3.3, 0.5), next(serial), copy))
        return len(copies)

    began = time.perf_counter()
    for _ in range(num_requests):
        made.submit(Ticket(size=round(rng.lognormvariate(8.5, 0.5)), kind="POST /v1/chat/completions", now=0.0))
    sent = list(made.take(0.0))
    deciding += time.perf_counter() - began
    decisions += start(sent, 0.0)
    answered, next_tick = 0, 0.5
    while answered < num_requests:
        now, _, copy = heapq.heappop(ends)
        if now > next_tick:
            began = time.perf_counter()
            sent = list(made.tick(now))
            ticks.append(time.perf_counter() - began)
            start(sent, now)
            next_tick = now + max(0.5, 19 * ticks[-1])
        if copy not in copy.ticket.copies:
            continue
        began = time.perf_counter()
        if made.end(copy, Outcome.ANSWERED, now, tokens=3000):
            answered += 1
            for other in [other for other in copy.ticket.copies if other.why is not Why.TRIAL]:
                made.end(other, Outcome.CANCELLED, now)
        sent = list(made.take(now))
        deciding += time.perf_counter() - began
        decisions += 1 + start(sent, now)
    return 1e6 * deciding / decisions, 1e3 * max(ticks, default=0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=32, help="requests that a replica works on at once")
    options = parser.parse_args(arguments)
    sizes = [(4, 1_000), (10, 10_000), (100, 10_000), (100, 100_000), (1_000, 100_000)]
    print("| replicas | waiting requests | us a decision | decisions a second | longest tick, ms |")
    print("| --- | --- | --- | --- | --- |")
    for replicas, requests in sizes:
        runs = [play(replicas, requests, limit=options.limit, seed=seed) for seed in range(options.repeats)]
        decision, tick = (statistics.median(run[index] for run in runs) for index in (0, 1))
        print(f"| {replicas:,} | {requests:,} | {decision:.1f} | {1e6 / decision:,.0f} | {tick:.1f} |", flush=True)


if __name__ == "__main__":
    main()

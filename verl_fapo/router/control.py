"""What the router answers itself: its health, its replicas, its metrics."""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from verl_fapo.errors import RouterError
from verl_fapo.router.answer import Answer, error
from verl_fapo.router.replica import Replica, Sickness
from verl_fapo.settings import is_base_url

if TYPE_CHECKING:
    from verl_fapo.router.proxy import Router

SECONDS = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 45, 60, 90, 120, 180, 300, 600, 1800)
MAX_BODY_BYTES = 2**16
STATES = ("serving", "draining", *(str(sickness) for sickness in Sickness if sickness))

logger = logging.getLogger(__name__)


class Control:
    """The pages of the router itself.

    ``GET /health``, ``/ready``, ``/metrics``, ``/replicas``; ``POST /replicas`` with ``{"url": ...}`` and
    ``POST /replicas/drain`` likewise; ``DELETE /replicas?url=...``. With a key all but ``/health`` want it; without
    one, replicas are changed from this machine only.
    """

    def __init__(self, router: Router, api_key: str) -> None:
        self.api_key = api_key
        self._router = router
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._requests = Counter(
            "fapo_router_requests", "Requests answered, by status.", ["status"], registry=self._registry
        )
        self._latency = Histogram(
            "fapo_router_request_seconds",
            "From the whole request to the beginning of its answer.",
            buckets=SECONDS,
            registry=self._registry,
        )
        self._by_status = {}
        self._gone = Counter("fapo_router_clients_gone", "Clients that hung up first.", registry=self._registry)
        self._late = Counter("fapo_router_timeouts", "Requests whose time was up.", registry=self._registry)
        self._pages = {
            ("GET", "/health"): self._health,
            ("GET", "/ready"): self._ready,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/replicas"): self._list,
            ("POST", "/replicas"): self._add,
            ("POST", "/replicas/drain"): self._drain,
            ("DELETE", "/replicas"): self._remove,
        }

    def refuse(self, request: web.BaseRequest, path: str) -> Answer | None:
        """Why a request is not let in."""
        page = request.method, path.partition("?")[0]
        if self.api_key and page != ("GET", "/health"):
            shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(shown, f"Bearer {self.api_key}".encode()):
                return error(401, "expected the header Authorization: Bearer KEY with the router's key")
        elif request.method != "GET" and page in self._pages and not _is_local(request.remote):
            return error(403, "without a key the replicas are changed from the router's own machine only")
        return None

    async def answer(self, request: web.BaseRequest, path: str) -> web.Response | None:
        """The page that a request asks for; None if it is for the replicas."""
        page = self._pages.get((request.method, path.partition("?")[0]))
        if page is None:
            return None
        try:
            return await page(request)
        except RouterError as exc:
            return web.json_response({"error": {"message": str(exc)}}, status=400)

    def count(self, status: int, seconds: float) -> None:
        counter = self._by_status.get(status)
        if counter is None:
            counter = self._by_status[status] = self._requests.labels(str(status))
        counter.inc()
        self._latency.observe(seconds)

    def client_gone(self) -> None:
        self._gone.inc()

    def timed_out(self) -> None:
        self._late.inc()

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        serving = sum(replica.serving for replica in self._router.dispatcher.replicas.values())
        return web.json_response({"serving": serving}, status=200 if serving else 503)

    async def _list(self, request: web.BaseRequest) -> web.Response:
        return web.json_response([describe(replica) for replica in self._router.dispatcher.replicas.values()])

    async def _add(self, request: web.BaseRequest) -> web.Response:
        url = await _url_of(request)
        self._router.add(url)
        logger.warning("replica %s added", url)
        return await self._list(request)

    async def _drain(self, request: web.BaseRequest) -> web.Response:
        url = await _url_of(request)
        self._router.dispatcher.drain(url)
        logger.warning("replica %s drains", url)
        return await self._list(request)

    async def _remove(self, request: web.BaseRequest) -> web.Response:
        url = request.query.get("url", "").rstrip("/")
        self._router.remove(url)
        logger.warning("replica %s removed", url)
        return await self._list(request)

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def collect(self) -> Iterator[Metric]:
        """What is read off the dispatcher when somebody asks."""
        dispatcher = self._router.dispatcher
        counts = dispatcher.counts
        tries = CounterMetricFamily("fapo_router_tries", "Copies sent to replicas, by reason.", labels=["why"])
        for why in ("first", "retry", "hedge", "rescue", "trial"):
            tries.add_metric([why], counts[why])
        yield tries
        for name, key, about in (
            ("second_copies_won", "second copies that won", "Hedges and rescues whose answer came first."),
            ("failed_tries", "failures", "Tries that failed."),
            ("busy_replies", "busy", "429 and 503 of replicas."),
        ):
            yield CounterMetricFamily(f"fapo_router_{name}", about, value=counts[key])
        yield GaugeMetricFamily("fapo_router_waiting", "Requests not yet sent.", value=dispatcher.num_waiting)
        yield GaugeMetricFamily("fapo_router_open", "Requests not yet answered.", value=len(self._router.exchanges))
        yield GaugeMetricFamily(
            "fapo_router_hedge_credit_tokens", "Tokens that hedges may cost.", value=dispatcher.token_credit
        )
        yield from self._collect_replicas()

    def _collect_replicas(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily("fapo_router_replica_in_flight", "Requests it works on.", labels=["replica"])
        speed = GaugeMetricFamily("fapo_router_replica_speed", "1 is the average.", labels=["replica"])
        answered = CounterMetricFamily("fapo_router_replica_answers", "Requests it answered.", labels=["replica"])
        state = GaugeMetricFamily("fapo_router_replica_state", "1 for its state.", labels=["replica", "state"])
        for url, replica in self._router.dispatcher.replicas.items():
            in_flight.add_metric([url], len(replica.copies))
            speed.add_metric([url], replica.speed)
            answered.add_metric([url], replica.answered)
            for name in STATES:
                state.add_metric([url, name], name == state_of(replica))
        yield from (in_flight, speed, answered, state)


def state_of(replica: Replica) -> str:
    """One of :data:`STATES`."""
    return str(replica.sickness) or ("draining" if replica.draining else "serving")


def describe(replica: Replica) -> dict[str, object]:
    """A replica for people."""
    return {
        "url": replica.url,
        "state": state_of(replica),
        "in_flight": len(replica.copies),
        "limit": replica.limit if replica.limit < float("inf") else None,
        "speed": round(replica.speed, 3),
        "answered": replica.answered,
    }


async def _url_of(request: web.BaseRequest) -> str:
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise RouterError(f"the body is above {MAX_BODY_BYTES} bytes")
    try:
        url = json.loads(await request.read())["url"]
    except (ValueError, LookupError, TypeError, RecursionError):
        url = None
    if not isinstance(url, str) or not is_base_url(url):
        raise RouterError('expected {"url": "http://host:port"}')
    return url.rstrip("/")


def _is_local(address: str | None) -> bool:
    """True of a peer on this machine."""
    try:
        return ipaddress.ip_address((address or "").partition("%")[0]).is_loopback
    except ValueError:
        return False

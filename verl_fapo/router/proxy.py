"""The router's sockets: takes requests, sends the copies that the dispatcher decides on, passes the first answer on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import math
import re
import time
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from verl_fapo.router.answer import Answer, error
from verl_fapo.router.control import Control
from verl_fapo.router.dispatcher import Copy, Dispatcher, Outcome, Ticket, Why
from verl_fapo.router.headers import IDEMPOTENCY_HEADER, TIMEOUT_HEADER, VIA, retry_after_seconds
from verl_fapo.router.replica import Replica, Timing
from verl_fapo.settings import RouterSettings

MAX_HELD_BYTES = 2**24
"""An answer is held back until it is whole, so that it can still come from elsewhere; of more bytes it is passed on
as it comes."""

MAX_CHECKED_BYTES = 2**20
MAX_PAGE_BYTES = 2**22
"""Of a replica's ``/metrics``."""

MAX_TIMEOUT_SECONDS = 7 * 86400.0
BODY_SECONDS = 60.0
WRITE_SECONDS = 60.0
"""For a client to take an answer that is there already."""

KEEP_ALIVE_SECONDS = 75.0
"""Also the longest time for the headers of a request."""

# Below the five seconds after which uvicorn, and so vLLM and SGLang, closes idle connections.
UPSTREAM_KEEP_ALIVE_SECONDS = 4.0

TOKEN_BYTES = 4
"""Of an answer that does not say how many tokens it has."""

HOP_BY_HOP = (
    *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection"),
    *("TE", "Trailer", "Transfer-Encoding", "Upgrade"),
)

# How many requests an engine works on, and how many wait in it; a line for each of its data-parallel ranks.
LOADS = (
    re.compile(rb"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{[^}]*\})? (\d[\d.e+]*)", re.MULTILINE),
    re.compile(rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? (\d[\d.e+]*)", re.MULTILINE),
)

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Exchange(Ticket):
    """A request and what became of it."""

    method: str = ""
    path: str = ""
    headers: CIMultiDict[str] = field(default_factory=CIMultiDict)
    body: bytes = b""
    answer: asyncio.Future[Answer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    tries: dict[Copy, asyncio.Task[None]] = field(default_factory=dict)
    failure: Answer | None = None
    """What the last try got, for want of better."""

    clients: int = 0


class Router:
    """An HTTP proxy in front of replicas that all answer alike.

    Args:
        settings: ``fapo.router``.
        workers: base URLs of the replicas; more can come later.
        max_in_flight: requests that a replica works on at once, where ``settings`` does not say.
        api_key: what callers must show as a bearer token for anything but ``/health``; empty for no check.
        time_scale: factor on all of the router's own times, for simulations.
    """

    def __init__(
        self,
        settings: RouterSettings,
        workers: tuple[str, ...] = (),
        *,
        max_in_flight: int | None = None,
        api_key: str = "",
        time_scale: float = 1.0,
    ) -> None:
        self.timing = Timing(probe=settings.probe_seconds).scaled(time_scale)
        self.dispatcher = Dispatcher(
            policy=settings.policy,
            limit=settings.max_in_flight or max_in_flight,
            hedge_budget=settings.hedge_budget,
            max_waiting=settings.max_waiting,
            timing=self.timing,
        )
        self.exchanges: set[Exchange] = set()
        self._settings = settings
        self._timeout_seconds = settings.timeout_seconds * time_scale
        self._first_workers = workers
        self._control = Control(self, api_key)
        self._by_key: dict[str, Exchange] = {}
        self._body_bytes = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._server: asyncio.Server | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address can not be had.
        """
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=max(1.0, self.timing.probe), ceil_threshold=math.inf
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            auto_decompress=False,
        )
        loop = asyncio.get_running_loop()
        self._http = web.Server(
            self._handle,
            request_factory=functools.partial(_request, max_bytes=self._settings.max_body_bytes),
            handler_cancellation=True,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            access_log=None,
            auto_decompress=False,
            lingering_time=1.0,
        )
        self._server = await loop.create_server(self._http, host, port, backlog=4096)
        for url in self._first_workers:
            self.add(url)
        self._spawn(self._look_around())
        return self._server.sockets[0].getsockname()[1]

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no more requests, let those under way end for so long, and close."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.exchanges:
                    await asyncio.sleep(0.05)
        await self._http.shutdown(timeout=0.5)
        for task in [*self._tasks, *(task for exchange in self.exchanges for task in exchange.tries.values())]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def add(self, url: str) -> None:
        """Send requests to a base URL from now on."""
        known = self.dispatcher.replicas.get(url.rstrip("/"))
        replica = self.dispatcher.add(url.rstrip("/"), self._now())
        if replica is not known:
            self._spawn(self._watch(replica))
        self._pump()

    def remove(self, url: str) -> None:
        """Forget a replica; what it works on is done elsewhere.

        Raises:
            RouterError: there is no such replica.
        """
        replica = self.dispatcher.remove(url.rstrip("/"))
        for copy in list(replica.copies):
            copy.ticket.tries[copy].cancel()

    def replace(self, urls: list[str]) -> None:
        """Send requests to these base URLs and to no others."""
        for url in set(self.dispatcher.replicas) - {url.rstrip("/") for url in urls}:
            self.remove(url)
        for url in urls:
            self.add(url)

    def _spawn(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    # --- the client's side --------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        began = self._now()
        path = _origin_form(request.raw_path)
        refusal = self._control.refuse(request, path)
        if refusal is None:
            reply = await self._control.answer(request, path)
            if reply is not None:
                return reply
            refusal = self._refuse(request, path)
        answer = refusal or await self._exchange(request, path)
        self._control.count(answer.status, self._now() - began)
        return await self._reply(request, answer)

    def _refuse(self, request: web.BaseRequest, path: str) -> Answer | None:
        if self._closing:
            return error(503, "the router is stopping", Connection="close")
        if not path.startswith("/"):
            return error(400, f"the target of the request is {path[:100]!r}, expected a path")
        if (request.content_length or 0) > self._settings.max_body_bytes:
            return error(413, self._too_large, Connection="close")
        if self._body_bytes > self._settings.max_waiting_bytes:
            return self._full()
        return None

    @property
    def _too_large(self) -> str:
        return f"the body is above {self._settings.max_body_bytes} bytes (max_body_bytes)"

    async def _exchange(self, request: web.BaseRequest, path: str) -> Answer:
        """Answer a request from the replicas."""
        try:
            seconds = _seconds(request.headers.get(TIMEOUT_HEADER), self._timeout_seconds)
        except ValueError as exc:
            return error(400, str(exc))
        deadline = self._now() + seconds
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            return error(408, f"the body did not come within {BODY_SECONDS:g} s", Connection="close")
        except web.HTTPRequestEntityTooLarge:
            return error(413, self._too_large, Connection="close")
        exchange = self._join(request, path, body)
        if isinstance(exchange, Answer):
            return exchange
        exchange.clients += 1
        try:
            return await self._wait(exchange, deadline, seconds)
        except asyncio.CancelledError:
            self._control.client_gone()
            raise
        finally:
            exchange.clients -= 1
            if not exchange.clients and not (exchange.answer.done() and not exchange.answer.cancelled()):
                self._close(exchange)

    def _join(self, request: web.BaseRequest, path: str, body: bytes) -> Exchange | Answer:
        """The exchange that runs under the request's key, or a new one."""
        key = request.headers.get(IDEMPOTENCY_HEADER)
        running = self._by_key.get(key) if key else None
        if running is not None:
            if (running.method, running.path, running.body) != (request.method, path, body):
                return error(422, f"another request runs under this {IDEMPOTENCY_HEADER}")
            return running
        exchange = Exchange(
            size=len(body),
            kind=f"{request.method} {path.partition('?')[0]}",
            now=self._now(),
            method=request.method,
            path=path,
            headers=_end_to_end(request.headers, "Host", "Content-Length", "Expect"),
            body=body,
        )
        if not self.dispatcher.submit(exchange):
            return self._full()
        self.exchanges.add(exchange)
        self._body_bytes += len(body)
        if key:
            self._by_key[key] = exchange
        exchange.answer.add_done_callback(lambda _: self._forget(exchange, key))
        self._pump()
        return exchange

    def _forget(self, exchange: Exchange, key: str | None) -> None:
        self.exchanges.discard(exchange)
        self._body_bytes -= len(exchange.body)
        if key:
            self._by_key.pop(key, None)

    def _full(self) -> Answer:
        seconds = max(1, math.ceil(self.dispatcher.mean_seconds))
        return error(503, f"{self.dispatcher.num_waiting} requests wait already", **{"Retry-After": str(seconds)})

    async def _wait(self, exchange: Exchange, deadline: float, seconds: float) -> Answer:
        left = deadline - self._now()
        await asyncio.wait([exchange.answer], timeout=left)
        if exchange.answer.done():
            answer = exchange.answer.result()
            answer.deadline = asyncio.get_running_loop().time() + deadline - self._now()
            if answer.rest is not None and exchange.clients > 1:
                return error(409, f"an answer in parts is for the first request of its {IDEMPOTENCY_HEADER} only")
            return answer
        self._control.timed_out()
        return exchange.failure or error(504, f"no answer within {seconds:g} s")

    def _close(self, exchange: Exchange) -> None:
        """Nobody waits for it any more."""
        self.dispatcher.withdraw(exchange)
        for task in exchange.tries.values():
            task.cancel()
        exchange.answer.cancel()
        self._pump()

    async def _reply(self, request: web.BaseRequest, answer: Answer) -> web.StreamResponse:
        head = {"status": answer.status, "reason": answer.reason, "headers": answer.headers}
        if answer.rest is None and request.method != "HEAD":
            response: web.StreamResponse = web.Response(body=answer.body, **head)
        else:
            response = web.StreamResponse(**head)
        failure = None
        deadline = asyncio.get_running_loop().time() + WRITE_SECONDS if answer.rest is None else answer.deadline
        try:
            async with asyncio.timeout_at(deadline):
                await response.prepare(request)
                if answer.rest is not None:
                    await response.write(answer.body)
                    async for chunk in answer.rest.content.iter_any():
                        answer.passed_bytes += len(chunk)
                        await response.write(chunk)
                await response.write_eof()
        except asyncio.CancelledError:
            failure = ConnectionResetError("the client hung up")
            raise
        except (aiohttp.ClientError, OSError) as exc:  # TimeoutError is an OSError
            failure = exc
            if request.transport is not None:
                request.transport.abort()  # a broken answer must not look like one that came to its end
        finally:
            if answer.passed_on is not None and not answer.passed_on.done():
                answer.passed_on.set_result(failure)
        return response

    # --- the replicas' side -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        for copy in self.dispatcher.take(self._now()):
            self._begin(copy)

    def _begin(self, copy: Copy) -> None:
        copy.ticket.tries[copy] = asyncio.create_task(self._try(copy))

    async def _try(self, copy: Copy) -> None:
        exchange, outcome, tokens, retry_after, answer = copy.ticket, Outcome.FAILED, 0.0, None, None
        try:
            async with self._session.request(
                exchange.method,
                _url(copy.replica.url, exchange.path),
                headers=exchange.headers,
                data=exchange.body or None,
                allow_redirects=False,
            ) as response:
                answer = await _read(response)
                outcome, tokens, retry_after = _judge(answer)
                if answer.rest is not None:
                    tokens += await self._pass_on(copy, answer) / TOKEN_BYTES
        except asyncio.CancelledError:
            outcome = Outcome.FAILED if copy.replica.removed else Outcome.CANCELLED
        except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: a redirect or cookie that is none
            outcome, answer = Outcome.FAILED, error(502, f"{type(exc).__name__} from the replica: {exc}"[:500])
        del exchange.tries[copy]
        deliver = self.dispatcher.end(copy, outcome, self._now(), tokens=tokens, retry_after=retry_after)
        if deliver:
            self._deliver(exchange, answer)
        elif outcome not in (Outcome.ANSWERED, Outcome.CANCELLED) and answer is not None:
            exchange.failure = answer
        self._pump()

    def _deliver(self, exchange: Exchange, answer: Answer) -> None:
        if not exchange.answer.done():
            exchange.answer.set_result(answer)
        for copy, task in exchange.tries.items():
            if copy.why is not Why.TRIAL:
                task.cancel()

    async def _pass_on(self, copy: Copy, answer: Answer) -> int:
        """Let the client read the rest; returns its bytes."""
        exchange = copy.ticket
        if exchange.done:
            raise asyncio.CancelledError
        self.dispatcher.withdraw(exchange)
        answer.passed_on = asyncio.get_running_loop().create_future()
        own = exchange.tries.pop(copy)
        self._deliver(exchange, answer)
        exchange.tries[copy] = own
        failure = await answer.passed_on
        if isinstance(failure, aiohttp.ClientError):
            raise failure
        if failure is not None:
            raise asyncio.CancelledError  # the client's fault, or its time is up
        return answer.passed_bytes

    # --- looking after replicas ---------------------------------------------------------------------------------------

    async def _look_around(self) -> None:
        pause = self.timing.tick
        while True:
            await asyncio.sleep(pause)
            began = self._now()
            try:
                for copy in self.dispatcher.tick(began):
                    self._begin(copy)
                for copy in self.dispatcher.given_up:
                    if copy in copy.ticket.tries:
                        copy.ticket.tries[copy].cancel()
                self.dispatcher.given_up.clear()
            except Exception:  # a fault in what looks after requests must not end it: they would wait for ever
                logger.exception("the router goes on after")
            # However many there are to look at, it leaves nineteen twentieths of the time to requests.
            pause = max(self.timing.tick, 19 * (self._now() - began))

    async def _watch(self, replica: Replica) -> None:
        """Probe a replica, and learn its limit, until it is removed."""
        looks, has_loads = 0, not replica.limit_is_given
        while not replica.removed:
            if looks % 5 == 0:
                healthy = await self._is_healthy(replica)
                self.dispatcher.probed(replica, healthy=healthy, now=self._now())
                self._pump()
            if has_loads and not replica.failed_probes:
                has_loads = await self._learn_limit(replica)
            looks += 1
            await asyncio.sleep(self.timing.probe / 5)

    async def _is_healthy(self, replica: Replica) -> bool:
        status, _ = await self._get(replica, "/health")
        # Of a server that has no such page nothing is known but that it is there.
        return status is not None and (status < 500 or status == HTTPStatus.NOT_IMPLEMENTED)

    async def _learn_limit(self, replica: Replica) -> bool:
        """False if the replica has nothing to learn from."""
        status, body = await self._get(replica, "/metrics")
        if status is None:
            return True
        loads = [[float(value) for value in pattern.findall(body)] for pattern in LOADS]
        known = status == HTTPStatus.OK and all(loads)
        self.dispatcher.loaded(replica, tuple(int(sum(load)) for load in loads) if known else None, self._now())
        self._pump()
        return known

    async def _get(self, replica: Replica, path: str) -> tuple[int | None, bytes]:
        headers = {"Authorization": f"Bearer {self._control.api_key}"} if self._control.api_key else {}
        try:
            async with (
                asyncio.timeout(self.timing.probe),
                self._session.get(_url(replica.url, path), headers=headers, allow_redirects=False) as response,
            ):
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > MAX_PAGE_BYTES:
                        break
                return response.status, bytes(body)
        except (aiohttp.ClientError, OSError, ValueError):  # TimeoutError is an OSError
            return None, b""


@functools.lru_cache(maxsize=4096)
def _url(base: str, path: str) -> URL:
    return URL(base + path, encoded=True)


def _request(message, payload, protocol, writer, task, *, max_bytes: int) -> web.BaseRequest:
    return web.BaseRequest(message, payload, protocol, writer, task, protocol._loop, client_max_size=max_bytes)


def _origin_form(target: str) -> str:
    """The path of a request's target: the host in it is not where we send it."""
    if target.startswith(("http://", "https://")):
        return "/" + target.split("//", 1)[1].partition("/")[2]
    return target


def _seconds(text: str | None, otherwise: float) -> float:
    if text is None:
        return otherwise
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_SECONDS:
        raise ValueError(f"{TIMEOUT_HEADER} is {text[:100]!r}, expected seconds above 0, such as 600")
    return seconds


def _end_to_end(headers: CIMultiDictProxy[str], *without: str) -> CIMultiDict[str]:
    """Headers that are not of one connection only."""
    kept = CIMultiDict(headers)
    named = [name.strip() for value in headers.getall("Connection", ()) for name in value.split(",")]
    for name in (*HOP_BY_HOP, *named, *without):
        kept.popall(name, None)
    return kept


async def _read(response: aiohttp.ClientResponse) -> Answer:
    """An answer, whole where nobody could use a part of it."""
    headers = _end_to_end(response.headers)
    headers.add("Via", VIA)
    length = response.content_length
    whole = length is not None or response.content_type == "application/json" or response.status >= 400
    answer = Answer(response.status, response.reason or "", headers, b"")
    if not whole:
        answer.rest = response
        return answer
    if length is not None and length <= MAX_HELD_BYTES:
        answer.body = await response.read()
        if response.method != "HEAD":
            headers.popall("Content-Length", None)
        return answer
    held = bytearray()
    async for chunk in response.content.iter_any():
        held += chunk
        if len(held) > MAX_HELD_BYTES:
            answer.rest = response
            break
    answer.body = bytes(held)
    return answer


def _judge(answer: Answer) -> tuple[Outcome, float, float | None]:
    """What an answer means, its tokens, and the seconds that the replica asked us to wait."""
    status = answer.status
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return Outcome.BUSY, 0.0, retry_after_seconds(answer.headers.get("Retry-After"))
    if 300 <= status < 400 and status != HTTPStatus.NOT_MODIFIED:
        return Outcome.ELSEWHERE, 0.0, None
    if status in (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED):
        return Outcome.ELSEWHERE, 0.0, None
    if status >= 500:
        return Outcome.FAILED, 0.0, None
    if status >= 400:
        return Outcome.ANSWERED, 0.0, None
    tokens = max(1.0, len(answer.body) / TOKEN_BYTES)
    is_json = answer.headers.get("Content-Type", "").startswith("application/json")
    if not is_json or "Content-Encoding" in answer.headers or not 0 < len(answer.body) <= MAX_CHECKED_BYTES:
        return Outcome.ANSWERED, tokens, None
    try:
        usage = json.loads(answer.body)
    except (ValueError, RecursionError):
        return Outcome.FAILED, 0.0, None  # cut off, or garbage
    try:
        return Outcome.ANSWERED, max(1.0, float(usage["usage"]["completion_tokens"])), None
    except (LookupError, TypeError, ValueError, OverflowError):
        return Outcome.ANSWERED, tokens, None

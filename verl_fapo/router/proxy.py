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
from collections.abc import Coroutine
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

MAX_LOAD = 2**20
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

CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

# How many requests an engine works on, and how many wait in it; a line for each of its data-parallel ranks.
LOADS = (
    re.compile(rb"^(?:vllm:num_requests_running|sglang:num_running_reqs)(?:\{[^}]*\})? (\d+(?:\.\d*)?)", re.MULTILINE),
    re.compile(rb"^(?:vllm:num_requests_waiting|sglang:num_queue_reqs)(?:\{[^}]*\})? (\d+(?:\.\d*)?)", re.MULTILINE),
)

logger = logging.getLogger(__name__)
QUIET = logging.getLogger(f"{__name__}.http")
QUIET.setLevel(logging.CRITICAL + 1)


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

    key: str = ""
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
        self._body_bytes = self._handling = 0
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
            logger=QUIET,  # what a client sends wrongly is answered, not logged
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
                while self._handling:
                    await asyncio.sleep(0.05)
        await self._http.shutdown(timeout=0.5)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def add(self, url: str) -> None:
        """Send requests to a base URL from now on."""
        known = self.dispatcher.replicas.get(url.rstrip("/"))
        replica = self.dispatcher.add(url.rstrip("/"), self._now())
        if replica is not known:
            self._spawn(self._probe(replica))
            if not replica.limit_is_given:
                self._spawn(self._learn(replica))
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

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    def _now() -> float:
        return time.monotonic()

    # --- the client's side --------------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._handling += 1
        try:
            return await self._answer(request)
        except Exception:  # aiohttp makes it a 500, but its logger is quiet
            logger.exception("a request failed by a fault of the router's")
            raise
        finally:
            self._handling -= 1

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        began = self._now()
        path = _origin_form(request.raw_path)
        refusal = self._control.refuse(request, path)
        if refusal is None:
            reply = await self._control.answer(request, path)
            if reply is not None:
                return reply
            refusal = self._refuse(path)
        answer = refusal or await self._exchange(request, path)
        self._control.count(answer.status, self._now() - began)
        return await self._reply(request, answer)

    def _refuse(self, path: str) -> Answer | None:
        if self._closing:
            return error(503, "the router is stopping", Connection="close")
        if not path.startswith("/"):
            return error(400, f"the target of the request is {path[:100]!r}, expected a path")
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
        body = await self._read_body(request)
        exchange = self._join(request, path, body) if isinstance(body, bytes) else body
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
            if not exchange.clients:
                self._close(exchange)

    async def _read_body(self, request: web.BaseRequest) -> bytes | Answer:
        """The whole body, whose bytes count from now on."""
        largest = self._settings.max_body_bytes
        length = request.content_length if request.content_length is not None else largest * request.can_read_body
        if length > largest:
            return error(413, self._too_large, Connection="close")
        if self._body_bytes + length > self._settings.max_waiting_bytes:
            return self._full()
        if request.headers.get("Expect", "").lower() == "100-continue":
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._body_bytes += length
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await request.read()
        except TimeoutError:
            return error(408, f"the body did not come within {BODY_SECONDS:g} s", Connection="close")
        except web.HTTPRequestEntityTooLarge:
            return error(413, self._too_large, Connection="close")
        finally:
            self._body_bytes -= length

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
            key=key or "",
        )
        if not self.dispatcher.submit(exchange):
            return self._full()
        self.exchanges.add(exchange)
        self._body_bytes += len(body)
        if key:
            self._by_key[key] = exchange
        self._pump()
        return exchange

    def _forget(self, exchange: Exchange) -> None:
        """It has its answer, or needs none."""
        if exchange in self.exchanges:
            self.exchanges.remove(exchange)
            self._body_bytes -= len(exchange.body)
            if exchange.key:
                del self._by_key[exchange.key]

    def _full(self) -> Answer:
        seconds = max(1, math.ceil(self.dispatcher.mean_seconds))
        return error(503, f"{self.dispatcher.num_waiting} requests wait already", **{"Retry-After": str(seconds)})

    async def _wait(self, exchange: Exchange, deadline: float, seconds: float) -> Answer:
        left = deadline - self._now()
        await asyncio.wait([exchange.answer], timeout=left)
        if exchange.answer.done():
            answer = exchange.answer.result()
            answer.deadline = asyncio.get_running_loop().time() + deadline - self._now()
            if answer.rest is not None and answer.is_taken:
                return error(409, f"an answer in parts is for the first request of its {IDEMPOTENCY_HEADER} only")
            answer.is_taken = True
            return answer
        self._control.timed_out()
        return exchange.failure or error(504, f"no answer within {seconds:g} s")

    def _close(self, exchange: Exchange) -> None:
        """Nobody waits for it any more."""
        self._forget(exchange)
        self.dispatcher.withdraw(exchange)
        if exchange.answer.done():
            exchange.answer.result().abandon()
        else:
            exchange.answer.cancel()
            for task in exchange.tries.values():
                task.cancel()
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
        task = self._spawn(self._try(copy))
        copy.ticket.tries[copy] = task
        # However it ends, cancelled before its first step too, the dispatcher hears of it.
        task.add_done_callback(functools.partial(self._tried, copy))

    async def _try(self, copy: Copy) -> tuple[Outcome, float, float | None, Answer]:
        """What came of a copy, its tokens, the seconds that the replica asked us to wait, and its answer."""
        exchange = copy.ticket
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
                if answer.rest is not None and outcome is Outcome.ANSWERED:
                    tokens += await self._pass_on(copy, answer) / TOKEN_BYTES
                return outcome, tokens, retry_after, answer
        except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: headers that are none
            answer = error(502, f"{type(exc).__name__} from the replica: {exc}"[:500])
            return Outcome.FAILED, 0.0, None, answer

    def _tried(self, copy: Copy, task: asyncio.Task) -> None:
        exchange, outcome, tokens, retry_after, answer = copy.ticket, Outcome.FAILED, 0.0, None, None
        exchange.tries.pop(copy, None)
        if task.cancelled():
            outcome = Outcome.FAILED if copy.replica.removed else Outcome.CANCELLED
        elif task.exception() is not None:
            logger.error("a try failed by a fault of the router's", exc_info=task.exception())
        else:
            outcome, tokens, retry_after, answer = task.result()
        if self.dispatcher.end(copy, outcome, self._now(), tokens=tokens, retry_after=retry_after):
            self._deliver(exchange, answer)
        elif outcome not in (Outcome.ANSWERED, Outcome.CANCELLED) and answer is not None:
            exchange.failure = answer
        self._pump()

    def _deliver(self, exchange: Exchange, answer: Answer) -> None:
        if not exchange.answer.done():
            exchange.answer.set_result(answer)
        self._forget(exchange)
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

    async def _probe(self, replica: Replica) -> None:
        """Ask a replica for its health until it is removed."""
        while not replica.removed:
            status, _ = await self._get(replica, "/health")
            # Of a server that has no such page nothing is known but that it is there.
            healthy = status is not None and (status < 500 or status == HTTPStatus.NOT_IMPLEMENTED)
            self.dispatcher.probed(replica, healthy=healthy, now=self._now())
            self._pump()
            await asyncio.sleep(self.timing.probe)

    async def _learn(self, replica: Replica) -> None:
        """Learn from a replica's engine how many requests it works on, until it is removed."""
        can_tell = True
        while can_tell and not replica.removed:
            status, page = await self._get(replica, "/metrics")
            load = [sum(map(float, pattern.findall(page))) for pattern in LOADS if pattern.search(page)]
            known = status == HTTPStatus.OK and len(load) == len(LOADS) and max(load) < MAX_LOAD
            can_tell = known or status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND)
            if known or not can_tell:
                self.dispatcher.loaded(replica, (int(load[0]), int(load[1])) if known else None, self._now())
                self._pump()
            await asyncio.sleep(self.timing.probe / 5)

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
    for text in (response.reason or "", *headers.values()):
        if CONTROL.search(text):
            raise ValueError("a control character in a header")
    headers.add("Via", VIA)
    length = response.content_length
    whole = length is not None or _is_json(headers) or response.status >= 300
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
    if status < 200:
        return Outcome.FAILED, 0.0, None
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
    can_be_checked = _is_json(answer.headers) and "Content-Encoding" not in answer.headers
    if not can_be_checked or not 0 < len(answer.body) <= MAX_CHECKED_BYTES:
        return Outcome.ANSWERED, tokens, None
    try:
        usage = json.loads(answer.body, parse_int=float)  # of any length
    except (ValueError, RecursionError):
        return Outcome.FAILED, 0.0, None  # cut off, or garbage
    try:
        told = float(usage["usage"]["completion_tokens"])
    except (LookupError, TypeError, ValueError):
        return Outcome.ANSWERED, tokens, None
    # No token has less than a byte.
    return Outcome.ANSWERED, told if 1 <= told <= len(answer.body) else tokens, None


def _is_json(headers: CIMultiDict[str]) -> bool:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower() == "application/json"

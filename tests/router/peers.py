"""Replicas that do as they are told, down to the byte, and a router in front of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import pytest

from verl_fapo.router import Router
from verl_fapo.settings import RouterSettings

Speak = Callable[[asyncio.StreamReader, asyncio.StreamWriter, "Heard"], Awaitable[None]]


@dataclass
class Heard:
    """A request as it came over the wire."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)


@dataclass
class Peer:
    """A server on a raw socket: ``speak`` writes whatever it likes for each request."""

    speak: Speak
    heard: list[Heard] = field(default_factory=list)
    hung_up: int = 0
    """Connections that the router closed while an answer was due."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await self._read(reader):
                if request.line.split()[1] in ("/health", "/metrics"):
                    writer.write(http(b"{}", status="200 OK" if "/health" in request.line else "404 Not Found"))
                    continue
                self.heard.append(request)
                answer = asyncio.ensure_future(self.speak(reader, writer, request))
                gone = asyncio.ensure_future(reader.read(1))
                await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
                if not answer.done():
                    answer.cancel()
                    self.hung_up += 1
                    return
                gone.cancel()
                await asyncio.wait([gone])
                await answer
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> Heard | None:
        head = await reader.readuntil(b"\r\n\r\n")
        line, *rows = head.decode("latin-1").strip().split("\r\n")
        headers = [tuple(row.split(": ", 1)) for row in rows]
        request = Heard(line, headers, b"")
        request.body = await reader.readexactly(int(request.header("Content-Length") or 0))
        return request


def http(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> bytes:
    """An answer, whose Content-Length may lie."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def says(body: bytes, *headers: str, **options) -> Speak:
    async def speak(reader, writer, request) -> None:
        writer.write(http(body, *headers, **options))
        await writer.drain()

    return speak


def completion(text: str) -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}], "usage": {"completion_tokens": 3}}).encode()


good = says(completion("good"), "Content-Type: application/json")


async def hangs(reader, writer, request) -> None:
    await asyncio.sleep(60)


@pytest.fixture
async def start() -> AsyncIterator[Callable]:
    """Starts a router in front of peers: ``await start(speak, ..., **settings)`` gives what a test needs."""
    servers, routers = [], []

    async def start(*speaks: Speak, api_key: str = "", max_in_flight: int = 8, scale: float = 0.1, **settings):
        peers, urls = [Peer(speak) for speak in speaks], []
        for peer in peers:
            server = await asyncio.start_server(peer.serve, "127.0.0.1", 0, limit=2**26)
            servers.append(server)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        router = Router(
            RouterSettings(**settings), tuple(urls), api_key=api_key, max_in_flight=max_in_flight, time_scale=scale
        )
        routers.append(router)
        port = await router.start()
        return Started(router, f"http://127.0.0.1:{port}", port, peers, urls)

    yield start
    for router in routers:
        await router.stop()
    for server in servers:
        server.close()


@dataclass
class Started:
    """What a test asks of a router that runs."""

    router: Router
    url: str
    port: int
    peers: list[Peer]
    urls: list[str]

    async def ask(self, path: str = "/v1/chat/completions", method: str = "POST", **options):
        """Status, headers and body of one request."""
        options.setdefault("data", b'{"messages": []}' if method == "POST" else None)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(method, self.url + path, allow_redirects=False, **options) as response,
        ):
            return response.status, response.headers, await response.read()

    async def until(self, true: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(seconds):
            while not true():
                await asyncio.sleep(0.01)

    async def raw(self, data: bytes) -> bytes:
        """What comes back for these bytes until the router closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

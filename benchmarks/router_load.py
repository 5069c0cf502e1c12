"""Many requests through a real router: python benchmarks/router_load.py --requests 1000000

First 10,000 requests at once, on a connection each, then a closed loop of 64 connections. Every request has a number
that its answer must repeat. Replicas answer after a moment, from a process of their own. Prints what came back and the
router's memory as it goes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
import uvloop

NUMBER = re.compile(rb"number-(\d+)-")
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Messages(asyncio.Protocol):
    """Takes whole HTTP messages off a connection."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = LENGTH.search(self._data, 0, end)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._data) < whole:
                return
            message, self._data = self._data[:whole], self._data[whole:]
            self.message(message)

    def message(self, message: bytes) -> None:
        raise NotImplementedError


class Replica(Messages):
    delay = 0.0

    def message(self, message: bytes) -> None:
        asyncio.get_running_loop().call_later(self.delay, self.answer, message)

    def answer(self, message: bytes) -> None:
        number = NUMBER.search(message)
        body = b'{"answer": "%s"}' % (number[0] if number else b"")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


class Client(Messages):
    """Sends numbered requests one after the other until there are no more."""

    def __init__(self, numbers, body: bytes, done: asyncio.Future) -> None:
        super().__init__()
        self._numbers, self._body, self._done = numbers, body, done
        self.right = self.wrong = 0

    def send(self) -> None:
        self._number = next(self._numbers, None)
        if self._number is None:
            self.transport.close()
            return
        body = b"number-%d-" % self._number + self._body
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def message(self, message: bytes) -> None:
        if b"number-%d-" % self._number in message and b" 200 " in message[:20]:
            self.right += 1
        else:
            self.wrong += 1
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def serve_replicas(ports: Sequence[int], delay: float) -> None:
    async def serve() -> None:
        Replica.delay = delay
        loop = asyncio.get_running_loop()
        for port in ports:
            await loop.create_server(Replica, "127.0.0.1", port, backlog=8192)
        await asyncio.Event().wait()

    uvloop.run(serve())


async def load(port: int, numbers, *, connections: int, body: bytes, report) -> tuple[int, int]:
    """Right and wrong answers."""
    loop, clients = asyncio.get_running_loop(), []
    for _ in range(connections):
        done = loop.create_future()
        _, client = await loop.create_connection(lambda done=done: Client(numbers, body, done), "127.0.0.1", port)
        clients.append((client, done))
    for client, _ in clients:
        client.send()
    reporting = [asyncio.create_task(report(lambda: sum(client.right for client, _ in clients)))]
    await asyncio.gather(*(done for _, done in clients))
    reporting[0].cancel()
    await asyncio.wait(reporting)
    return sum(client.right for client, _ in clients), sum(client.wrong for client, _ in clients)


def free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


async def measure(options: argparse.Namespace, port: int, router: psutil.Process) -> None:
    began = time.monotonic()

    async def nothing(_) -> None:
        pass

    async def report(count) -> None:
        step, next_at = options.requests // 10, options.requests // 10
        while True:
            await asyncio.sleep(0.2)
            if count() >= next_at:
                print(f"| {count():,} | {count() / (time.monotonic() - began):,.0f} | {mib(router):.0f} |", flush=True)
                next_at += step

    print("| requests | a second | router MiB |\n| --- | --- | --- |")
    right, wrong = await load(
        port, iter(range(options.at_once)), connections=options.at_once, body=b"x" * 5600, report=nothing
    )
    print(f"| {right:,} right, {wrong} wrong of {options.at_once:,} at once | - | {mib(router):.0f} |", flush=True)
    began = time.monotonic()
    right, wrong = await load(
        port, iter(range(options.requests)), connections=64, body=b"x" * options.size, report=report
    )
    print(f"| {right:,} right, {wrong} wrong of {options.requests:,} | - | {mib(router):.0f} |")


def mib(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="in the closed loop")
    parser.add_argument("--at-once", type=int, default=10_000, help="0 leaves this part out")
    parser.add_argument("--size", type=int, default=5_600, help="bytes of a request; 5,600 is a mean judge prompt's")
    parser.add_argument("--replicas", type=int, default=4)
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    ports = free_ports(options.replicas)
    replicas = multiprocessing.Process(target=serve_replicas, args=(ports, 0.002), daemon=True)
    replicas.start()
    command = [sys.executable, "-m", "verl_fapo.cli", "route", "--port", "0", "--set", "max_in_flight=256"]
    workers = [f"http://127.0.0.1:{port}" for port in ports]
    router = subprocess.Popen([*command, *workers], stdout=subprocess.PIPE, text=True)
    try:
        port = int(router.stdout.readline().split()[1].rpartition(":")[2])
        uvloop.run(measure(options, port, psutil.Process(router.pid)))
    finally:
        router.kill()
        router.wait()
        replicas.kill()


if __name__ == "__main__":
    main()

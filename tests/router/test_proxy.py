"""The router over real sockets: faithful to those who behave, unharmed by those who do not."""

from __future__ import annotations

import asyncio
import json
import resource
import socket

import aiohttp
import pytest
from multidict import CIMultiDict

from tests.router.peers import Speak, completion, good, hangs, http, says
from verl_fapo.router import Router
from verl_fapo.router.answer import Answer
from verl_fapo.router.dispatcher import Outcome
from verl_fapo.router.proxy import MAX_HELD_BYTES, _judge
from verl_fapo.settings import RouterSettings

JSON = "Content-Type: application/json"


async def test_method_path_headers_and_body_pass_unchanged_both_ways(start):
    odd = says(b"\x00\xff!", "X-Two: a", "X-Two: b", "Content-Encoding: odd", "Set-Cookie: a=1", status="207 Fine")
    run = await start(odd)
    status, headers, body = await run.ask(
        "/a%2Fb/../c//d?x=%20&y=[1]#no", "PATCH", data=b"\x01\xfe", headers={"X-Mine": "1", "Authorization": "Bearer k"}
    )
    assert (status, body) == (207, b"\x00\xff!")
    assert headers.getall("X-Two") == ["a", "b"]
    assert (headers["Content-Encoding"], headers["Set-Cookie"]) == ("odd", "a=1")
    (heard,) = run.peers[0].heard
    assert heard.line.startswith("PATCH /") and heard.body == b"\x01\xfe"
    assert (heard.header("X-Mine"), heard.header("Authorization")) == ("1", "Bearer k")
    assert heard.header("Accept-Encoding") == "gzip, deflate" or heard.header("Accept-Encoding")


async def test_path_goes_to_the_replica_as_it_was_written(start):
    run = await start(good)
    for target in ("/a%2Fb/../c//d?x=%20&y=[1]", "//evil/x", "/x@evil:1/"):
        await run.raw(f"GET {target} HTTP/1.1\r\nHost: evil\r\nConnection: close\r\n\r\n".encode())
        assert run.peers[0].heard[-1].line == f"GET {target} HTTP/1.1"


async def test_address_in_a_request_is_not_where_it_goes(start):
    run = await start(good)
    reply = await run.raw(
        b"GET http://192.0.2.1:9/v1/models HTTP/1.1\r\nHost: 192.0.2.1:9\r\nConnection: close\r\n\r\n"
    )
    assert b"good" in reply
    assert run.peers[0].heard[0].line == "GET /v1/models HTTP/1.1"
    assert run.peers[0].heard[0].header("Host") == run.urls[0].removeprefix("http://")


@pytest.mark.parametrize("target", ["*", "evil:443", "x"])
async def test_target_without_a_path_is_refused(start, target):
    run = await start(good)
    reply = await run.raw(f"OPTIONS {target} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
    assert b" 400 " in reply.split(b"\r\n")[0]
    assert not run.peers[0].heard


async def test_headers_of_one_connection_stay_on_it(start):
    run = await start(says(b"{}", JSON, "Connection: X-Private", "X-Private: 1", "Keep-Alive: timeout=1"))
    _, headers, _ = await run.ask(headers={"Connection": "keep-alive, X-Hop", "X-Hop": "1", "TE": "trailers"})
    heard = run.peers[0].heard[0]
    assert [heard.header(name) for name in ("X-Hop", "TE", "Expect")] == [None, None, None]
    assert "X-Private" not in headers and "Keep-Alive" not in headers
    assert headers["Via"] == "1.1 verl-fapo"


async def test_head_has_the_length_and_no_body(start):
    run = await start(says(b"", "X-A: 1", length=77))
    status, headers, body = await run.ask("/x", "HEAD")
    assert (status, headers["Content-Length"], headers["X-A"], body) == (200, "77", "1", b"")


async def test_connections_are_kept_on_both_sides(start):
    run = await start(good)
    connections = 0

    async def counting(reader, writer):
        nonlocal connections
        connections += 1
        await serve(reader, writer)

    serve = run.peers[0].serve
    server = await asyncio.start_server(counting, "127.0.0.1", 0)
    run.router.replace([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"])
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        for _ in range(20):
            async with session.post(run.url + "/x", data=b"1") as response:
                assert response.status == 200
    assert connections <= 3
    server.close()


async def test_stream_passes_on_as_it_comes(start):
    gate = asyncio.Event()

    async def gated(reader, writer, request) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await gate.wait()
        writer.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    run = await start(gated)
    async with aiohttp.ClientSession() as session, session.post(run.url + "/x", data=b"1") as response:
        assert await response.content.readany() == b"data: 1\n\n"
        gate.set()
        assert await response.content.read() == b"data: 2\n\n"


async def test_stream_that_breaks_does_not_look_whole(start):
    async def breaks(reader, writer, request) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        writer.transport.abort()

    run = await start(breaks)
    with pytest.raises(aiohttp.ClientPayloadError):
        await run.ask()


async def test_stream_that_stalls_ends_at_the_deadline(start):
    async def stalls(reader, writer, request) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await asyncio.sleep(60)

    run = await start(stalls)
    with pytest.raises(aiohttp.ClientPayloadError):
        await run.ask(headers={"X-Request-Timeout": "0.3"})
    await run.until(lambda: run.peers[0].hung_up == 1)


async def test_client_that_does_not_read_is_cut_off(start, monkeypatch):
    monkeypatch.setattr("verl_fapo.router.proxy.WRITE_SECONDS", 0.3)
    run = await start(says(b"x" * 2**24))
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port, limit=1)
    writer.write(b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n")
    await run.until(lambda: run.peers[0].heard)
    await asyncio.sleep(1)
    assert len(await reader.read(2**25)) < 2**24
    await run.until(lambda: not run.router._http.connections)
    writer.close()


# Replicas that misbehave: whatever the first does, the second answers.


async def cuts(reader, writer, request) -> None:
    writer.transport.abort()


async def half(reader, writer, request) -> None:
    writer.write(http(completion("bad")[:20], JSON, length=500))
    await writer.drain()
    writer.transport.abort()


async def half_and_stalls(reader, writer, request) -> None:
    writer.write(http(completion("bad")[:20], JSON, length=500))
    await asyncio.sleep(60)


async def endless_headers(reader, writer, request) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while not writer.is_closing():
        writer.write(b"X-A: b\r\n" * 1000)
        await writer.drain()


async def one_endless_header(reader, writer, request) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX-A: ")
    while not writer.is_closing():
        writer.write(b"b" * 10_000)
        await writer.drain()


async def garbage(reader, writer, request) -> None:
    writer.write(b"\x00\xffSSH-2.0-garbage\r\n\r\n" * 10)
    await writer.drain()


def chunks(status: str, body: bytes) -> Speak:
    async def speak(reader, writer, request) -> None:
        writer.write(f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
        await writer.drain()

    return speak


FAILING = [
    pytest.param(cuts, id="cuts the connection"),
    pytest.param(half, id="half an answer"),
    pytest.param(garbage, id="garbage"),
    pytest.param(endless_headers, id="endless headers"),
    pytest.param(one_endless_header, id="one endless header"),
    pytest.param(says(completion("bad")[:20], JSON), id="content length too small"),
    pytest.param(says(b"", "Content-Length: 5", "Content-Length: 7"), id="two content lengths"),
    pytest.param(says(b"[" * 100_000, JSON), id="JSON bomb"),
    pytest.param(says(b"", "Transfer-Encoding: odd"), id="unknown transfer encoding"),
    pytest.param(says(b"no", status="500 No"), id="500"),
    pytest.param(says(b"no", status="502 No"), id="502"),
    pytest.param(says(b"no", "Location: http://192.0.2.1/", status="302 Moved"), id="redirect"),
    pytest.param(says(b"no", status="501 No"), id="501"),
    pytest.param(says(b"no", status="503 Busy"), id="busy"),
    pytest.param(says(b"no", "Retry-After: nonsense", status="429 Busy"), id="busy, oddly"),
    pytest.param(says(b"no", status="700 Odd"), id="status 700"),
    pytest.param(says(b"no", "X-A: a\x01b"), id="control character in a header"),
    pytest.param(says(b"no", "Set-Cookie: a\x7fb"), id="delete in a cookie"),
    pytest.param(chunks("302 Moved", b"no"), id="redirect without a length"),
    pytest.param(chunks("500 No", b"no"), id="500 without a length"),
    pytest.param(chunks("500 No", b"x" * (MAX_HELD_BYTES + 1)), id="500 without an end"),
]


@pytest.mark.parametrize("speak", FAILING)
async def test_what_one_replica_fails_another_answers(start, speak: Speak):
    run = await start(speak, good)
    answers = await asyncio.gather(*(run.ask() for _ in range(6)))
    assert [(status, b"good" in body) for status, _, body in answers] == [(200, True)] * 6
    assert len(run.peers[0].heard) >= 1 and len(run.peers[1].heard) == 6


@pytest.mark.parametrize("speak", [pytest.param(hangs, id="nothing"), pytest.param(half_and_stalls, id="half")])
async def test_replica_that_stalls_is_found_and_its_requests_answered_by_others(start, speak: Speak):
    async def slowly_good(reader, writer, request) -> None:
        await asyncio.sleep(0.05)
        await good(reader, writer, request)

    run = await start(speak, slowly_good, slowly_good, max_in_flight=8)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(run.ask() for _ in range(120)))
    assert all(status == 200 and b"good" in body for status, _, body in answers)
    await run.until(lambda: run.peers[0].hung_up >= 8)


async def test_refusal_is_final_and_passes_whole(start):
    message = b'{"error": {"message": "too long"}}'
    run = await start(says(message, JSON, status="400 Bad Request"), good)
    for _ in range(3):
        status, headers, body = await run.ask()
        assert (status, body, headers["Content-Type"]) in (
            (400, message, "application/json"),
            (200, completion("good"), "application/json"),
        )
    assert len(run.peers[0].heard) + len(run.peers[1].heard) == 3


async def test_redirect_of_all_replicas_passes_and_is_not_followed(start):
    moved = says(b"", "Location: http://192.0.2.1/", status="307 Temporary Redirect")
    run = await start(moved, moved)
    status, headers, _ = await run.ask()
    assert (status, headers["Location"]) == (307, "http://192.0.2.1/")
    assert [len(peer.heard) for peer in run.peers] == [1, 1]


async def test_failure_of_all_replicas_passes_when_the_time_is_up(start):
    run = await start(says(b"broken", "X-Why: this", status="500 Broken"))
    status, headers, body = await run.ask(headers={"X-Request-Timeout": "0.5"})
    assert (status, headers["X-Why"], body) == (500, "this", b"broken")
    assert 2 <= len(run.peers[0].heard) <= 40


async def test_nobody_is_there_and_the_time_is_up(start):
    run = await start()
    status, _, body = await run.ask(headers={"X-Request-Timeout": "0.3"})
    assert status == 504 and "no answer within 0.3 s" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "1e99", "soon", ""])
async def test_deadline_that_is_none_is_told(start, seconds):
    run = await start(good)
    status, _, body = await run.ask(headers={"X-Request-Timeout": seconds})
    assert status == 400 and "X-Request-Timeout" in body.decode()
    assert not run.peers[0].heard


async def test_replica_that_writes_without_end_fills_no_memory(start):
    sent = 0

    async def endless(reader, writer, request) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10000000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 2**20)
            sent += 2**20
            await writer.drain()

    run = await start(endless)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with aiohttp.ClientSession() as session, session.post(run.url + "/x", data=b"1") as response:
        assert response.headers["Content-Length"] == "10000000000"
        async for _ in response.content.iter_any():
            if sent > 2**28:
                break
    (replica,) = run.router.dispatcher.replicas.values()
    await run.until(lambda: not replica.copies)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 120_000  # KiB, of 262,144 sent


async def test_client_that_hangs_up_ends_the_work_at_the_replica(start):
    run = await start(hangs)
    task = asyncio.create_task(run.ask())
    await run.until(lambda: run.peers[0].heard)
    task.cancel()
    await run.until(lambda: run.peers[0].hung_up == 1)
    await run.until(lambda: not run.router.exchanges)
    assert run.router.dispatcher.num_waiting == 0


async def test_client_that_hangs_up_while_it_waits_leaves_the_queue(start):
    run = await start(hangs, max_in_flight=1)
    tasks = [asyncio.create_task(run.ask()) for _ in range(5)]
    await run.until(lambda: len(run.router.exchanges) == 5)
    for task in tasks[1:]:
        task.cancel()
    await run.until(lambda: len(run.router.exchanges) == 1)
    assert run.router.dispatcher.num_waiting == 0 and len(run.peers[0].heard) == 1
    tasks[0].cancel()


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_that_is_too_large_is_refused(start, chunked):
    run = await start(good, max_body_bytes=1000)

    async def parts():
        for _ in range(100):
            yield b"x" * 1000

    status, _, body = await run.ask(data=parts() if chunked else b"x" * 100_000)
    assert status == 413 and b"max_body_bytes" in body
    assert not run.peers[0].heard
    assert (await run.ask(data=b"x" * 1000))[0] == 200


async def test_body_that_does_not_come_is_given_up(start, monkeypatch):
    monkeypatch.setattr("verl_fapo.router.proxy.BODY_SECONDS", 0.3)
    run = await start(good)
    reply = await run.raw(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 10\r\n\r\nabc")
    assert b" 408 " in reply.split(b"\r\n")[0]


async def test_headers_that_do_not_come_are_given_up(start, monkeypatch):
    monkeypatch.setattr("verl_fapo.router.proxy.KEEP_ALIVE_SECONDS", 0.5)
    run = await start(good)
    assert await run.raw(b"POST /x HTTP/1.1\r\nHost: h\r\nX-Slow: ") == b""
    assert await run.raw(b"") == b""
    assert (await run.ask())[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
        pytest.param(b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 1000 + b"\r\n", id="many headers"),
        pytest.param(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", id="long line"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n", id="negative length"),
        pytest.param(
            b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil",
            id="smuggling",
        ),
    ],
)
async def test_request_that_is_none_is_refused_and_nothing_reaches_a_replica(start, data):
    run = await start(good)
    reply = await run.raw(data)
    assert not reply or b" 400 " in reply.split(b"\r\n")[0]
    assert not run.peers[0].heard


async def test_curl_style_expectation_is_met(start):
    run = await start(good)
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(b"abc")
    assert b" 200 " in await reader.readline()
    assert run.peers[0].heard[0].body == b"abc"
    writer.close()


async def test_full_queue_is_told_with_a_time(start):
    run = await start(hangs, max_in_flight=1, max_waiting=2)
    tasks = [asyncio.create_task(run.ask()) for _ in range(3)]
    await run.until(lambda: len(run.router.exchanges) == 3)
    status, headers, body = await run.ask()
    assert status == 503 and int(headers["Retry-After"]) >= 1 and b"2 requests wait already" in body
    for task in tasks:
        task.cancel()


async def test_bytes_under_way_have_a_bound(start):
    run = await start(hangs, max_body_bytes=1000, max_waiting_bytes=2500)
    task = asyncio.create_task(run.ask(data=b"x" * 1000))
    await run.until(lambda: len(run.router.exchanges) == 1)
    _, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1000\r\n\r\nx")  # the rest is to come
    await run.until(lambda: run.router._body_bytes == 2000)
    assert (await run.ask(data=b"x" * 1000))[0] == 503
    writer.close()
    task.cancel()
    await run.until(lambda: run.router._body_bytes == 0)


async def test_same_key_runs_once(start):
    gate = asyncio.Event()

    async def gated(reader, writer, request) -> None:
        await gate.wait()
        await good(reader, writer, request)

    run = await start(gated)
    key = {"Idempotency-Key": "k"}
    first, second = (asyncio.create_task(run.ask(headers=key)) for _ in range(2))
    await run.until(lambda: any(exchange.clients == 2 for exchange in run.router.exchanges))
    assert (await run.ask(headers=key, data=b"other"))[0] == 422
    first.cancel()  # the second still waits
    await asyncio.sleep(0.05)
    gate.set()
    assert (await second)[2] == completion("good")
    assert len(run.peers[0].heard) == 1
    await run.ask(headers=key)
    assert len(run.peers[0].heard) == 2


async def test_stop_lets_what_runs_end_and_takes_no_more(start):
    gate = asyncio.Event()

    async def gated(reader, writer, request) -> None:
        await gate.wait()
        await good(reader, writer, request)

    run = await start(gated)
    async with aiohttp.ClientSession() as session:
        async with session.get(run.url + "/health") as response:
            assert response.status == 200
        running = asyncio.create_task(run.ask())
        await run.until(lambda: run.peers[0].heard)
        stopping = asyncio.create_task(run.router.stop(10))
        await asyncio.sleep(0.1)
        with pytest.raises(aiohttp.ClientConnectionError):
            await run.ask()
        async with session.post(run.url + "/x", data=b"") as response:  # over the connection from before
            assert response.status == 503
        gate.set()
        assert (await running)[0] == 200
        await stopping


async def test_removed_replica_leaves_its_requests_to_others(start):
    run = await start(hangs, good)
    tasks = [asyncio.create_task(run.ask()) for _ in range(4)]
    await run.until(lambda: run.peers[0].heard)
    run.router.remove(run.urls[0])
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 4
    assert list(run.router.dispatcher.replicas) == [run.urls[1]]


async def test_it_listens_and_forwards_over_ipv6(start):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    run = await start(good)
    server = await asyncio.start_server(run.peers[0].serve, "::1", 0)
    router = Router(RouterSettings(), (f"http://[::1]:{server.sockets[0].getsockname()[1]}",), max_in_flight=4)
    port = await router.start("::1")
    async with aiohttp.ClientSession() as session, session.post(f"http://[::1]:{port}/x", data=b"1") as response:
        assert await response.read() == completion("good")
    await router.stop()
    server.close()


async def test_thousands_of_requests_in_flight_are_each_answered_once(start):
    async def soon(reader, writer, request) -> None:
        await asyncio.sleep(0.01)
        await good(reader, writer, request)

    run = await start(*[soon] * 4, max_in_flight=64, scale=1.0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> bool:
            async with session.post(run.url + "/x", data=b"{}") as response:
                return response.status == 200 and await response.read() == completion("good")

        count = min(10_000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 3)
        assert all(await asyncio.gather(*(ask() for _ in range(count))))
    assert sum(len(peer.heard) for peer in run.peers) == count


# What an attacker found.


@pytest.mark.parametrize(
    ("content_type", "body", "outcome", "tokens"),
    [
        pytest.param("application/json", b'{"usage": {"completion_tokens": 9}}', Outcome.ANSWERED, 9, id="told"),
        pytest.param(
            "application/json", b'{"usage": {"completion_tokens": 1e999}}', Outcome.ANSWERED, 10, id="infinite"
        ),
        pytest.param(
            "application/json", b'{"usage": {"completion_tokens": 1e18}}', Outcome.ANSWERED, 10, id="too many"
        ),
        pytest.param("application/json", b'{"usage": {"completion_tokens": NaN', Outcome.FAILED, 0, id="cut"),
        pytest.param("application/json", b"1" * 5000, Outcome.ANSWERED, 1250, id="long integer"),
        pytest.param("application/jsonl", b"{}\n{}", Outcome.ANSWERED, 1, id="lines of JSON"),
        pytest.param("application/json; charset=utf-8", b"{", Outcome.FAILED, 0, id="with a charset"),
    ],
)
def test_answer_is_checked_and_its_tokens_are_not_believed_blindly(content_type, body, outcome, tokens):
    judged = _judge(Answer(200, "OK", CIMultiDict({"Content-Type": content_type}), body))
    assert judged[0] is outcome and judged[1] == pytest.approx(tokens, abs=0.5)


async def test_copy_that_was_cancelled_before_it_began_goes_elsewhere(start):
    run, other = await start(hangs), await start(good)
    run.router.replace([])
    tasks = [asyncio.create_task(run.ask()) for _ in range(3)]
    await run.until(lambda: run.router.dispatcher.num_waiting == 3)
    run.router.add(run.urls[0])
    run.router.remove(run.urls[0])
    run.router.add(other.urls[0])
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("turns", range(4))
async def test_stream_whose_client_left_as_it_began_takes_no_place(start, turns):
    begun = asyncio.Event()

    async def stream(reader, writer, request) -> None:
        run.writer = writer
        begun.set()
        await asyncio.sleep(60)

    run = await start(stream)
    (replica,) = run.router.dispatcher.replicas.values()
    _, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\n\r\nx")
    await begun.wait()
    run.writer.write(STREAM_HEAD + b"2\r\nok\r\n")
    for _ in range(turns):
        await asyncio.sleep(0)
    writer.transport.abort()
    await run.until(lambda: not replica.copies)
    assert not run.router.exchanges


async def test_key_is_free_as_soon_as_its_client_left(start):
    async def slowly(reader, writer, request) -> None:
        await asyncio.sleep(0.05)
        await good(reader, writer, request)

    run = await start(slowly)
    request = b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nIdempotency-Key: k%d\r\n\r\nx"
    for number in range(8):
        reader, second = await asyncio.open_connection("127.0.0.1", run.port)
        _, first = await asyncio.open_connection("127.0.0.1", run.port)
        first.write(request % number)
        await run.until(lambda: run.router.exchanges)
        first.transport.abort()
        for _ in range(number % 4):
            await asyncio.sleep(0)
        second.write(request % number)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 10)
        second.close()


async def test_stream_under_a_key_goes_to_the_first_that_asked(start):
    gate = asyncio.Event()

    async def gated(reader, writer, request) -> None:
        await gate.wait()
        await chunks("200 OK", b"stream")(reader, writer, request)

    run = await start(gated)
    asking = []
    for number in range(1, 4):
        asking.append(asyncio.create_task(run.ask(headers={"Idempotency-Key": "k"})))
        await run.until(lambda number=number: any(exchange.clients == number for exchange in run.router.exchanges))
    gate.set()
    assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 409, 409]


async def test_stop_waits_for_streams_and_for_uploads(start):
    gate = asyncio.Event()

    async def gated(reader, writer, request) -> None:
        if request.body == b"stream":
            writer.write(STREAM_HEAD)
            await gate.wait()
            writer.write(b"2\r\nok\r\n0\r\n\r\n")
        else:
            await good(reader, writer, request)

    run = await start(gated)
    stream = asyncio.create_task(run.ask(data=b"stream"))
    reader, writer = await asyncio.open_connection("127.0.0.1", run.port)
    writer.write(b"POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\nx")
    await run.until(lambda: run.peers[0].heard and run.router._handling == 2)
    stopping = asyncio.create_task(run.router.stop(20))
    await asyncio.sleep(1.5)
    writer.write(b"y")
    gate.set()
    assert b" 200 " in await reader.readline()
    assert (await stream)[2] == b"ok"
    await stopping
    writer.close()


PAGE = b"vllm:num_requests_running 8\nvllm:num_requests_waiting 3\n"
ODD = b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1.2.3\n"
HUGE = b"vllm:num_requests_running 9%s\nvllm:num_requests_waiting 1\n" % (b"9" * 5000)


@pytest.mark.parametrize(
    ("pages", "limit"),
    [
        pytest.param([PAGE], 8, id="full"),
        pytest.param([b"# HELP a\n" * 40_000 + PAGE], 8, id="in many parts"),
        pytest.param([None, PAGE], 8, id="fails at first"),
        pytest.param([ODD], 1, id="odd numbers"),
        pytest.param([HUGE], float("inf"), id="huge"),
        pytest.param([b"python_info 1\n"], float("inf"), id="says nothing of it"),
    ],
)
async def test_limit_is_learned_from_whatever_metrics_say(start, pages, limit):
    asked = 0

    async def replica(reader, writer) -> None:
        nonlocal asked
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                page = b"{}"
                if b"/metrics" in head:
                    page = pages[min(asked, len(pages) - 1)]
                    asked += 1
                writer.write(http(page or b"", status="200 OK" if page else "500 No"))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(replica, "127.0.0.1", 0)
    run = await start()
    router = Router(RouterSettings(), (f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",), time_scale=0.02)
    await router.start()
    (found,) = router.dispatcher.replicas.values()
    await run.until(lambda: found.limit == limit)
    await router.stop()
    server.close()

"""The router's own pages, over HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.peers import good, hangs, says


async def metrics(run, **headers) -> dict[str, float]:
    _, _, body = await run.ask("/metrics", "GET", headers=headers)
    return {
        sample.name
        + "".join(f" {value}" for key, value in sorted(sample.labels.items()) if key != "replica"): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


async def test_health_is_the_routers_own_and_ready_asks_for_replicas(start):
    run = await start()
    assert [(await run.ask(path, "GET"))[0] for path in ("/health", "/ready")] == [200, 503]
    run = await start(good)
    assert [(await run.ask(path, "GET"))[0] for path in ("/health", "/ready")] == [200, 200]


async def test_replicas_come_drain_and_go(start):
    run, other = await start(good), await start(good)
    body = json.dumps({"url": other.urls[0] + "/"}).encode()
    status, _, listed = await run.ask("/replicas", data=body)
    assert status == 200 and [row["url"] for row in json.loads(listed)] == [run.urls[0], other.urls[0]]
    await run.ask("/replicas/drain", data=json.dumps({"url": run.urls[0]}).encode())
    for _ in range(4):
        assert (await run.ask())[0] == 200
    assert (len(run.peers[0].heard), len(other.peers[0].heard)) == (0, 4)
    status, _, listed = await run.ask(f"/replicas?url={run.urls[0]}", "DELETE")
    assert [row["url"] for row in json.loads(listed)] == [other.urls[0]]
    assert json.loads(listed)[0].keys() == {"url", "state", "in_flight", "limit", "speed", "answered"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"url": 1}',
        b'{"url": "x"}',
        b'{"url": "file:///etc"}',
        b'{"url": "http://h:1/\\ud800"}',
        b'{"url": "http://h:1\\n"}',
        b'{"url": "http://a b:1"}',
        b'{"url": "http://h:1?x="}',
        b'{"url": "http://h:0"}',
        b'{"url": "http://u:p@h:1"}',
        b'{"url": "http://h:1/\\u0000"}',
        b"[" * 10_000,
    ],
)
async def test_replica_that_is_none_is_refused(start, body):
    run = await start(good)
    status, _, reply = await run.ask("/replicas", data=body)
    assert status == 400 and b"http://host:port" in reply
    assert list(run.router.dispatcher.replicas) == run.urls


async def test_replica_that_is_not_there_can_not_go(start):
    run = await start(good)
    for path, method in (("/replicas?url=http://x", "DELETE"), ("/replicas", "DELETE")):
        status, _, reply = await run.ask(path, method)
        assert status == 400 and run.urls[0] in reply.decode()


async def test_all_but_health_want_the_key(start):
    run = await start(good, api_key="secret")
    for path, method in (
        ("/x", "POST"),
        ("/ready", "GET"),
        ("/metrics", "GET"),
        ("/replicas", "GET"),
        ("/replicas", "POST"),
    ):
        for header in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "secret"},
            {"Authorization": "Bearer \u00e9"},
        ):
            assert (await run.ask(path, method, headers=header))[0] == 401, (path, header)
    for method in ("POST", "PUT", "HEAD"):
        assert (await run.ask("/health?x", method))[0] == 401
    assert b" 401 " in await run.raw(b"GET /x HTTP/1.1\r\nHost: h\r\nAuthorization: \xff\r\nConnection: close\r\n\r\n")
    assert not run.peers[0].heard
    assert (await run.ask("/health", "GET"))[0] == 200
    key = {"Authorization": "Bearer secret"}
    assert (await run.ask(headers=key))[0] == 200
    assert run.peers[0].heard[0].header("Authorization") == "Bearer secret"
    assert "fapo_router_waiting" in await metrics(run, **key)


async def test_without_a_key_replicas_are_changed_from_this_machine_only(start, monkeypatch):
    run = await start(good)
    monkeypatch.setattr("verl_fapo.router.control._is_local", lambda address: False)
    body = json.dumps({"url": "http://h:1"}).encode()
    assert (await run.ask("/replicas", data=body))[0] == 403
    assert (await run.ask("/replicas", "GET"))[0] == 200
    assert (await run.ask())[0] == 200


async def test_metrics_tell_what_happened(start):
    run = await start(says(b"no", status="500 No"), good)
    for _ in range(4):
        await run.ask()
    task = asyncio.create_task(run.ask("/slow"))
    await task
    got = await metrics(run)
    assert got["fapo_router_requests_total 200"] == 5
    assert got["fapo_router_tries_total first"] == 5
    assert got["fapo_router_tries_total retry"] == got["fapo_router_failed_tries_total"] >= 3
    assert got["fapo_router_waiting"] == got["fapo_router_open"] == 0
    assert got["fapo_router_request_seconds_count"] == 5
    assert got["fapo_router_replica_state failing"] + got["fapo_router_replica_state serving"] >= 1


async def test_clients_that_left_and_time_that_was_up_are_counted(start):
    run = await start(hangs)
    assert (await run.ask(headers={"X-Request-Timeout": "0.1"}))[0] == 504
    task = asyncio.create_task(run.ask())
    await run.until(lambda: len(run.peers[0].heard) == 2)
    task.cancel()
    await run.until(lambda: not run.router.exchanges)
    got = await metrics(run)
    assert (got["fapo_router_timeouts_total"], got["fapo_router_clients_gone_total"]) == (1, 1)

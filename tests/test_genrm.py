from __future__ import annotations

import asyncio
import threading
import time

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_fapo.errors import GenRMError
from verl_fapo.genrm import GenRMGroup, Router, _RequestCounts
from verl_fapo.settings import parse_settings


@pytest.fixture
async def router(monkeypatch):
    """The router actor's class, served in this process."""
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    router = Router.__ray_metadata__.modified_class(8)
    router.url = await router.start()
    yield router
    router._server.should_exit = True
    await router._serving


@pytest.fixture
async def worker():
    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        if "status" in body:
            return web.Response(status=body["status"], text="prompt too long")
        return web.json_response({"got": body})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def post(url: str, body: dict) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, await response.text()


async def test_router_answers_503_until_it_has_workers_and_then_routes(router, worker):
    assert (await post(router.url, {"a": 1}))[0] == 503
    await router.route_to([worker])
    assert await post(router.url, {"a": 1}) == (200, '{"got":{"a":1}}')


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_router_passes_the_engines_status_on(router, worker, status):
    await router.route_to([worker])
    got, text = await post(router.url, {"status": status})
    assert got == status
    assert str(status) in text


async def test_router_lets_as_many_requests_through_as_the_replicas_take(router):
    together = asyncio.Barrier(8)

    async def answer(request: web.Request) -> web.Response:
        async with asyncio.timeout(10):
            await together.wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        await router.route_to([str(server.make_url("")).rstrip("/")])
        answers = await asyncio.gather(*(post(router.url, {}) for _ in range(8)))
    assert [status for status, _ in answers] == [200] * 8


def group(**genrm: object) -> GenRMGroup:
    return GenRMGroup(parse_settings({"judge": {"model": "m"}, "genrm": genrm}))


def test_external_judge_starts_nothing():
    external = group(placement="external", endpoints=["http://h:1"])
    external.start_router(None)
    external.start_replicas(None)
    external.wait_until_ready()
    external.stop()
    assert (external.endpoints, external.model) == (("http://h:1",), "m")


class FakeReplica:
    """Stands in for a veRL replica, which test_training.py starts for real."""

    servers = workers = ()
    resource_pool = None

    def __init__(self, init) -> None:
        self.init_standalone = init


async def fails() -> None:
    raise RuntimeError("out of memory")


async def blocks() -> None:
    time.sleep(5)


@pytest.mark.parametrize(
    ("init", "said"),
    [
        pytest.param(fails, "a GenRM replica of m did not start: out of memory", id="fails"),
        pytest.param(blocks, "not ready within 0.2 s", id="waits for devices in a blocking call"),
    ],
)
def test_replica_that_does_not_start_is_an_error_in_time(monkeypatch, init, said):
    from concurrent.futures import Future

    waiting = group(start_seconds=0.2)
    waiting._replicas = [FakeReplica(init)]
    waiting._ready, waiting._deadline = Future(), time.monotonic() + 0.2
    threading.Thread(target=waiting._init_replicas, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(GenRMError, match=said):
        waiting.wait_until_ready()
    assert time.monotonic() - started < 4


def test_dead_replica_gets_no_more_requests_and_the_last_one_is_an_error(monkeypatch, caplog):
    serving, routed = group(), []
    monkeypatch.setattr(serving, "_route_to", routed.append)
    serving.replicas = ["h:1", "h:2"]
    serving.drop("h:1")
    assert routed == [["h:2"]]
    assert "h:1 died, 1 of them are left" in caplog.text
    serving.replicas = ["h:2"]
    with pytest.raises(GenRMError, match="h:2 died, and no other is left"):
        serving.drop("h:2")


def test_requests_of_a_replica_that_was_taken_out_come_back_without_harm():
    counts = _RequestCounts({"a": 0})
    counts["a"] += 1
    counts["gone"] = max(0, counts["gone"] - 1)
    assert counts == {"a": 1}

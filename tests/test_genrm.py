from __future__ import annotations

import asyncio
import threading
import time
from unittest import mock

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_fapo.errors import GenRMError
from verl_fapo.genrm import GenRMGroup, RouterActor
from verl_fapo.settings import RouterSettings, parse_settings


@pytest.fixture
async def router(monkeypatch):
    """The router actor's class, served in this process."""
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    router = RouterActor.__ray_metadata__.modified_class(RouterSettings(), (), 8)
    router.url = await router.start()
    yield router
    await router.stop()


@pytest.fixture
async def worker():
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"got": await request.json()})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def post(url: str, body: dict) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, await response.text()


async def test_requests_wait_until_there_are_replicas(router, worker):
    early = asyncio.create_task(post(router.url, {"a": 1}))
    await asyncio.sleep(0.1)
    assert not early.done()
    await router.route_to([worker])
    assert await early == (200, '{"got": {"a": 1}}')


async def test_replica_that_is_taken_out_gets_no_more(router, worker, unused_tcp_port):
    await router.route_to([f"http://127.0.0.1:{unused_tcp_port}", worker])
    await router.route_to([worker])
    assert list(router._router.dispatcher.replicas) == [worker]
    assert [(await post(router.url, {}))[0] for _ in range(4)] == [200] * 4


def group(**genrm: object) -> GenRMGroup:
    return GenRMGroup(parse_settings({"judge": {"model": "m"}, "genrm": genrm}))


@pytest.mark.parametrize(
    ("sha", "name"),
    [
        pytest.param("abc", "org/judge at abc", id="as the hub says"),
        pytest.param(None, "org/judge at an unknown revision", id="offline, and not in the cache"),
    ],
)
def test_judge_of_the_hub_is_known_by_its_commit(monkeypatch, sha, name):
    def model_info(model: str) -> mock.Mock:
        if sha is None:
            raise OSError("offline")
        return mock.Mock(sha=sha)

    monkeypatch.setattr("verl_fapo.genrm.model_info", model_info)
    monkeypatch.setattr("verl_fapo.genrm.HFModelConfig", lambda path: mock.Mock(local_path=path))
    monkeypatch.setattr("verl_fapo.genrm.RouterActor", mock.Mock())
    monkeypatch.setattr("ray.get", lambda *_, **__: "http://router:1")
    standalone = GenRMGroup(parse_settings({"judge": {"model": "org/judge"}}))
    standalone.start_router(mock.Mock(max_num_seqs=8))
    assert (standalone.model, standalone.checkpoint) == ("org/judge", name)


def test_external_judge_starts_nothing():
    external = group(placement="external", endpoints=["http://h:1"])
    external.start_router(None)
    external.start_replicas(None)
    external.wait_until_ready()
    external.stop()
    assert (external.endpoints, external.model) == (("http://h:1",), "m")


def test_several_external_servers_get_the_router_in_front(monkeypatch):
    started = []

    class Actor:
        def __init__(self, *arguments) -> None:
            started.append(arguments)
            self.start = mock.Mock()

    monkeypatch.setattr("verl_fapo.genrm.RouterActor", mock.Mock(remote=Actor))
    monkeypatch.setattr("ray.get", lambda *_, **__: "http://router:1")
    external = group(placement="external", endpoints=["http://h:1", "http://h:2"])
    external.start_router(None)
    ((_, workers, limit),) = started
    assert (workers, limit) == (("http://h:1", "http://h:2"), None)
    assert (external.endpoints, external.model) == (("http://router:1",), "m")


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

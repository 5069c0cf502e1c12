from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from verl_fapo import judge as judge_module
from verl_fapo.critique import UnknownReason
from verl_fapo.judge import JudgeClient
from verl_fapo.settings import JudgeSettings


def completion(content: object, finish_reason: str = "stop") -> web.Response:
    return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]})


class Server:
    """A real HTTP server whose answers are a list: the last one repeats."""

    def __init__(self) -> None:
        self.answers: list[Callable] = []
        self.requests: list[dict] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        answer = self.answers[min(len(self.requests), len(self.answers)) - 1]
        result = answer(request)
        return await result if asyncio.iscoroutine(result) else result


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    state = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", state.handle)
    async with TestServer(app) as http:
        state.url = str(http.make_url("")).rstrip("/")
        yield state


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(judge_module, "FIRST_PAUSE_SECONDS", 0.001)


async def ask(*urls: str, **settings: object):
    client = JudgeClient(JudgeSettings(model="genrm", timeout_seconds=2, **settings), urls)
    try:
        return await client.judge(problem="p", reference="7", solution="one\n\ntwo\n\n\\boxed{7}")
    finally:
        await client.close()


async def hang(request: web.Request) -> web.Response:
    await asyncio.sleep(60)


async def cut(request: web.Request) -> web.Response:
    request.transport.abort()
    return web.Response()


def redirect(request: web.Request) -> web.Response:
    return web.Response(status=307, headers={"Location": str(request.url)})


def status(code: int, text: str = "no"):
    return lambda request: web.Response(status=code, text=text)


def says(content: object, finish_reason: str = "stop"):
    return lambda request: completion(content, finish_reason)


CASES = [
    # answers, kind, index, reason, number of requests
    pytest.param([says("\\boxed{-1}")], "clean", -1, None, 1, id="clean"),
    pytest.param([says("\\boxed{1}")], "flawed", 1, None, 1, id="flawed"),
    pytest.param([says("\\boxed{3}")], "unknown", None, UnknownReason.OUT_OF_RANGE, 1, id="three paragraphs, index 3"),
    pytest.param([says("hm")], "unknown", None, UnknownReason.NO_BOX, 1, id="no verdict"),
    pytest.param([says(None)], "unknown", None, UnknownReason.NO_BOX, 1, id="content null"),
    pytest.param(
        [says("\\boxed{-1}", "length")], "unknown", None, UnknownReason.TRUNCATED, 1, id="cut off at max_tokens"
    ),
    pytest.param([status(503), says("\\boxed{0}")], "flawed", 0, None, 2, id="busy, then an answer"),
    pytest.param([status(429), says("\\boxed{0}")], "flawed", 0, None, 2, id="too many, then an answer"),
    pytest.param([cut, says("\\boxed{0}")], "flawed", 0, None, 2, id="connection cut, then an answer"),
    pytest.param([status(400, "too long")], "unknown", None, UnknownReason.REFUSED, 1, id="refused is not repeated"),
    pytest.param(
        [redirect, says("\\boxed{-1}")], "unknown", None, UnknownReason.REFUSED, 1, id="redirects are not followed"
    ),
    pytest.param([status(500)], "unknown", None, UnknownReason.UNREACHABLE, 4, id="always an error"),
    pytest.param([hang], "unknown", None, UnknownReason.TIMEOUT, 1, id="never an answer"),
    pytest.param([status(200, "hello")], "unknown", None, UnknownReason.UNREACHABLE, 1, id="no JSON"),
    pytest.param([status(200, "[" * 100_000)], "unknown", None, UnknownReason.UNREACHABLE, 1, id="JSON bomb"),
    pytest.param([status(200, '{"choices": []}')], "unknown", None, UnknownReason.UNREACHABLE, 1, id="no choice"),
    pytest.param([status(200, '{"choices": [7]}')], "unknown", None, UnknownReason.UNREACHABLE, 1, id="odd choice"),
    pytest.param([says(["x"])], "unknown", None, UnknownReason.UNREACHABLE, 1, id="content is a list"),
]


@pytest.mark.parametrize(("answers", "kind", "index", "reason", "num_requests"), CASES)
async def test_answer_of_the_server_becomes_a_verdict(server, answers, kind, index, reason, num_requests):
    server.answers = answers
    judgement = await ask(server.url)
    verdict = judgement.verdict
    assert (verdict.kind, verdict.index, verdict.reason) == (kind, index, reason)
    assert len(server.requests) == num_requests


async def test_request_holds_model_prompt_and_sampling(server):
    server.answers = [says("\\boxed{-1}")]
    await ask(server.url, temperature=0.25, top_p=0.5, max_tokens=99)
    (request,) = server.requests
    prompt = request.pop("messages")
    assert request == {"model": "genrm", "temperature": 0.25, "top_p": 0.5, "max_tokens": 99}
    assert prompt[0]["role"] == "user" and "<paragraph_2>\n\\boxed{7}" in prompt[0]["content"]


async def test_answer_without_end_is_given_up(server, monkeypatch):
    monkeypatch.setattr(judge_module, "MAX_ANSWER_BYTES", 10_000)
    server.answers = [status(200, json.dumps("x" * 100_000))]
    assert (await ask(server.url)).verdict.reason is UnknownReason.UNREACHABLE


async def test_server_that_is_not_there_is_unreachable(unused_tcp_port):
    judgement = await ask(f"http://127.0.0.1:{unused_tcp_port}")
    assert judgement.verdict.reason is UnknownReason.UNREACHABLE
    assert "127.0.0.1" in judgement.critique


async def test_retry_goes_to_the_next_server(server, unused_tcp_port):
    server.answers = [says("\\boxed{-1}")]
    assert (await ask(f"http://127.0.0.1:{unused_tcp_port}", server.url)).verdict.kind == "clean"

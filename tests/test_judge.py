from __future__ import annotations

import asyncio
import json
import os
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fapo import judge as judge_module
from verl_fapo.critique import UnknownReason, Verdict, split_critiques
from verl_fapo.errors import SettingsError
from verl_fapo.judge import JudgeClient, Judgement
from verl_fapo.memory import VerdictMemory
from verl_fapo.settings import JudgeSettings


def completion(content: object, finish_reason: str | None = "stop") -> web.Response:
    return web.json_response({"choices": [{"message": {"content": content}, "finish_reason": finish_reason}]})


class Server:
    """A real HTTP server whose answers are a list: the last one repeats."""

    def __init__(self) -> None:
        self.answers: list[Callable] = []
        self.requests: list[dict] = []
        self.headers: list[dict] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(await request.json())
        self.headers.append(dict(request.headers))
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


async def ask(url: str, **settings: object):
    client = JudgeClient(JudgeSettings(model="genrm", timeout_seconds=2, **settings), url)
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


def says(content: object, finish_reason: str | None = "stop"):
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
    pytest.param([says("\\boxed{-1}", None)], "clean", -1, None, 1, id="does not say why it stopped"),
    pytest.param(
        [status(200, '{"choices": [{"message": {"content": "\\\\boxed{1}"}}]}')],
        "flawed",
        1,
        None,
        1,
        id="leaves it out",
    ),
    *(
        pytest.param([says("\\boxed{-1}", reason)], "unknown", None, UnknownReason.TRUNCATED, 1, id=f"ends by {reason}")
        for reason in ("error", "content_filter", "tool_calls", "STOP", "")
    ),
    pytest.param(
        [says("\\boxed{-1}", "abort")], "unknown", None, UnknownReason.UNREACHABLE, 1, id="engine that was ended"
    ),
    pytest.param([status(503), says("\\boxed{0}")], "flawed", 0, None, 2, id="busy, then an answer"),
    pytest.param([status(429), says("\\boxed{0}")], "flawed", 0, None, 2, id="too many, then an answer"),
    pytest.param([cut, says("\\boxed{0}")], "flawed", 0, None, 2, id="connection cut, then an answer"),
    pytest.param([status(400, "bad request")], "unknown", None, UnknownReason.REFUSED, 1, id="refused is not repeated"),
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


REFUSALS = [
    # As vLLM 0.28 and SGLang word them.
    pytest.param(
        "This model's maximum context length is 256 tokens. However, you requested 64 output tokens and your prompt "
        "contains at least 193 input tokens, for a total of at least 257 tokens. Please reduce the length of the "
        "input prompt or the number of requested output tokens. (parameter=input_tokens, value=193)",
        UnknownReason.TOO_LONG,
        id="vLLM, prompt and critique",
    ),
    pytest.param(
        "The decoder prompt (length 300) is longer than the maximum model length of 256.",
        UnknownReason.TOO_LONG,
        id="vLLM's engine",
    ),
    pytest.param(
        "Input length (300) exceeds model's maximum context length (256).",
        UnknownReason.TOO_LONG,
        id="vLLM, no token left",
    ),
    pytest.param(
        "The input (300 tokens) is longer than the model's context length (256 tokens).",
        UnknownReason.TOO_LONG,
        id="SGLang, prompt",
    ),
    pytest.param(
        "Requested token count exceeds the model's maximum context length of 256 tokens.",
        UnknownReason.TOO_LONG,
        id="SGLang, prompt and critique",
    ),
    pytest.param(
        "max_tokens=512 cannot be greater than max_model_len=max_total_tokens=256.",
        UnknownReason.REFUSED,
        id="max_tokens alone",
    ),
    pytest.param("The model `x` does not exist.", UnknownReason.REFUSED, id="other model"),
]


@pytest.mark.parametrize(("message", "reason"), REFUSALS)
async def test_refusal_of_what_does_not_fit_has_its_own_reason(server, message, reason):
    body = {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
    server.answers = [lambda request: web.json_response(body, status=400)]
    judgement = await ask(server.url)
    assert judgement.verdict.reason is reason
    assert len(server.requests) == 1 and "HTTP 400" in judgement.critique


def samples(*choices: tuple[object, str]):
    return lambda request: web.json_response(
        {"choices": [{"message": {"content": text}, "finish_reason": reason} for text, reason in choices]}
    )


@pytest.mark.parametrize(
    ("choices", "kind", "index", "reason"),
    [
        pytest.param(["\\boxed{1}", "\\boxed{1}", "\\boxed{-1}"], "flawed", 1, None, id="majority"),
        pytest.param(["\\boxed{1}", "hm", "\\boxed{-1}"], "unknown", None, UnknownReason.TIE, id="tie"),
        pytest.param(["\\boxed{2}"] * 2, "flawed", 2, None, id="fewer than asked for"),
        pytest.param(["\\boxed{-1}"], "unknown", None, UnknownReason.UNREACHABLE, id="one of three is no majority"),
        pytest.param(["\\boxed{2}", ["x"], "\\boxed{2}"], "flawed", 2, None, id="malformed, and the others count"),
        pytest.param([["x"], 7, {}], "unknown", None, UnknownReason.UNREACHABLE, id="all are malformed"),
        pytest.param(["hm"], "unknown", None, UnknownReason.UNREACHABLE, id="most are missing"),
        pytest.param(["\\boxed{2}"] * 3 + ["\\boxed{0}"] * 9, "flawed", 2, None, id="more than asked for"),
        pytest.param([], "unknown", None, UnknownReason.UNREACHABLE, id="none"),
    ],
)
async def test_majority_of_the_samples_decides(server, choices, kind, index, reason):
    server.answers = [samples(*((text, "stop") for text in choices))]
    verdict = (await ask(server.url, samples=3)).verdict
    assert (verdict.kind, verdict.index, verdict.reason) == (kind, index, reason)
    assert server.requests[0]["n"] == 3 and len(server.requests) == 1


async def test_sample_that_was_cut_off_has_no_vote_and_all_texts_are_kept(server):
    texts = ["\\boxed{-1}", "\\boxed{0}", "\\boxed{0}"]
    server.answers = [samples(*zip(texts, ("length", "stop", "stop"), strict=True))]
    judgement = await ask(server.url, samples=3)
    assert judgement.verdict.index == 0
    assert split_critiques(judgement.critique) == texts
    assert judgement.critique.startswith("--- critique 1 of 3, 10 characters: unknown (truncated) ---\n")


async def test_prompt_is_made_from_the_template_and_the_scope(server, tmp_path):
    template = tmp_path / "t.txt"
    template.write_text("{problem}|{reference}|{paragraphs}\n")
    server.answers = [says("\\boxed{-1}")]
    client = JudgeClient(JudgeSettings(model="genrm", template=str(template), scope="after_think"), server.url)
    await client.judge(problem="p", reference="7", solution="<think>hm\n\nhm</think>one")
    await client.close()
    assert server.requests[0]["messages"][0]["content"] == "p|7|<paragraph_0>\none\n</paragraph_0>"


def test_template_that_is_not_there_is_refused_at_the_start(tmp_path):
    with pytest.raises(SettingsError, match="no such file"):
        JudgeClient(JudgeSettings(model="genrm", template=str(tmp_path / "t.txt")), "http://h:1")


async def test_answer_may_be_as_much_longer_as_there_are_samples(server, monkeypatch):
    monkeypatch.setattr(judge_module, "MAX_ANSWER_BYTES", 1000)
    server.answers = [samples(*[("x" * 600 + "\\boxed{-1}", "stop")] * 3)]
    assert (await ask(server.url, samples=3)).verdict.kind == "clean"


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


async def test_deadline_and_key_go_along_and_the_key_stays_the_same(server):
    server.answers = [status(500), says("\\boxed{-1}")]
    os.environ["FAPO_API_KEY"] = "secret"
    await ask(server.url)
    first, second = server.headers
    assert first["Idempotency-Key"] == second["Idempotency-Key"] and len(first["Idempotency-Key"]) == 32
    assert 0 < float(second["X-Request-Timeout"]) < float(first["X-Request-Timeout"]) <= 2
    assert first["Authorization"] == "Bearer secret"
    await ask(server.url)
    assert server.headers[2]["Idempotency-Key"] != first["Idempotency-Key"]


async def test_time_that_a_busy_server_asks_for_is_waited(server):
    busy = lambda request: web.Response(status=503, headers={"Retry-After": "1"})  # noqa: E731
    server.answers = [busy, says("\\boxed{-1}")]
    judgement = await ask(server.url)
    assert judgement.verdict.kind == "clean" and judgement.seconds >= 1


async def test_busy_server_is_waited_for_until_the_deadline_and_no_longer(server):
    server.answers = [status(429)]
    judgement = await ask(server.url)
    assert judgement.verdict.reason is UnknownReason.UNREACHABLE
    assert 4 < len(server.requests) < 100 and judgement.seconds < 2.5


@pytest.mark.parametrize(
    ("code", "reason"),
    [(500, UnknownReason.UNREACHABLE), (502, UnknownReason.UNREACHABLE), (504, UnknownReason.TIMEOUT)],
)
async def test_what_the_router_could_not_get_is_not_asked_again(server, code, reason):
    server.answers = [lambda request: web.Response(status=code, headers={"Via": "1.1 verl-fapo"})]
    assert (await ask(server.url)).verdict.reason is reason
    assert len(server.requests) == 1


async def test_through_the_real_router_a_failing_server_costs_no_judgement(server, start):
    server.answers = [status(500), cut, says("\\boxed{1}")]
    run = await start(scale=0.1)
    run.router.add(server.url)
    assert (await ask(run.url)).verdict.index == 1
    assert len(server.requests) == 3


@pytest.fixture
def memory(tmp_path) -> VerdictMemory:
    return VerdictMemory(tmp_path / "verdicts.sqlite", max_entries=100)


class Question:
    """Asks clients that share a memory, each in its turn a fresh one, as after a resume."""

    def __init__(self, url: str, memory: VerdictMemory | None) -> None:
        self.url, self.memory = url, memory

    async def ask(self, solution: str = "one", *, checkpoint: str = "c", **changed: object) -> Judgement:
        judge_settings = JudgeSettings(**{"model": "genrm", "timeout_seconds": 2, **changed})
        client = JudgeClient(judge_settings, self.url, memory=self.memory, checkpoint=checkpoint)
        try:
            return await client.judge(problem="p", reference="7", solution=solution)
        finally:
            await client.close()


def with_usage(text: str, usage: object):
    choices = [{"message": {"content": text}, "finish_reason": "stop"}]
    return lambda request: web.json_response({"choices": choices, "usage": usage})


async def test_what_was_judged_is_not_asked_again(server, memory):
    server.answers = [with_usage("why \\boxed{0}", {"completion_tokens": 12})]
    question = Question(server.url, memory)
    first, second = await question.ask(), await question.ask()
    assert (first.from_memory, first.tokens) == (False, 12)
    assert (second.from_memory, second.tokens) == (True, 0)
    assert (second.verdict, second.critique) == (first.verdict, first.critique) == (Verdict(index=0), "why \\boxed{0}")
    assert len(server.requests) == 1


async def test_without_a_memory_every_judgement_is_asked_for(server):
    server.answers = [says("\\boxed{0}")]
    question = Question(server.url, None)
    assert not (await question.ask()).from_memory and not (await question.ask()).from_memory
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"solution": "two"},
        {"checkpoint": "other"},
        {"temperature": 0.1},
        {"top_p": 0.5},
        {"max_tokens": 9},
        {"samples": 3},
        {"template": "raw"},
    ],
    ids=lambda changed: next(iter(changed)),
)
async def test_another_question_is_asked(server, memory, changed):
    server.answers = [says("\\boxed{0}")]
    question = Question(server.url, memory)
    await question.ask()
    assert not (await question.ask(**changed)).from_memory
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        pytest.param(says("hm"), False, id="no verdict in the critique is what the judge said"),
        pytest.param(says("\\boxed{-1}", "length"), False, id="cut off too"),
        pytest.param(status(500), True, id="unreachable"),
        pytest.param(status(400, "no"), True, id="refused"),
        pytest.param(status(400, "maximum context length"), True, id="too long"),
        pytest.param(hang, True, id="timeout"),
    ],
)
async def test_failure_of_which_the_judge_had_no_part_is_not_remembered(server, memory, answer, again):
    server.answers = [answer]
    question = Question(server.url, memory)
    unknown = await question.ask(timeout_seconds=0.5)
    assert unknown.verdict.kind == "unknown"
    server.answers = [says("\\boxed{0}")]
    judgement = await question.ask(timeout_seconds=0.5)
    assert (judgement.verdict.kind, judgement.from_memory) == (("flawed", False) if again else ("unknown", True))


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        pytest.param({"completion_tokens": 7}, 7, id="counted"),
        *(
            pytest.param(usage, 0, id=f"no count: {usage}")
            for usage in (None, 7, [], {}, *({"completion_tokens": value} for value in (-1, "7", True, 2**40)))
        ),
    ],
)
async def test_tokens_are_those_that_the_server_counts(server, usage, tokens):
    server.answers = [with_usage("\\boxed{-1}", usage)]
    assert (await ask(server.url)).tokens == tokens


class Gate:
    """Answers once it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        await self.open.wait()
        return completion("\\boxed{0}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def client(server, memory):
    client = JudgeClient(JudgeSettings(model="genrm", timeout_seconds=5), server.url, memory=memory)
    yield client
    await client.close()


async def test_equal_questions_under_way_share_one_call(server, client):
    server.answers = [gate := Gate()]
    question = {"problem": "p", "reference": "7", "solution": "one"}
    tasks = [asyncio.create_task(client.judge(**question)) for _ in range(8)]
    await until(lambda: server.requests)
    gate.open.set()
    judgements = await asyncio.gather(*tasks)
    assert {judgement.verdict for judgement in judgements} == {Verdict(index=0)}
    assert sum(not judgement.from_memory for judgement in judgements) == 1 == len(server.requests)


@pytest.mark.parametrize("cancelled", [0, 1], ids=["who asked first", "who joined"])
async def test_caller_that_is_cancelled_takes_nothing_from_others(server, client, cancelled):
    server.answers = [gate := Gate()]
    question = {"problem": "p", "reference": "7", "solution": "one"}
    tasks = [asyncio.create_task(client.judge(**question)) for _ in range(3)]
    await until(lambda: server.requests)
    tasks[cancelled].cancel()
    await asyncio.sleep(0)
    gate.open.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done.pop(cancelled), asyncio.CancelledError)
    assert [judgement.verdict.index for judgement in done] == [0, 0] and len(server.requests) == 1


async def test_answer_that_nobody_waits_for_any_more_is_remembered(server, client, memory):
    server.answers = [gate := Gate()]
    task = asyncio.create_task(client.judge(problem="p", reference="7", solution="one"))
    await until(lambda: server.requests)
    task.cancel()
    gate.open.set()
    await until(lambda: not client._under_way)
    assert (await client.judge(problem="p", reference="7", solution="one")).from_memory
    assert len(server.requests) == 1


async def test_closing_ends_what_is_under_way(server, client):
    server.answers = [Gate()]
    task = asyncio.create_task(client.judge(problem="p", reference="7", solution="one"))
    await until(lambda: server.requests)
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


async def test_judgements_that_come_in_while_others_are_written_are_written_together(server, client, memory):
    server.answers = [says("\\boxed{0}")]
    written = []
    put_many = memory.put_many
    memory.put_many = lambda judgements: (written.append(len(judgements)), put_many(judgements))
    await asyncio.gather(*(client.judge(problem="p", reference="7", solution=f"{i}") for i in range(50)))
    assert sum(written) == 50 and len(written) < 50
    assert all([(await client.judge(problem="p", reference="7", solution=f"{i}")).from_memory for i in range(50)])


SCRIPTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # solution
        st.integers(0, 20),  # ms until it is asked for
        st.one_of(st.none(), st.integers(0, 40)),  # ms until its caller is cancelled
    ),
    min_size=1,
    max_size=12,
)
FAULTS = st.lists(st.sampled_from(["", "", "500", "503", "cut", "late", "no text"]), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(script=SCRIPTS, faults=FAULTS)
def test_no_caller_loses_doubles_or_swaps_a_verdict_whatever_fails_or_is_cancelled(script, faults):
    """Callers come, share, and go; the server fails; the client is closed and made again in the middle."""

    def truth(text: str) -> int:
        return zlib.crc32(text.encode()) % 2 - 1

    async def play(folder: str) -> None:
        answered: Counter[str] = Counter()
        calls = iter(faults)

        async def answer(request: web.Request) -> web.Response:
            prompt = (await request.json())["messages"][0]["content"]
            fault = next(calls, "")
            if fault == "late":
                await asyncio.sleep(0.02)
            if fault == "cut":
                request.transport.abort()
            if fault in ("500", "503"):
                return web.Response(status=int(fault))
            solution = prompt.partition("candidate ")[2][:1]
            answered[solution] += fault != "no text"
            return completion("" if fault == "no text" else f"\\boxed{{{truth(solution)}}}")

        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        async with TestServer(app) as server:
            memory = VerdictMemory(Path(folder, "verdicts.sqlite"), max_entries=100)
            client = JudgeClient(
                JudgeSettings(model="m", timeout_seconds=5), str(server.make_url("")).rstrip("/"), memory=memory
            )

            async def call(solution: int, start: int, end: int | None) -> None:
                await asyncio.sleep(start / 1000)
                asking = client.judge(problem="p", reference="7", solution=f"candidate {solution}")
                try:
                    judgement = await asyncio.wait_for(asking, None if end is None else end / 1000)
                except TimeoutError:
                    return
                assert judgement.verdict.index in (truth(str(solution)), None)
                assert judgement.verdict.index is not None or judgement.verdict.reason is not None

            try:
                await asyncio.wait_for(asyncio.gather(*(call(*row) for row in script)), 20)
            finally:
                await client.close()
            assert not client._under_way
            assert max(answered.values(), default=0) <= 1 + faults.count("cut"), "an answer is asked for once"

    with TemporaryDirectory() as folder:
        asyncio.run(play(folder))

"""Asks a GenRM for a verdict, over the OpenAI chat-completions API."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from verl_fapo.critique import (
    UnknownReason,
    Verdict,
    combine_verdicts,
    join_critiques,
    parse_verdict,
    split_paragraphs,
)
from verl_fapo.memory import VerdictMemory, memory_key
from verl_fapo.router.headers import IDEMPOTENCY_HEADER, TIMEOUT_HEADER, VIA, retry_after_seconds
from verl_fapo.settings import JudgeSettings
from verl_fapo.templates import read_template

MAX_TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
MAX_ANSWER_BYTES = 16 * 2**20
"""Of one critique."""

# Of these the judge had no part: they are not remembered.
_NOT_ANSWERED = frozenset(
    (
        UnknownReason.TOO_LONG,
        UnknownReason.REFUSED,
        UnknownReason.TIMEOUT,
        UnknownReason.UNREACHABLE,
        UnknownReason.ERROR,
    )
)

# What vLLM and SGLang say, in a 4xx, of a prompt that does not fit with max_tokens beside it. Where max_tokens alone is
# above the whole context they say something else: that is a mistake in the settings, and refused.
_TOO_LONG = re.compile(
    rb"maximum context length|longer than the (?:maximum (?:model|context)|model's context) length"
    rb"|exceeds (?:the )?(?:model's )?max(?:imum)?[ _](?:context|model)[ _]len|context_length_exceeded",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict and how it came about."""

    verdict: Verdict
    critique: str
    """The judge's text, of several samples as :func:`~verl_fapo.critique.join_critiques` writes them; for an unknown
    verdict whatever there was, the server's complaint included."""

    seconds: float
    tokens: int = 0
    """Of the critique, as the server counts them."""

    from_memory: bool = False
    """It cost no request: it was remembered, or is that of an equal solution which was under way."""


@dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    body: bytes
    retry_after: float | None
    was_routed: bool


class JudgeClient:
    """Judges solutions; one per process, in one event loop.

    A judgement has until its deadline, which it tells the router. What a router of ours could not get is not asked
    again: it has tried all replicas. Where there is none, failures are tried again a few times, and whoever is busy
    (429, 503) is waited for, as long as its ``Retry-After`` says. Equal questions under way share one request.

    Args:
        settings: model, prompt, sampling and time limit.
        address: base URL of a server, or of a router in front of several. Where the environment variable
            ``FAPO_API_KEY`` is set, it is shown there as a bearer token.
        memory: where judgements are looked up and kept; None for nowhere.
        checkpoint: name of the judge's weights, to keep judgements of others apart.

    Raises:
        SettingsError: the template can not be read.
    """

    def __init__(
        self, settings: JudgeSettings, address: str, *, memory: VerdictMemory | None = None, checkpoint: str = ""
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._checkpoint = checkpoint
        self._under_way: dict[str, asyncio.Task[Judgement]] = {}
        self._unwritten: dict[str, tuple[Verdict, str]] = {}
        self._writing = asyncio.Lock()
        self._template = read_template(settings.template)
        self._url = f"{address.rstrip('/')}/v1/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, *, problem: str, reference: str, solution: str) -> Judgement:
        """Ask for the first wrong paragraph of a solution.

        Whatever goes wrong between here and the judge is a verdict ``unknown(reason)``, never an exception. A caller
        that is cancelled takes nothing from others, and what the judge then says is still remembered.
        """
        paragraphs = split_paragraphs(solution, scope=self._settings.scope)
        prompt = self._template.render(problem, reference, paragraphs)
        sampling = self._settings.model_dump(include={"temperature", "top_p", "max_tokens", "samples"})
        key = memory_key(prompt, checkpoint=self._checkpoint, sampling=sampling)
        if task := self._under_way.get(key):
            return replace(await asyncio.shield(task), from_memory=True, tokens=0)
        self._under_way[key] = task = asyncio.create_task(self._judge(key, prompt, len(paragraphs)))
        task.add_done_callback(lambda _: self._under_way.pop(key))
        return await asyncio.shield(task)

    async def _judge(self, key: str, prompt: str, num_paragraphs: int) -> Judgement:
        started = time.monotonic()
        if self._memory and (remembered := await asyncio.to_thread(self._memory.get, key)):
            verdict, critique = remembered
            return Judgement(verdict, critique, time.monotonic() - started, from_memory=True)
        deadline = started + self._settings.timeout_seconds
        tokens = 0
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                verdict, critique, tokens = await self._ask(prompt, num_paragraphs, deadline)
        except TimeoutError:
            verdict = Verdict(reason=UnknownReason.TIMEOUT)
            critique = f"no answer within {self._settings.timeout_seconds:g} s"
        if self._memory and verdict.reason not in _NOT_ANSWERED:
            await self._remember(key, verdict, critique)
        return Judgement(verdict, critique, time.monotonic() - started, tokens)

    async def _remember(self, key: str, verdict: Verdict, critique: str) -> None:
        """Write a judgement, and whatever else came in while others were written."""
        self._unwritten[key] = verdict, critique
        async with self._writing:
            if judgements := self._unwritten:
                self._unwritten = {}
                await asyncio.to_thread(self._memory.put_many, judgements)

    async def _ask(self, prompt: str, num_paragraphs: int, deadline: float) -> tuple[Verdict, str, int]:
        problem, failures, key = "", 0, uuid.uuid4().hex
        for attempt in itertools.count():
            pause = FIRST_PAUSE_SECONDS * 2 ** min(attempt, 6) * random.uniform(0.5, 1)
            try:
                reply = await self._post(prompt, key, deadline)
            except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: an address that is none
                problem = f"{type(exc).__name__}: {exc}"
                failures += 1
            else:
                if reply.status == 200:
                    return _read_completion(reply.body, num_paragraphs, self._settings.samples)
                problem = f"HTTP {reply.status}: {reply.body[:2000].decode(errors='replace')}"
                if reply.status in (429, 503):
                    pause = max(pause, reply.retry_after or 0.0)
                elif reply.status < 500:
                    too_long = _TOO_LONG.search(reply.body)
                    return Verdict(reason=UnknownReason.TOO_LONG if too_long else UnknownReason.REFUSED), problem, 0
                elif reply.status == 504 and reply.was_routed:
                    return Verdict(reason=UnknownReason.TIMEOUT), problem, 0
                else:
                    failures += MAX_TRIES if reply.was_routed else 1
            if failures >= MAX_TRIES or time.monotonic() + pause >= deadline:
                return Verdict(reason=UnknownReason.UNREACHABLE), problem, 0
            await asyncio.sleep(pause)
        raise AssertionError("the loop ends by a return")

    async def _post(self, prompt: str, key: str, deadline: float) -> _Reply:
        if self._session is None:
            # The deadline of judge() bounds every call; how many run at once is the router's affair.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
            )
        request = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self._settings.temperature,
            "top_p": self._settings.top_p,
            "max_tokens": self._settings.max_tokens,
        }
        if self._settings.samples > 1:
            request["n"] = self._settings.samples
        headers = {IDEMPOTENCY_HEADER: key, TIMEOUT_HEADER: f"{max(0.001, deadline - time.monotonic()):.3f}"}
        if api_key := os.environ.get("FAPO_API_KEY"):
            headers["Authorization"] = f"Bearer {api_key}"
        max_bytes = MAX_ANSWER_BYTES * self._settings.samples
        async with self._session.post(self._url, json=request, headers=headers, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > max_bytes:
                    raise aiohttp.ClientPayloadError(f"answer of more than {max_bytes} bytes from {self._url}")
            return _Reply(
                status=response.status,
                body=bytes(body),
                retry_after=retry_after_seconds(response.headers.get("Retry-After")),
                was_routed=VIA in response.headers.getall("Via", ()),
            )

    async def close(self) -> None:
        """Give up what is under way, and close the connections."""
        for task in [*self._under_way.values()]:
            task.cancel()
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None


def _read_completion(body: bytes, num_paragraphs: int, samples: int) -> tuple[Verdict, str, int]:
    no_sample = Verdict(reason=UnknownReason.UNREACHABLE), ""
    try:
        completion = json.loads(body)
        choices = completion["choices"][:samples]
        read = [_read_choice(choice, num_paragraphs) for choice in choices]
        if not any(read):
            raise LookupError("no choice with a text")
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        complaint = f"no chat completion ({type(exc).__name__}: {exc}): {body[:2000].decode(errors='replace')}"
        return Verdict(reason=UnknownReason.UNREACHABLE), complaint, 0
    read += [None] * (samples - len(read))
    verdicts, critiques = zip(*(sample or no_sample for sample in read), strict=True)
    return combine_verdicts(verdicts), join_critiques(critiques, verdicts), _num_tokens(completion.get("usage"))


def _num_tokens(usage: Any) -> int:
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if type(tokens) is int and 0 <= tokens < 2**31 else 0


def _read_choice(choice: Any, num_paragraphs: int) -> tuple[Verdict, str] | None:
    """Verdict and critique of a choice; None if it is none.

    Only a critique that came to its end has a verdict; one that an engine aborted as it was ended is none at all. A
    server that does not say why it stopped is taken at its word.
    """
    try:
        critique, finish_reason = choice["message"]["content"] or "", choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        return None
    if not isinstance(critique, str) or finish_reason == "abort":
        return None
    if finish_reason not in ("stop", None):
        return Verdict(reason=UnknownReason.TRUNCATED), critique
    return parse_verdict(critique, num_paragraphs=num_paragraphs), critique

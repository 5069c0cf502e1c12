"""Asks a GenRM for a verdict, over the OpenAI chat-completions API."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass

import aiohttp

from verl_fapo.critique import UnknownReason, Verdict, judge_prompt, parse_verdict, split_paragraphs
from verl_fapo.settings import JudgeSettings

MAX_TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
MAX_ANSWER_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Judgement:
    """One verdict and how it came about."""

    verdict: Verdict
    critique: str
    """The judge's text; for an unknown verdict whatever there was, the server's complaint included."""

    seconds: float


class JudgeClient:
    """Judges solutions through one or several servers; one per process, in one event loop.

    Args:
        settings: model, prompt, sampling and time limit.
        endpoints: base URLs. Calls take turns; a retry goes to the next one.
    """

    def __init__(self, settings: JudgeSettings, endpoints: tuple[str, ...]) -> None:
        self._settings = settings
        self._endpoints = itertools.cycle(endpoint.rstrip("/") for endpoint in endpoints)
        self._session: aiohttp.ClientSession | None = None

    async def judge(self, *, problem: str, reference: str, solution: str) -> Judgement:
        """Ask for the first wrong paragraph of a solution.

        Whatever goes wrong between here and the judge is a verdict ``unknown(reason)``, never an exception.
        """
        paragraphs = split_paragraphs(solution)
        prompt = judge_prompt(problem, reference, paragraphs, template=self._settings.template)
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                verdict, critique = await self._ask(prompt, len(paragraphs))
        except TimeoutError:
            verdict = Verdict(reason=UnknownReason.TIMEOUT)
            critique = f"no answer within {self._settings.timeout_seconds:g} s"
        return Judgement(verdict=verdict, critique=critique, seconds=time.monotonic() - started)

    async def _ask(self, prompt: str, num_paragraphs: int) -> tuple[Verdict, str]:
        problem = ""
        for attempt in range(MAX_TRIES):
            if attempt:
                await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt * random.uniform(0.5, 1))
            try:
                status, body = await self._post(prompt)
            except (aiohttp.ClientError, OSError, ValueError) as exc:  # ValueError: an address that is none
                problem = f"{type(exc).__name__}: {exc}"
                continue
            if status == 200:
                return _read_completion(body, num_paragraphs)
            problem = f"HTTP {status}: {body[:2000].decode(errors='replace')}"
            if status < 500 and status != 429:
                return Verdict(reason=UnknownReason.REFUSED), problem
        return Verdict(reason=UnknownReason.UNREACHABLE), problem

    async def _post(self, prompt: str) -> tuple[int, bytes]:
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
        url = f"{next(self._endpoints)}/v1/chat/completions"
        async with self._session.post(url, json=request, allow_redirects=False) as response:
            body = bytearray()
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise aiohttp.ClientPayloadError(f"answer of more than {MAX_ANSWER_BYTES} bytes from {url}")
            return response.status, bytes(body)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def _read_completion(body: bytes, num_paragraphs: int) -> tuple[Verdict, str]:
    try:
        choice = json.loads(body)["choices"][0]
        critique = choice["message"]["content"] or ""
        if not isinstance(critique, str):
            raise TypeError("content is no text")
        truncated = choice.get("finish_reason") == "length"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
        complaint = f"no chat completion ({type(exc).__name__}: {exc}): {body[:2000].decode(errors='replace')}"
        return Verdict(reason=UnknownReason.UNREACHABLE), complaint
    if truncated:
        return Verdict(reason=UnknownReason.TRUNCATED), critique
    return parse_verdict(critique, num_paragraphs=num_paragraphs), critique

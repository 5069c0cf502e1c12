"""An answer on its way to the client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp
from multidict import CIMultiDict

from verl_fapo.router.headers import VIA


@dataclass(slots=True)
class Answer:
    """What a replica, or the router itself, answers."""

    status: int
    reason: str
    headers: CIMultiDict[str]
    body: bytes
    rest: aiohttp.ClientResponse | None = None
    """More of the body, to be passed on as it comes."""

    passed_on: asyncio.Future[BaseException | None] | None = None
    """Set when the client has all of ``rest``, or to what came between."""

    is_taken: bool = False
    passed_bytes: int = 0
    deadline: float = 0.0
    """Of the client, by the event loop's clock."""

    def abandon(self) -> None:
        """End ``rest`` if nobody came for it."""
        if not self.is_taken and self.passed_on is not None and not self.passed_on.done():
            self.passed_on.set_result(ConnectionResetError("the client hung up"))


def error(status: int, message: str, **headers: str) -> Answer:
    """What the router itself says, in the form that OpenAI's clients read."""
    body = {"error": {"message": f"verl-fapo route: {message}", "type": "router_error", "code": status}}
    return Answer(
        status,
        HTTPStatus(status).phrase,
        CIMultiDict({"Content-Type": "application/json", "Via": VIA, **headers}),
        json.dumps(body).encode(),
    )

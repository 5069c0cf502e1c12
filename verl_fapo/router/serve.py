"""``verl-fapo route``: a router in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal

import uvloop

from verl_fapo.errors import RouterError
from verl_fapo.router.proxy import Router
from verl_fapo.settings import RouterSettings

logger = logging.getLogger(__name__)


def serve(
    settings: RouterSettings,
    workers: tuple[str, ...],
    *,
    host: str,
    port: int,
    api_key: str,
    grace_seconds: float,
    time_scale: float,
) -> None:
    """Route until SIGTERM or SIGINT, then let what runs end for ``grace_seconds``; a second signal ends it at once.

    Raises:
        RouterError: the address can not be had.
    """
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    allow_many_connections()
    router = Router(settings, workers, api_key=api_key, time_scale=time_scale)
    uvloop.run(_serve(router, host, port, grace_seconds))


def allow_many_connections() -> None:
    """Raise the limit of open files, which connections are, as far as this user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(router: Router, host: str, port: int, grace_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    stop, now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        bound = await router.start(host, port)
    except OSError as exc:
        await router.stop()
        raise RouterError(f"can not listen on {host}:{port}: {exc.strerror or exc}; name another --port") from exc
    shown = f"[{host}]" if ":" in host else host
    print(f"routing http://{shown}:{bound} to {len(router.dispatcher.replicas)} replicas", flush=True)
    await stop.wait()
    if router.exchanges:
        print(f"stopping when {len(router.exchanges)} requests are answered; again to stop at once", flush=True)
    ending = asyncio.create_task(router.stop(grace_seconds))
    await asyncio.wait([ending, asyncio.create_task(now.wait())], return_when=asyncio.FIRST_COMPLETED)
    if not ending.done():
        ending.cancel()
        await asyncio.wait([ending])
        await router.stop()

"""Ends a run that would wait for ever: veRL polls on when a worker is dead."""

from __future__ import annotations

import contextlib
import http.client
import logging
import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable

from verl_fapo.errors import RunError, StalledError
from verl_fapo.run_folder import RunFolder

logger = logging.getLogger(__name__)

# Servers of the run are never behind the proxy that the environment may name.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
CHECK_SECONDS = 5.0
FAILURES_UNTIL_DEAD = 3


class Watchdog(threading.Thread):
    """Looks after a run from a thread, and ends its process when nothing else helps.

    Args:
        run: the folder whose progress counts, and where the cause of death is written.
        servers: ``host:port`` of the servers to look at, asked each time.
        is_dead: tells of one of them whether it is dead.
        lost: told of a server that is dead: raises a RunError, or the run goes on, and ``servers`` names it no more.
        stall_seconds: longest time without progress.
        before_end: called when the cause is written, before the process ends.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        servers: Callable[[], Iterable[str]],
        is_dead: Callable[[str], bool],
        lost: Callable[[str], None],
        stall_seconds: float = math.inf,
        before_end: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="fapo-watchdog", daemon=True)
        self._run = run
        self._servers = servers
        self._is_dead = is_dead
        self._lost = lost
        self._stall_seconds = stall_seconds
        self._before_end = before_end
        self._failures: Counter[str] = Counter()
        self._started_at = time.time()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(CHECK_SECONDS):
            try:
                self.check()
            except RunError as exc:
                if not self._stopped.is_set():
                    self._end(exc)
            except Exception:  # a disk or a server that hiccups must not end the watch
                logger.exception("the watchdog goes on after")

    def _end(self, cause: RunError) -> None:
        logger.error("stopping the run: %s", cause)
        try:
            with contextlib.suppress(OSError):  # a full disk
                self._run.fail(f"{type(cause).__name__}: {cause}")
            self._before_end()
        finally:
            # The main thread may sit in a call that never returns; Ray ends this process's actors with it.
            os._exit(1)

    def check(self) -> None:
        """One look.

        Raises:
            StalledError: there is no progress.
            RunError: what ``lost`` raises.
        """
        idle = time.time() - max(self._started_at, self._run.last_change())
        if idle > self._stall_seconds:
            raise StalledError(
                f"no rollout scored and no step ended for {idle:.0f} s; see Ray's worker logs, "
                f"or raise fapo.stall_seconds ({self._stall_seconds:g}) if that is normal here"
            )
        for server in self._servers():
            self._failures[server] = self._failures[server] + 1 if self._is_dead(server) else 0
            if self._failures[server] >= FAILURES_UNTIL_DEAD:
                self._lost(server)

    def stop(self) -> None:
        """Stop looking."""
        self._stopped.set()


def is_dead(server: str) -> bool:
    """True if ``host:port`` refuses connections or its ``/health`` is an error; slow is not dead."""
    try:
        with DIRECT.open(f"http://{server}/health", timeout=CHECK_SECONDS):
            return False
    except urllib.error.HTTPError as exc:
        return exc.code >= 500
    except urllib.error.URLError as exc:
        return isinstance(exc.reason, ConnectionError)
    except TimeoutError:
        return False
    except (OSError, http.client.HTTPException):
        return True


def is_gone(server: str) -> bool:
    """True if ``host:port`` refuses connections."""
    host, _, port = server.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CHECK_SECONDS).close()
    except TimeoutError:
        return False
    except OSError:
        return True
    return False

"""Asks Math-Verify, in a process of its own that is killed when its time is up."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import subprocess
import sys
import threading
import time

START_SECONDS = 120.0
COMMAND = [sys.executable, "-P", "-m", "verl_fapo.answers.symbolic_worker"]

logger = logging.getLogger(__name__)


class SymbolicWorker:
    """One process that compares expressions, started at the first question; safe in threads, one question at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._told = False

    def ask(self, question: str, gold: str, answer: str, *, tolerance: float = 0.0, seconds: float) -> bool | None:
        """The answer to a question of :mod:`verl_fapo.answers.symbolic_worker`; None where it could not be decided.

        Raises:
            TimeoutError: it took longer than ``seconds``, or more memory than it may have, or there is no process.
        """
        line = json.dumps([question, gold, answer, tolerance, seconds]) + "\n"
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._kill()  # somebody else ended it, for its memory perhaps: that is not this question's fault
            if self._process is None:
                self._start()
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
                reply = self._read_line(seconds)
            except (OSError, TimeoutError) as exc:
                self._kill()
                raise TimeoutError(f"{question}: {exc}") from exc
            except BaseException:  # Ctrl-C: its reply must not be taken for that to the next question
                self._kill()
                raise
        return json.loads(reply)

    def close(self) -> None:
        """End the process; the next question starts another."""
        with self._lock:
            self._kill()

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for whoever asked
            )
            if self._read_line(START_SECONDS) != b"ready\n":
                raise OSError("it does not say that it is ready")
        except (OSError, ValueError) as exc:
            self._kill()
            if not self._told:
                command = " ".join(COMMAND)
                logger.error("answers are compared without Math-Verify, which does not start (%s): %s", exc, command)
            self._told = True
            raise TimeoutError("Math-Verify does not start") from exc

    def _read_line(self, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        received = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no reply within {seconds:g} s")
                chunk = os.read(self._process.stdout.fileno(), 4096)
                if not chunk:
                    raise OSError("it ended")
                received += chunk
        return received

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()
            self._process = None

    def forget(self) -> None:
        """In a forked process: leave the parent's to the parent."""
        self._lock = threading.Lock()
        self._process = None


WORKER = SymbolicWorker()
atexit.register(WORKER.close)
os.register_at_fork(after_in_child=WORKER.forget)

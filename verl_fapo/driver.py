"""What happens in the process of the command: checks before Ray starts, and the run folder's beginning and end."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_fapo.checks import check_config
from verl_fapo.errors import StalledError, UsageError
from verl_fapo.run_folder import RunFolder
from verl_fapo.watchdog import Watchdog, is_gone


class FAPOCallback(Callback):
    """Hydra callback of the FAPO recipes."""

    def __init__(self) -> None:
        self._run: RunFolder | None = None
        self._held = contextlib.ExitStack()
        self._raylet: psutil.Process | None = None
        self._watchdog: Watchdog | None = None

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check the config and open the run folder; ends the command with exit code 2 if something is wrong."""
        try:
            settings = check_config(config)
            run = RunFolder(settings.run_dir)
            self._held.enter_context(run.locked())
            run.open(_plain_yaml(config), started_at=psutil.Process().create_time(), resumed=resumes(config))
        except (UsageError, OSError) as exc:
            # An ordinary exception would only be a warning to Hydra.
            print(f"verl_fapo: {exc}", file=sys.stderr)
            raise SystemExit(2) from exc
        except (OmegaConfBaseException, AttributeError, TypeError) as exc:
            print(
                f"verl_fapo: a value of the config is none that veRL can take: {exc}".splitlines()[0], file=sys.stderr
            )
            raise SystemExit(2) from exc
        except Exception as exc:  # ours to mend, but the run must not start unchecked
            traceback.print_exc()
            raise SystemExit(1) from exc
        print(f"verl_fapo: FAPO is active, penalty {settings.penalty:g}; run folder {run.root}", file=sys.stderr)
        self._run = run
        # Also reached by Ctrl-C and SIGTERM, which Hydra does not tell its callbacks of.
        atexit.register(self._finish, "interrupted")
        exit_on_sigterm()
        after_ray_init(exit_on_sigterm)
        after_ray_init(self._watch_ray)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Close the run folder."""
        if job_return.status is JobStatus.COMPLETED:
            self._finish("completed")
        else:
            self._finish("failed", cause=self._cause(job_return._return_value))

    def _cause(self, error: BaseException) -> str:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if self._raylet is not None and not _lives(self._raylet):
            return f"Ray's raylet died, see raylet.out in Ray's logs; {said}"
        return said

    def _watch_ray(self) -> None:
        run, head = self._run, ray.get_runtime_context().gcs_address
        self._raylet = next((child for child in psutil.Process().children() if child.name() == "raylet"), None)

        def lost(head: str) -> None:
            raise StalledError(f"Ray's head at {head} died; see gcs_server.out in Ray's logs")

        def before_end() -> None:
            # Ray would wait a minute for its head to come back.
            if self._raylet is not None:
                with contextlib.suppress(psutil.Error):
                    self._raylet.kill()
            self._close("failed")

        self._watchdog = Watchdog(run, servers=lambda: [head], is_dead=is_gone, lost=lost, before_end=before_end)
        self._watchdog.start()

    def _finish(self, status: str, *, cause: str | None = None) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()
        ray.shutdown()
        self._close(status, cause=cause)

    def _close(self, status: str, *, cause: str | None = None) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            if cause and not run.failure:
                run.fail(cause)
            run.finish(status=status, ended_at=time.time())
        except (OSError, ValueError, LookupError, TypeError) as exc:
            print(f"verl_fapo: {status}, but {exc}; then: verl-fapo report --finish {run.root}", file=sys.stderr)
            return
        print(f"verl_fapo: {status} after {run.summary['steps']} steps; run folder {run.root}", file=sys.stderr)
        if run.failure:
            print(f"verl_fapo: {run.failure}", file=sys.stderr)
        self._held.close()


def after_ray_init(action: Callable[[], None]) -> None:
    """Have ``action`` done once, right after Ray has started in this process."""

    def init(*args: Any, **kwargs: Any) -> Any:
        ray.init = original
        context = original(*args, **kwargs)
        action()
        return context

    original, ray.init = ray.init, init


def exit_on_sigterm() -> None:
    """Let SIGTERM end the command like Ctrl-C; the handler that Ray sets would leave the run folder as it is."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def resumes(config: DictConfig) -> bool:
    """Whether veRL will go on from a checkpoint."""
    if config.trainer.resume_mode == "auto":
        return (Path(config.trainer.default_local_dir) / "latest_checkpointed_iteration.txt").exists()
    return config.trainer.resume_mode == "resume_path"


def _plain_yaml(config: DictConfig) -> str:
    config = config.copy()
    with open_dict(config):
        config.pop("hydra", None)
    return OmegaConf.to_yaml(config)

"""What happens in the process of the command: checks before Ray starts, and the run folder's beginning and end."""

from __future__ import annotations

import atexit
import contextlib
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import psutil
import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from verl_fapo.checks import check_config
from verl_fapo.errors import UsageError
from verl_fapo.run_folder import RunFolder


class FAPOCallback(Callback):
    """Hydra callback of the FAPO recipes."""

    def __init__(self) -> None:
        self._run: RunFolder | None = None
        self._held = contextlib.ExitStack()

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
        exit_on_sigterm_after_ray_init()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Close the run folder."""
        self._finish("completed" if job_return.status is JobStatus.COMPLETED else "failed")

    def _finish(self, status: str) -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        ray.shutdown()
        try:
            run.finish(status=status, ended_at=time.time())
        except (OSError, ValueError, LookupError, TypeError) as exc:
            print(f"verl_fapo: {status}, but {exc}; then: verl-fapo report --finish {run.root}", file=sys.stderr)
            return
        print(f"verl_fapo: {status} after {run.summary['steps']} steps; run folder {run.root}", file=sys.stderr)
        if run.failure:
            print(f"verl_fapo: {run.failure}", file=sys.stderr)
        self._held.close()


def exit_on_sigterm_after_ray_init() -> None:
    """Let SIGTERM end the command like Ctrl-C: Ray's own handler would end it without its run folder."""

    def init(*args: Any, **kwargs: Any) -> Any:
        ray.init = original
        context = original(*args, **kwargs)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
        return context

    original, ray.init = ray.init, init


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

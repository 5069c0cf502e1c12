"""How long does a run on a CPU take to start, and a step? ``python benchmarks/start_and_step.py``

Trains the demo's tiny models, GenRM included (32 prompts, 8 rollouts each, up to 64 tokens), without the fork server,
with one that starts with the command (cold), and with one that is ready (warm), in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, recipe_environment
from verl_fapo.data import write_parquet
from verl_fapo.demo.profiles import PROFILES
from verl_fapo.demo.run import places, training_command
from verl_fapo.run_folder import RunFolder, is_trained

SWITCHED_OFF = ("hydra.callbacks.device.fork_server=false",)
OMP = "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    profile = PROFILES["tiny"]
    policy, judge = profile.models(1, print)
    environment = {**recipe_environment(), "OMP_NUM_THREADS": str(profile.num_threads)}
    warm = ForkServer(environment)
    warm.wait_until_ready()
    variants = {"no fork server": ("", SWITCHED_OFF), "cold": ("", ()), "warm": (warm.address, ())}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, (address, overrides) in variants.items():
            with tempfile.TemporaryDirectory() as folder:
                root = Path(folder)
                write_parquet(profile.train(1), root / "train.parquet")
                settings = {
                    **profile.settings,
                    **places(root, RunFolder(root / "fapo")),
                    OMP: str(profile.num_threads),
                    "actor_rollout_ref.model.path": str(policy),
                    "fapo.judge.model": str(judge),
                    "data.train_files": str(root / "train.parquet"),
                    "data.val_files": str(root / "train.parquet"),
                    "trainer.total_training_steps": options.steps,
                    "trainer.val_before_train": False,
                    "trainer.test_freq": -1,
                }
                measured[name].append(measure(training_command("fapo", settings, overrides), root, address))
                print(name, measured[name][-1], flush=True)
    warm.close()
    show(measured)


def measure(command: list[str], root: Path, address: str) -> dict[str, float]:
    """Seconds and gigabytes of one run."""
    before = peak = psutil.virtual_memory().used
    started_at, done = time.time(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.5):
            peak = max(peak, psutil.virtual_memory().used)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with (root / "log").open("wb") as log:
            environment = {**os.environ, ADDRESS_VARIABLE: address}
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True, timeout=900)
    finally:
        done.set()
        watcher.join()
    run = RunFolder(root / "fapo")
    steps = [line for line in run.metrics() if is_trained(line)]
    parts = ("step", "gen", "old_log_prob", "update_actor")
    return {
        "first rollout, s": run.summary["seconds_to_first_rollout"],
        "whole run, s": time.time() - started_at,
        **{f"{part}, s": statistics.median(line[f"timing_s/{part}"] for line in steps) for part in parts},
        "tokens a rollout": statistics.median(line["response_length/mean"] for line in steps),
        "peak memory, GiB": (peak - before) / 2**30,
    }


def show(measured: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians."""
    table = Table(title="medians")
    table.add_column("")
    for name, runs in measured.items():
        table.add_column(f"{name} ({len(runs)})", justify="right")
    for key in next(iter(measured.values()))[0]:
        table.add_row(key, *(f"{statistics.median(run[key] for run in runs):.1f}" for runs in measured.values()))
    Console().print(table)


if __name__ == "__main__":
    main()

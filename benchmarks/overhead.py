"""What does judging cost? ``python benchmarks/overhead.py manager`` and ``python benchmarks/overhead.py training``

manager: CPU time and memory of the reward manager, over rollouts of the small world and a judge that answers at once
from a process of its own.

training: a step of the demo without a judge, with one that takes half as long for an answer as the policy does, and
with the demo's own on the same cores, in turns. The policy does not learn, so that the rollouts stay alike, and the
engine takes 32 at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from aiohttp import web
from rich.console import Console
from rich.table import Table

from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, recipe_environment
from verl_fapo.data import write_parquet
from verl_fapo.demo.profiles import PROFILES
from verl_fapo.demo.run import places, training_command
from verl_fapo.demo.world import Problem, problems, solution, written
from verl_fapo.run_folder import RunFolder, is_trained

AT_ONCE = 256
WIDTH = 32
"""Rollouts that the engine of ``training`` works on at once."""


def serve(port: Connection, seconds: float) -> None:
    """A judge that finds every solution clean, after some time."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(seconds)
        choice = {"message": {"content": "\\boxed{-1}"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 4}})

    async def main() -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(main())


@contextlib.contextmanager
def judge(seconds: float) -> Iterator[str]:
    """Base URL of a judge in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, seconds), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def external(url: str) -> list[str]:
    return ["fapo.genrm.placement=external", f"fapo.genrm.endpoints=[{url}]"]


def measure_managers(num: int) -> None:
    policy, _ = PROFILES["tiny"].models(1, print)
    table = Table(title=f"the manager fapo, {num} rollouts, {AT_ONCE} at once")
    for name in ("", "CPU, ms a rollout", f"MiB after {num // 10}", f"MiB after {num}"):
        table.add_column(name, justify="right")
    with judge(0.0) as url:
        for name, write, overrides in (
            ("wrong answers", wrong, []),
            ("right answers", solution, []),
            ("right answers, no memory", solution, ["fapo.memory.max_entries=0"]),
        ):
            rows = measure_manager(policy, write, [*external(url), *overrides], num)
            table.add_row(name, *rows)
    Console().print(table)


def measure_manager(policy: Path, write: Callable[[Problem], str], overrides: list[str], num: int) -> list[str]:
    import hydra
    from transformers import AutoTokenizer
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    tokenizer = AutoTokenizer.from_pretrained(policy)
    asked = list(islice(distinct_problems(), num))
    with (
        tempfile.TemporaryDirectory() as folder,
        hydra.initialize_config_module("verl.trainer.config", version_base=None),
    ):
        settings = ["+recipe=fapo", "fapo.judge.model=judge", f"fapo.run_dir={folder}", *overrides]
        config = hydra.compose("ppo_trainer", overrides=settings)
        manager = get_reward_manager_cls("fapo")(config, tokenizer, compute_score=None)

        async def run() -> list[float]:
            turn = asyncio.Semaphore(AT_ONCE)

            async def score(index: int) -> None:
                async with turn:
                    await manager.run_single(rollout(tokenizer, asked[index], write(asked[index]), index))

            await asyncio.gather(*map(score, range(num // 10)))
            marks = [cpu_seconds(), memory()]
            await asyncio.gather(*map(score, range(num // 10, num)))
            marks += [cpu_seconds(), memory()]
            await manager._judge.close()
            return marks

        cpu_before, memory_before, cpu_after, memory_after = asyncio.run(run())
        each = (cpu_after - cpu_before) / (num - num // 10)
        return [f"{1e3 * each:.2f}", f"{memory_before:.0f}", f"{memory_after:.0f}"]


def distinct_problems() -> Iterator[Problem]:
    seen = set()
    for problem in problems("train", seed=1):
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


def wrong(problem: Problem) -> str:
    return written(problem, (*problem.results[:-1], problem.answer + 1))


def rollout(tokenizer: object, problem: Problem, text: str, index: int) -> object:
    """One row of veRL's batch."""
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl import DataProto

    response = torch.tensor([tokenizer.encode(text)])
    row = {
        "uid": f"u{index}",
        "session_id": 0,
        "global_steps": 1,
        "data_source": "steps",
        "raw_prompt": [{"role": "user", "content": problem.prompt}],
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "question": problem.question},
    }
    objects = {key: np.array([value, None], dtype=object)[:1] for key, value in row.items()}
    tensors = {"responses": response, "attention_mask": torch.ones_like(response)}
    return DataProto(batch=TensorDict(tensors, batch_size=1), non_tensor_batch=objects)


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def memory() -> float:
    """MiB of this process."""
    return psutil.Process().memory_info().rss / 2**20


def measure_trainings(repeats: int, steps: int) -> None:
    profile = PROFILES["tiny"]
    policy, critic = profile.models(1, print)
    server = ForkServer({**recipe_environment(), "OMP_NUM_THREADS": str(profile.num_threads)})
    server.wait_until_ready()
    measured: dict[str, list[dict[str, float]]] = {"no judge": [], "simulated": [], "real, same cores": []}
    seconds = None
    for _ in range(repeats):
        run = train("baseline", policy, [], steps, server.address)
        measured["no judge"].append(run)
        seconds = seconds or run["gen"] * WIDTH / run["rollouts"] / 2
        with judge(seconds) as url:
            overrides = ["fapo.judge.model=judge", *external(url)]
            measured["simulated"].append(train("fapo", policy, overrides, steps, server.address))
        overrides = [f"fapo.judge.model={critic}", "reward.reward_model.rollout.max_num_seqs=256"]
        measured["real, same cores"].append(train("fapo", policy, overrides, steps, server.address))
    server.close()
    table = Table(title=f"medians of {repeats} runs of {steps} steps; the simulated judge takes {seconds:.2f} s")
    table.add_column("")
    for name in measured:
        table.add_column(name, justify="right")
    for key in measured["no judge"][0]:
        table.add_row(key, *(f"{statistics.median(run[key] for run in runs):.2f}" for runs in measured.values()))
    base = statistics.median(run["step"] for run in measured["no judge"])
    ratios = (statistics.median(run["step"] for run in runs) / base for runs in measured.values())
    table.add_row("step / no judge", *(f"{ratio:.2f}" for ratio in ratios))
    Console().print(table)


def train(recipe: str, policy: Path, overrides: list[str], steps: int, address: str) -> dict[str, float]:
    """Medians of the seconds of a step, and its counts."""
    profile = PROFILES["tiny"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_parquet(profile.train(1), root / "train.parquet")
        settings = {
            **{key: value for key, value in profile.settings.items() if not key.startswith("reward.")},
            **places(root, RunFolder(root / "fapo")),
            "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS": str(profile.num_threads),
            "actor_rollout_ref.model.path": str(policy),
            "actor_rollout_ref.actor.optim.lr": 0.0,
            "actor_rollout_ref.rollout.max_num_seqs": WIDTH,
            "fapo.memory.max_entries": 0,
            "data.train_files": str(root / "train.parquet"),
            "data.val_files": str(root / "train.parquet"),
            "trainer.total_training_steps": steps,
            "trainer.val_before_train": False,
            "trainer.test_freq": -1,
        }
        with (root / "log").open("wb") as log:
            environment = {**os.environ, ADDRESS_VARIABLE: address}
            command = training_command(recipe, settings, tuple(overrides))
            subprocess.run(command, stdout=log, stderr=log, env=environment, check=True, timeout=900)
        lines = [line for line in RunFolder(root / "fapo").metrics() if is_trained(line)][1:]  # the first one warms up
        rollouts = sum(not line["validation"] for line in RunFolder(root / "fapo").scored()) / steps
    parts = {part: statistics.median(line[f"timing_s/{part}"] for line in lines) for part in ("step", "gen")}
    counts = {name: statistics.median(line[f"fapo/{name}"] for line in lines) for name in ("judged", "wait_seconds")}
    print(recipe, parts, flush=True)
    return {**parts, **counts, "rollouts": rollouts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["manager", "training"])
    parser.add_argument("--num", type=int, default=10_000, help="rollouts of part manager")
    parser.add_argument("--repeats", type=int, default=2, help="of part training")
    parser.add_argument("--steps", type=int, default=5, help="of part training")
    options = parser.parse_args()
    started_at = time.monotonic()
    if options.part == "manager":
        measure_managers(options.num)
    else:
        measure_trainings(options.repeats, options.steps)
    print(f"{time.monotonic() - started_at:.0f} s")


if __name__ == "__main__":
    main()

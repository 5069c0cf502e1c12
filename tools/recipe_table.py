"""Print docs/recipes.md from the recipe files: python tools/recipe_table.py > docs/recipes.md"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import hydra
import verl  # noqa: F401  (loads the plugin)
from omegaconf import DictConfig, OmegaConf

from verl_fapo.checks import RECIPES
from verl_fapo.settings import read_settings

SIZES = {"7b": "fapo", "32b": "fapo", "genrm_4b": "fapo_genrm"}
POLICIES = ("7b", "32b")
NONE = "-"
"""The paper does not say it, or a script leaves it at veRL's default."""

YOURS = "yours"
"""A recipe leaves it to the command."""

POLICY, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
JUDGE = "reward.reward_model.rollout"


@dataclass(frozen=True, slots=True)
class Row:
    """A setting, and what others set it to; a mapping says it by size."""

    key: str
    paper: object
    authors: object
    copy: object
    why: str | Mapping[str, str] = ""
    """The reason why ours is not one of theirs."""

    sizes: tuple[str, ...] = tuple(SIZES)


def by_size(*values: object) -> dict[str, object]:
    return dict(zip(SIZES, values, strict=True))


def agreed(key: str, paper: object, scripts: object, why: str = "", *, sizes: tuple[str, ...] = tuple(SIZES)) -> Row:
    """A row in which both scripts say the same."""
    return Row(key, paper, scripts, scripts, why, sizes)


ROWS = [
    Row(
        f"{POLICY}.path",
        by_size("Qwen2.5-Math-7B", "Qwen2.5-32B", "Qwen3-4B-Instruct-2507"),
        by_size("Qwen2.5-Math-7B", "Qwen2.5-32B", "Qwen3-4B"),
        by_size("Qwen2.5-Math-7B", "Qwen2.5-32B", "Qwen3-4B-Instruct-2507"),
    ),
    agreed(f"{POLICY}.override_config.max_position_embeddings", 32768, 32768, sizes=("7b",)),
    agreed("algorithm.adv_estimator", "grpo", "grpo"),
    agreed("algorithm.use_kl_in_reward", False, False),
    agreed(f"{ACTOR}.use_kl_loss", False, False),
    agreed(f"{ACTOR}.entropy_coeff", NONE, 0),
    agreed(f"{ACTOR}.clip_ratio_low", 0.2, 0.2),
    agreed(f"{ACTOR}.clip_ratio_high", 0.28, 0.28),
    agreed(f"{ACTOR}.clip_ratio_c", 10.0, 10.0),
    agreed(f"{ACTOR}.loss_agg_mode", "token-mean", "token-mean"),
    agreed(f"{ACTOR}.optim.lr", 1e-6, 1e-6),
    agreed(f"{ACTOR}.optim.lr_warmup_steps", 10, 10),
    agreed(f"{ACTOR}.optim.weight_decay", 0.1, 0.1),
    agreed(f"{ACTOR}.grad_clip", 1.0, 1.0),
    agreed("data.train_batch_size", 512, 512),
    agreed(f"{ACTOR}.ppo_mini_batch_size", 32, 32),
    agreed(f"{ROLLOUT}.n", by_size(8, 8, 16), by_size(8, 8, 16)),
    agreed(f"{ROLLOUT}.temperature", by_size(1.0, 1.0, 1.2), by_size(1.0, 1.0, 1.2)),
    agreed(f"{ROLLOUT}.top_p", 1.0, 1.0),
    agreed(f"{ROLLOUT}.top_k", -1, -1),
    agreed("data.max_prompt_length", by_size(2048, 2048, 5120), by_size(2048, 2048, 5120)),
    agreed("data.max_response_length", by_size(8192, 20480, 8192), by_size(8192, 20480, 8192)),
    agreed("fapo.overlong.buffer", 4096, 4096),
    agreed("fapo.overlong.factor", NONE, 1.0),
    Row("data.filter_overlong_prompts", NONE, NONE, True),
    Row("data.truncation", NONE, "left", "error", "as in veRL's; a prompt without its beginning is another problem"),
    agreed(f"{ROLLOUT}.val_kwargs.temperature", by_size(1.0, 1.0, 0.6), by_size(1.0, 1.0, 0.6)),
    agreed(f"{ROLLOUT}.val_kwargs.top_p", by_size(0.7, 0.7, 0.95), by_size(0.7, 0.7, 0.95)),
    agreed(f"{ROLLOUT}.val_kwargs.top_k", NONE, -1),
    agreed(f"{ROLLOUT}.val_kwargs.do_sample", NONE, True),
    agreed(f"{ROLLOUT}.val_kwargs.n", NONE, 1),
    agreed("trainer.val_before_train", NONE, True),
    agreed("trainer.test_freq", NONE, 10),
    agreed("trainer.log_val_generations", NONE, 10),
    Row(
        "trainer.save_freq",
        NONE,
        by_size(10, 20, 10),
        by_size(-1, -1, 10),
        dict.fromkeys(POLICIES, "so that a run can be resumed"),
    ),
    agreed("trainer.total_epochs", NONE, 10),
    Row(
        "trainer.total_training_steps",
        by_size(200, "500 to 600", 500),
        by_size(200, 500, 500),
        by_size(200, 600, 500),
        {"32b": "the authors' script"},
    ),
    agreed("fapo.penalty", 1.0, 1.0, sizes=POLICIES),
    agreed("fapo.judge.template", NONE, "raw", "what the judge was trained on", sizes=POLICIES),
    agreed("fapo.judge.max_tokens", 16384, 16384, sizes=POLICIES),
    agreed("fapo.genrm.engine", NONE, "sglang", "the engine of the rollouts; sglang swaps it", sizes=POLICIES),
    agreed("fapo.genrm.tensor_parallel", NONE, 1, sizes=POLICIES),
    Row(f"{JUDGE}.gpu_memory_utilization", NONE, NONE, 0.95, "another engine", sizes=POLICIES),
    agreed(f"{JUDGE}.enforce_eager", NONE, NONE, sizes=POLICIES),
    Row(f"{ROLLOUT}.name", NONE, NONE, "vllm"),
    agreed(f"{ROLLOUT}.gpu_memory_utilization", NONE, 0.8),
    agreed(f"{ROLLOUT}.enable_chunked_prefill", NONE, True),
    agreed(f"{ROLLOUT}.free_cache_engine", NONE, NONE),
    agreed(f"{ROLLOUT}.max_num_batched_tokens", NONE, by_size(10240, 22528, 13312)),
    agreed(f"{ROLLOUT}.tensor_model_parallel_size", NONE, by_size(1, 4, 1)),
    Row(f"{ROLLOUT}.agent.num_workers", NONE, by_size(16, 8, 16), NONE),
    agreed(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", NONE, by_size(30720, 22528, 39936)),
    agreed(f"{ACTOR}.ppo_max_token_len_per_gpu", NONE, by_size(20480, 22528, 26624)),
    agreed(f"{ACTOR}.use_dynamic_bsz", NONE, True),
    agreed(f"{ACTOR}.ulysses_sequence_parallel_size", NONE, by_size(1, 8, 1)),
    Row(
        f"{ACTOR}.fsdp_config.fsdp_size",
        NONE,
        by_size(8, -1, 8),
        by_size(8, 32, 8),
        {"32b": "all devices, as many as there are"},
    ),
    agreed(f"{ACTOR}.fsdp_config.param_offload", NONE, True),
    agreed(f"{ACTOR}.fsdp_config.optimizer_offload", NONE, True),
    agreed(f"{POLICY}.use_remove_padding", NONE, True),
    agreed(f"{POLICY}.enable_gradient_checkpointing", NONE, True),
    Row("trainer.nnodes", NONE, by_size(8, 8, 8), by_size(2, 2, 4)),
    agreed("trainer.n_gpus_per_node", NONE, 8),
]
LEFT_TO_THE_COMMAND = {f"{POLICY}.path", "trainer.nnodes", "trainer.n_gpus_per_node"}

INTRODUCTION = """\
# Recipes beside the paper

Written by `python tools/recipe_table.py` from the files in `recipes/`; `tests/test_recipes.py` holds it to them.

A recipe, a size and a device make a command, in any order: `+recipe=fapo +recipe/size=7b +recipe/device=gpu`. Each of
their values can be overridden by its name, after them; `examples/run_*.sh` are such commands in full. These go
together, others are refused before Ray starts; a size or a device may be left out.

{combinations}

`tiny` is what `verl-fapo demo` trains. The other sizes have the paper's values. Below they stand beside

- the **paper**: arXiv:2510.22543;
- the **authors'** scripts: github.com/yyDing1/FAPO, `scripts/`, commit 746aa64;
- **veRL's** copy of them: github.com/volcengine/verl, `recipe/fapo/`, commits 21ecd54 (7b), 6bdaecc (32b), 6faa4b9
  (genrm_4b).

`-` is what the paper does not say, or a script leaves at its default. None of the sizes was trained by us on GPUs.
"""


def page() -> str:
    parts = [INTRODUCTION.format(combinations=combinations())]
    shared = [row for row in ROWS if is_shared(row)]
    parts.append("## All three\n\n" + table(shared, "7b"))
    for size, recipe in SIZES.items():
        own = [row for row in ROWS if size in row.sizes and row not in shared]
        parts.append(f"## `+recipe={recipe} +recipe/size={size}`\n\n" + table(own, size))
    return "\n".join(parts)


def combinations() -> str:
    lines = ["| recipe | sizes, each with the devices it goes with |", "|---|---|"]
    for recipe, sizes in RECIPES.items():
        fitting = (f"`{size}` ({', '.join(filter(None, devices))})" for size, devices in sizes.items() if size)
        lines.append(f"| `{recipe}` | {', '.join(fitting)} |")
    return "\n".join(lines)


def is_shared(row: Row) -> bool:
    """All sizes have the row, ours and everyone's with one value."""
    others = (row.paper, row.authors, row.copy, row.why)
    return (
        row.sizes == tuple(SIZES)
        and not any(isinstance(value, Mapping) for value in others)
        and len({our_value(row, size) for size in SIZES}) == 1
    )


def table(rows: Iterable[Row], size: str) -> str:
    lines = ["| setting | ours | paper | authors' | veRL's | why |", "|---|---|---|---|---|---|"]
    for row in rows:
        values = (our_value(row, size), *(of_size(value, size) for value in (row.paper, row.authors, row.copy)))
        lines.append(f"| `{row.key}` | {' | '.join(map(shown, values))} | {of_size(row.why, size)} |")
    return "\n".join(lines) + "\n"


def our_value(row: Row, size: str) -> object:
    return YOURS if row.key in LEFT_TO_THE_COMMAND else OmegaConf.select(composed(size), row.key)


@functools.cache
def composed(size: str) -> DictConfig:
    """The config of a size on GPUs, with the settings' own values where the files name none."""
    overrides = [f"+recipe={SIZES[size]}", f"+recipe/size={size}", "+recipe/device=gpu", "fapo.judge.model=judge"]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", overrides=overrides)
    config.fapo = read_settings(config).model_dump()
    return config


def of_size(value: object, size: str) -> object:
    return value.get(size, "") if isinstance(value, Mapping) else value


def shown(value: object) -> str:
    if value in (NONE, YOURS):
        return str(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")

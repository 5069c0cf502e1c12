from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fapo.settings import FAPOSettings, JudgeSettings

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


def test_fapo_on_a_gpu_is_grpo_with_the_papers_clipping_and_our_manager(compose):
    config = compose("+recipe=fapo")
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (actor.loss_agg_mode, actor.use_kl_loss) == ("token-mean", False)
    assert config.reward.reward_manager.name == "fapo"
    assert config.trainer.v1.trainer_mode == "fapo_sync"
    assert config.trainer.device == "cuda"


def test_fapo_file_is_the_same_on_gpu_and_cpu(compose):
    gpu, cpu = compose("+recipe=fapo"), compose("+recipe=fapo", "+recipe/device=cpu")
    assert gpu.fapo == cpu.fapo and gpu.algorithm == cpu.algorithm
    assert cpu.trainer.device == "cpu"


def test_defaults_written_in_the_recipe_are_those_of_the_settings(compose):
    block = OmegaConf.to_container(compose("+recipe=fapo").fapo, resolve=True)
    judge = JudgeSettings(model="genrm")
    expected = FAPOSettings(judge=judge).model_dump()
    assert block.pop("run_dir").endswith("/fapo")
    for key, value in block.items():
        shown = value if not isinstance(value, dict) else {k: v for k, v in value.items() if k != "model"}
        if isinstance(shown, dict):
            assert shown.items() <= expected[key].items()
        else:
            assert shown == expected[key]


def test_settings_are_overridden_by_their_plain_names(compose):
    config = compose("+recipe=fapo", "fapo.penalty=0.5", "fapo.judge.temperature=0", "fapo.genrm.replicas=4")
    assert (config.fapo.penalty, config.fapo.judge.temperature, config.fapo.genrm.replicas) == (0.5, 0, 4)


@pytest.mark.parametrize("overrides", [["+recipe=fapo"], ["+recipe=fapo", "+recipe/device=cpu"]])
def test_verl_accepts_the_composed_config(compose, overrides):
    from verl.utils.config import validate_config

    sizes = ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.name=vllm",
             "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"]  # fmt: skip
    validate_config(compose(*overrides, *sizes), use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_recipe_file_starts_with_its_package_and_says_how_it_is_used(path):
    lines = path.read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert any("python -m verl.trainer.main_ppo" in line for line in lines[:10])


def test_command_without_a_recipe_composes_as_without_the_plugin(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "all"]
    configs = []
    for plugins in ("auto", "none"):
        environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
        run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr[-2000:]
        configs.append(run.stdout)
    assert configs[0] == configs[1] != ""

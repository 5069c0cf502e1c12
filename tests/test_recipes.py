from __future__ import annotations

import itertools
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from verl_fapo.checks import RECIPES, check_advantages, check_recipe, check_reward, check_sizes, check_trainer
from verl_fapo.demo.profiles import PROFILES
from verl_fapo.errors import SettingsError
from verl_fapo.settings import FAPOSettings, JudgeSettings, read_settings

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "recipes"
TABLE = ROOT / "tools" / "recipe_table.py"


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def overrides_of(recipe: str | None, size: str | None, device: str | None) -> list[str]:
    groups = {"+recipe": recipe, "+recipe/size": size, "+recipe/device": device}
    return [f"{group}={name}" for group, name in groups.items() if name]


Combination = tuple[str | None, str | None, str | None]
SENSIBLE: list[Combination] = [
    (recipe, size, device) for recipe, sizes in RECIPES.items() for size, devices in sizes.items() for device in devices
]
PLAIN_VERL: list[Combination] = [(None, None, device) for device in (None, "gpu", "cpu")]
ALL = itertools.product([None, *names(FOLDER)], [None, *names(FOLDER / "size")], [None, *names(FOLDER / "device")])
OTHERS = [combination for combination in ALL if combination not in SENSIBLE + PLAIN_VERL]


def label(value: object) -> str:
    return "+".join(part for part in value if part) if isinstance(value, tuple) else str(value)


@pytest.fixture
def choose(compose: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Composes as ``compose``, and lets checks see what the command chose, as in a command's process.

    ``alone`` leaves veRL's own config out, which takes most of the time.
    """

    def choose(*overrides: str, alone: bool = False):
        if alone:
            with hydra.initialize_config_module("verl.trainer.config", version_base=None):
                chosen = hydra.compose(overrides=list(overrides), return_hydra_config=True)
        else:
            chosen = compose(*overrides, return_hydra_config=True)
        monkeypatch.setattr(HydraConfig.instance(), "cfg", chosen)
        return chosen

    return choose


def test_fapo_on_a_gpu_is_grpo_with_the_papers_clipping_and_our_manager(compose):
    config = compose("+recipe=fapo")
    actor = config.actor_rollout_ref.actor
    assert config.algorithm.adv_estimator == "grpo"
    assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
    assert (actor.loss_agg_mode, actor.use_kl_loss, actor.entropy_coeff) == ("token-mean", False, 0)
    assert config.algorithm.use_kl_in_reward is False
    assert config.reward.reward_manager.name == "fapo"
    assert config.trainer.v1.trainer_mode == "fapo_sync"
    assert config.trainer.device == "cuda"


def test_fapo_file_is_the_same_on_gpu_and_cpu(compose):
    gpu, cpu = compose("+recipe=fapo"), compose("+recipe=fapo", "+recipe/device=cpu")
    assert gpu.fapo == cpu.fapo and gpu.algorithm == cpu.algorithm
    assert cpu.trainer.device == "cpu"


def test_baseline_differs_from_fapo_in_nothing_but_its_judge(compose):
    fapo, baseline = (compose(f"+recipe={recipe}", "+recipe/size=7b") for recipe in ("fapo", "baseline"))
    assert (baseline.fapo.penalty, baseline.fapo.genrm.placement) == (0, "none")
    baseline.fapo.penalty, baseline.fapo.genrm.placement = fapo.fapo.penalty, fapo.fapo.genrm.placement
    assert baseline == fapo


def test_genrm_differs_from_the_baseline_in_its_reward_and_keeps_checkpoints_that_can_judge(compose):
    baseline, genrm = compose("+recipe=baseline"), compose("+recipe=fapo_genrm")
    assert genrm.reward.reward_manager.name == "fapo_genrm"
    assert "hf_model" in genrm.actor_rollout_ref.actor.checkpoint.save_contents
    genrm.reward.reward_manager.name = baseline.reward.reward_manager.name
    genrm.actor_rollout_ref.actor.checkpoint = baseline.actor_rollout_ref.actor.checkpoint
    assert genrm == baseline


def test_defaults_written_in_the_recipe_are_those_of_the_settings(compose):
    config = compose("+recipe=fapo", "fapo.judge.model=genrm")
    assert config.fapo.run_dir.endswith("/fapo")
    defaults = FAPOSettings(judge=JudgeSettings(model="genrm"), run_dir=config.fapo.run_dir)
    assert read_settings(config) == defaults


def test_unset_penalty_is_1_or_made_from_rho_shift(compose):
    judged = ["+recipe=fapo", "fapo.judge.model=genrm"]
    assert read_settings(compose(*judged)).penalty == 1
    assert read_settings(compose(*judged, "fapo.rho_shift=3")).penalty == 0.5


def test_settings_are_overridden_by_their_plain_names(compose):
    config = compose("+recipe=fapo", "fapo.penalty=0.5", "fapo.judge.temperature=0", "fapo.genrm.replicas=4")
    assert (config.fapo.penalty, config.fapo.judge.temperature, config.fapo.genrm.replicas) == (0.5, 0, 4)


def test_every_file_is_in_a_combination():
    assert set(RECIPES) == set(names(FOLDER))
    assert {size for _, size, _ in SENSIBLE if size} | {"paper"} == set(names(FOLDER / "size"))
    assert {device for _, _, device in SENSIBLE if device} == set(names(FOLDER / "device"))


@pytest.mark.parametrize("combination", SENSIBLE, ids=label)
def test_sensible_combination_composes_and_passes_our_checks_and_verls(combination, choose):
    from verl.utils.config import validate_config

    recipe, _, device = combination
    users = ["actor_rollout_ref.model.path=/m/policy", "data.train_files=/d/a.parquet", "data.val_files=/d/b.parquet"]
    if recipe == "fapo":
        users.append("fapo.judge.model=/m/judge")
    if device is None:
        # What veRL has no default for, and a device's file would say.
        users += ["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    config = choose(*overrides_of(*combination), *users)
    for check in (check_recipe, check_trainer, check_reward, check_advantages, check_sizes):
        check(config)
    validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("combination", PLAIN_VERL, ids=label)
def test_device_goes_with_plain_verl(combination, choose):
    check_recipe(choose(*overrides_of(*combination), alone=True))


@pytest.mark.parametrize("combination", OTHERS, ids=label)
def test_other_combination_is_refused_in_one_line_that_names_a_choice(combination, choose):
    recipe, size, _ = combination
    with pytest.raises(SettingsError) as refused:
        check_recipe(choose(*overrides_of(*combination), alone=True))
    said = str(refused.value)
    assert "\n" not in said
    assert f"recipe/size={size}" in said
    if recipe is None:
        assert "without a recipe" in said and said.partition("; ")[2] != "add "
        fitting = [name for name in RECIPES if size in RECIPES[name]]
        assert all(f"+recipe={name}" in said for name in fitting)
    else:
        assert any(f" {name}" in said.partition(";")[2] for name in filter(None, RECIPES[recipe]))


def test_size_without_a_recipe_ends_the_command_at_once(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+recipe/size=7b"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "verl_fapo: recipe/size=7b without a recipe" in done.stderr


@pytest.mark.parametrize("size", names(FOLDER / "size"))
def test_every_size_brings_the_checks(size, choose):
    assert choose(f"+recipe/size={size}", alone=True).hydra.callbacks.fapo._target_ == "verl_fapo.driver.FAPOCallback"


@pytest.mark.parametrize("combination", [each for each in SENSIBLE if sum(map(bool, each)) > 1], ids=label)
def test_order_on_the_command_line_changes_nothing(combination, choose):
    configs = []
    for order in itertools.permutations(overrides_of(*combination)):
        config = OmegaConf.to_container(choose(*order, alone=True))
        config["hydra"] = config["hydra"]["callbacks"], config["hydra"]["job"].get("env_set")
        configs.append(config)
    assert all(config == configs[0] for config in configs)


def test_order_changes_nothing_in_verls_config_either(compose):
    overrides = overrides_of("fapo", "tiny", "cpu")
    assert compose(*overrides) == compose(*reversed(overrides))


# Of arXiv:2510.22543, by hand; of 500 to 600 steps the fewest.
PAPER = {
    "actor_rollout_ref.model.override_config.max_position_embeddings": {"7b": 32768},
    "data.train_batch_size": {"genrm_4b": 512, "7b": 512, "32b": 512},
    "actor_rollout_ref.rollout.n": {"genrm_4b": 16, "7b": 8, "32b": 8},
    "actor_rollout_ref.actor.ppo_mini_batch_size": {"genrm_4b": 32, "7b": 32, "32b": 32},
    "actor_rollout_ref.rollout.temperature": {"genrm_4b": 1.2, "7b": 1.0, "32b": 1.0},
    "actor_rollout_ref.rollout.top_p": {"genrm_4b": 1.0, "7b": 1.0, "32b": 1.0},
    "actor_rollout_ref.rollout.top_k": {"genrm_4b": -1, "7b": -1, "32b": -1},
    "data.max_prompt_length": {"genrm_4b": 5120, "7b": 2048, "32b": 2048},
    "data.max_response_length": {"genrm_4b": 8192, "7b": 8192, "32b": 20480},
    "fapo.overlong.buffer": {"genrm_4b": 4096, "7b": 4096, "32b": 4096},
    "actor_rollout_ref.actor.optim.lr": {"genrm_4b": 1e-6, "7b": 1e-6, "32b": 1e-6},
    "actor_rollout_ref.actor.optim.lr_warmup_steps": {"genrm_4b": 10, "7b": 10, "32b": 10},
    "actor_rollout_ref.actor.optim.weight_decay": {"genrm_4b": 0.1, "7b": 0.1, "32b": 0.1},
    "actor_rollout_ref.actor.grad_clip": {"genrm_4b": 1.0, "7b": 1.0, "32b": 1.0},
    "actor_rollout_ref.rollout.val_kwargs.temperature": {"genrm_4b": 0.6, "7b": 1.0, "32b": 1.0},
    "actor_rollout_ref.rollout.val_kwargs.top_p": {"genrm_4b": 0.95, "7b": 0.7, "32b": 0.7},
    "trainer.total_training_steps": {"genrm_4b": 500, "7b": 200, "32b": 500},
    "fapo.judge.max_tokens": {"7b": 16384, "32b": 16384},
}


@pytest.mark.parametrize(
    ("recipe", "size"), [("fapo", "7b"), ("fapo", "32b"), ("baseline", "7b"), ("fapo_genrm", "genrm_4b")]
)
def test_size_has_the_papers_values(recipe, size, compose):
    config = compose(*overrides_of(recipe, size, "gpu"))
    expected = {key: values[size] for key, values in PAPER.items() if size in values}
    assert {key: OmegaConf.select(config, key) for key in expected} == expected


def test_tokens_of_a_batch_follow_an_overridden_length(compose):
    config = compose("+recipe=fapo", "+recipe/size=7b", "data.max_response_length=1024")
    rollout = config.actor_rollout_ref.rollout
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 2 * 3072
    assert (rollout.log_prob_max_token_len_per_gpu, rollout.max_num_batched_tokens) == (3 * 3072, 3072)


@pytest.mark.parametrize("name", ["tiny", "judge"])
def test_demo_trains_the_tiny_size(name, compose):
    settings = dict(PROFILES[name].settings)
    assert settings.pop("+recipe/size") == "tiny"
    changed = set(settings) & set(leaves(yaml.safe_load((FOLDER / "size" / "tiny.yaml").read_text())))
    assert changed == ({"data.max_response_length"} if name == "judge" else set()), "critiques are longer than answers"
    assert f" {PROFILES['tiny'].steps} steps" in (FOLDER / "size" / "tiny.yaml").read_text()


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.stem)
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


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """What tools/recipe_table.py defines."""
    return runpy.run_path(str(TABLE))


def test_page_in_the_docs_is_what_the_tool_prints(capsys):
    runpy.run_path(str(TABLE), run_name="__main__")
    assert (ROOT / "docs" / "recipes.md").read_text() == capsys.readouterr().out, f"python {TABLE} > docs/recipes.md"


WIRING = ("defaults", "hydra.", "fapo.run_dir", "fapo.judge.model", "fapo.genrm.placement", "fapo.genrm.replicas",
          "reward.reward_manager.", "trainer.v1.", "actor_rollout_ref.actor.checkpoint.")  # fmt: skip


@pytest.mark.parametrize(
    ("size", "files"),
    [
        ("7b", ["fapo", "size/paper", "size/7b", "device/gpu"]),
        ("32b", ["fapo", "size/paper", "size/32b", "device/gpu"]),
        ("genrm_4b", ["fapo_genrm", "size/paper", "size/genrm_4b", "device/gpu"]),
    ],
)
def test_every_value_of_the_files_stands_in_the_table(size, files, table):
    written = {key for file in files for key in leaves(yaml.safe_load((FOLDER / f"{file}.yaml").read_text()))}
    judges = ("fapo.judge.", "reward.reward_model.") if size == "genrm_4b" else ()
    expected = {key for key in written if not key.startswith((*WIRING, *judges))}
    assert expected <= {row.key for row in table["ROWS"] if size in row.sizes}


def test_value_that_differs_has_a_reason_and_one_that_does_not_has_none(table):
    for size, row in itertools.product(table["SIZES"], table["ROWS"]):
        if size in row.sizes:
            ours = table["our_value"](row, size)
            others = {table["of_size"](value, size) for value in (row.paper, row.authors, row.copy)}
            differs = ours != table["YOURS"] and bool(others - {ours, table["NONE"]})
            assert bool(table["of_size"](row.why, size)) == differs, (row.key, size)


def test_table_says_of_the_paper_what_the_recipes_are_held_to(table):
    papers = {
        row.key: {size: table["of_size"](row.paper, size) for size in row.sizes}
        for row in table["ROWS"]
        if row.key in PAPER
    }
    assert papers.pop("trainer.total_training_steps") == {"7b": 200, "32b": "500 to 600", "genrm_4b": 500}
    assert papers == {key: values for key, values in PAPER.items() if key != "trainer.total_training_steps"}

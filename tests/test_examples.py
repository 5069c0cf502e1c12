from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PATHS = {"MODEL_PATH": "/m/policy", "TRAIN_FILE": "/d/a.parquet", "TEST_FILE": "/d/b.parquet"}
JUDGED = {**PATHS, "GENRM_PATH": "/m/judge"}
# What each needs, and the size it trains where none is named.
NEEDS = {
    "run_fapo.sh": (JUDGED, "7b"),
    "run_baseline.sh": (PATHS, "7b"),
    "run_genrm.sh": (PATHS, "genrm_4b"),
}
RECIPES = {"run_fapo.sh": "fapo", "run_baseline.sh": "baseline", "run_genrm.sh": "fapo_genrm"}
KEYS = {
    "MODEL_PATH": "actor_rollout_ref.model.path",
    "GENRM_PATH": "fapo.judge.model",
    "TRAIN_FILE": "data.train_files",
    "TEST_FILE": "data.val_files",
}


@pytest.fixture
def run(tmp_path) -> Callable[..., subprocess.CompletedProcess]:
    """What an example would run: its `python` is one that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def run(name: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        command = ["bash", str(EXAMPLES / name), "trainer.total_training_steps=3"]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)

    return run


def overrides(done: subprocess.CompletedProcess) -> list[str]:
    assert done.returncode == 0, done.stderr
    option, module, *overrides = done.stdout.splitlines()
    assert (option, module) == ("-m", "verl.trainer.main_ppo")
    return overrides


def test_every_example_is_tested():
    assert sorted(NEEDS) == sorted(path.name for path in EXAMPLES.glob("run_*.sh"))


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        pytest.param("run_fapo.sh", {}, id="fapo"),
        pytest.param("run_fapo.sh", {"SIZE": "32b", "TRAIN_GPUS": "8", "NNODES": "8"}, id="fapo 32b"),
        pytest.param("run_baseline.sh", {}, id="baseline"),
        pytest.param("run_baseline.sh", {"SIZE": "32b"}, id="baseline 32b"),
        pytest.param("run_genrm.sh", {}, id="genrm"),
    ],
)
def test_example_composes_and_passes_our_checks_and_verls(name, variables, run, compose, monkeypatch):
    from hydra.core.hydra_config import HydraConfig
    from verl.utils.config import validate_config

    from verl_fapo.checks import check_recipe, check_reward, check_sizes, check_trainer

    needed, size = NEEDS[name]
    config = compose(*overrides(run(name, {**needed, **variables})), return_hydra_config=True)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", config)
    choices = config.hydra.runtime.choices
    chosen = (choices["recipe"], choices["recipe/size"], choices["recipe/device"])
    assert chosen == (RECIPES[name], variables.get("SIZE", size), "gpu")
    for check in (check_recipe, check_trainer, check_reward, check_sizes):
        check(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    assert {variable: OmegaConf.select(config, KEYS[variable]) for variable in needed} == needed
    assert config.trainer.total_training_steps == 3, "arguments of the script come last"
    assert config.trainer.n_gpus_per_node == int(variables.get("TRAIN_GPUS", 4 if name == "run_fapo.sh" else 8))
    assert config.trainer.nnodes == int(variables.get("NNODES", 1))


@pytest.mark.parametrize(("name", "variable"), [(name, needed) for name in NEEDS for needed in NEEDS[name][0]])
def test_one_variable_swaps_a_model_or_a_file(name, variable, run):
    needed, _ = NEEDS[name]
    before, after = (overrides(run(name, {**needed, **changes})) for changes in ({}, {variable: "/m/other"}))
    assert [line for line in after if line not in before] == [f"{KEYS[variable]}=/m/other"]


@pytest.mark.parametrize(("name", "missing"), [(name, needed) for name in NEEDS for needed in NEEDS[name][0]])
def test_missing_variable_is_named(name, missing, run):
    needed, _ = NEEDS[name]
    done = run(name, {key: value for key, value in needed.items() if key != missing})
    assert done.returncode != 0
    assert missing in done.stderr and done.stdout == ""


def test_runs_of_two_recipes_or_sizes_do_not_resume_each_other(run):
    runs = [(name, {}) for name in NEEDS] + [("run_fapo.sh", {"SIZE": "32b"})]
    arguments = [overrides(run(name, {**NEEDS[name][0], **variables})) for name, variables in runs]
    folders = [line for lines in arguments for line in lines if line.startswith("trainer.default_local_dir=")]
    assert len(set(folders)) == len(runs)

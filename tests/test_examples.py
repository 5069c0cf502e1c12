from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PATHS = {"MODEL_PATH": "/m/policy", "GENRM_PATH": "/m/judge", "TRAIN_FILE": "/d/a.parquet", "TEST_FILE": "/d/b.parquet"}


@pytest.fixture
def command_of(tmp_path):
    """What an example would run: its `python` is one that prints its arguments."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)

    def command_of(name: str, **variables: str) -> subprocess.CompletedProcess:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        return subprocess.run(
            ["bash", str(EXAMPLES / name), "fapo.penalty=0.5"], capture_output=True, text=True, env=environment
        )

    return command_of


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("run_*.sh")))
def test_example_composes_and_one_variable_swaps_the_judge(name, command_of, compose):
    from verl.utils.config import validate_config

    from verl_fapo.checks import check_sizes

    done = command_of(name, **PATHS)
    module, *overrides = done.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    config = compose(*overrides)
    assert config.fapo.judge.model == "/m/judge"
    assert config.actor_rollout_ref.model.path == "/m/policy"
    assert config.fapo.penalty == 0.5, "arguments of the script come last"
    check_sizes(config)
    validate_config(config, use_reference_policy=False, use_critic=False)
    other = command_of(name, **{**PATHS, "GENRM_PATH": "/m/other"}).stdout
    assert [line for line in other.splitlines() if line not in done.stdout.splitlines()] == [
        "fapo.judge.model=/m/other"
    ]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("run_*.sh")))
@pytest.mark.parametrize("missing", sorted(PATHS))
def test_example_names_a_missing_variable(name, missing, command_of):
    done = command_of(name, **{key: value for key, value in PATHS.items() if key != missing})
    assert done.returncode != 0
    assert missing in done.stderr and done.stdout == ""

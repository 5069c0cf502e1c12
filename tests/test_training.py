"""Real trainings: veRL's trainer, Ray, vLLM for policy and judge, and weights that are updated."""

from __future__ import annotations

import pytest

from tests.conftest import Training, read_lines
from verl_fapo.data import gsm8k_rows, write_parquet

VARIANTS = [
    pytest.param([], False, id="sync, with a fork server of its own"),
    pytest.param(["hydra.callbacks.device.fork_server=false"], False, id="sync, without fork server"),
    pytest.param(["trainer.v1.trainer_mode=fapo_colocate_async"], True, id="colocate_async"),
    pytest.param(
        ["trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=3", "fapo.penalty=0.5"],
        True,
        id="two FSDP2 ranks and two rollout replicas",
    ),
]


@pytest.mark.parametrize(("overrides", "warm"), VARIANTS)
def test_training_judges_right_answers_and_its_folder_tells_the_whole_story(train, overrides, warm):
    training = train(*overrides, warm=warm)
    assert training.wait() == 0, training.log[-3000:]
    penalty = 0.5 if "fapo.penalty=0.5" in overrides else 1.0
    check_run_folder(training, penalty=penalty)
    left = training.leftovers()
    if "hydra.callbacks.device.fork_server=false" in overrides:  # then nobody removes semaphores of killed processes
        left = [name for name in left if not name.startswith("sem.mp-")]
    assert left == []


def check_run_folder(training: Training, *, penalty: float) -> None:
    summary = training.run.summary
    critiques = read_lines(training.run.root / "critiques.jsonl")
    rollouts = read_lines(training.run.root / "rollouts.jsonl")
    steps = [line for line in training.run.metrics() if line["step"] > 0]

    assert summary["status"] == "completed"
    assert summary["steps"] == 2 == len(steps)
    assert not (training.run.root / "parts").exists()
    assert summary["rollouts"] == sum(not rollout["validation"] for rollout in rollouts)
    assert summary["rollouts"] >= 32, "two steps of four prompts with four rollouts"
    assert summary["validation_rollouts"] == 16
    assert summary["judged"] == summary["correct"] == len(critiques) > 0, "right answers, and only they, are judged"
    assert summary["flawed"] == sum(critique["verdict"] == "flawed" for critique in critiques)
    assert 0 < summary["flawed"] < summary["judged"], "the judge says both"
    assert summary["unknown"] == 0
    assert summary["accuracy_before"] is not None and summary["accuracy_after"] is not None
    assert 0 < summary["seconds_to_first_rollout"] < summary["seconds_total"]
    for critique in critiques:
        assert critique["problem"].startswith("What is ")
        assert critique["solution"].endswith("\\boxed{7}") and critique["ground_truth"] == "7"
        assert critique["reward"] == (1.0 - penalty if critique["verdict"] == "flawed" else 1.0)
    wrong = [rollout for rollout in rollouts if not rollout["correct"]]
    assert wrong and all(rollout["reward"] == -1.0 and rollout["verdict"] is None for rollout in wrong)
    assert len({rollout["id"] for rollout in rollouts}) == len(rollouts)
    for step in steps:
        assert step["actor/grad_norm"] > 0, "the policy learns"
        assert step["fapo/judged"] == step["fapo/accuracy"] * 16


def test_training_on_gsm8k(train, tmp_path, shared_data):
    rows = list(gsm8k_rows(shared_data / "gsm8k_train.jsonl.gz", split="train", limit=1000))
    rows = [row for row in rows if row["reward_model"]["ground_truth"] in ("7", "8")]
    assert len(rows) >= 8
    write_parquet(rows, tmp_path / "gsm8k.parquet")
    training = train(f"data.train_files={tmp_path / 'gsm8k.parquet'}", "data.max_prompt_length=1024")
    assert training.wait() == 0, training.log[-3000:]
    summary = training.run.summary
    critiques = read_lines(training.run.root / "critiques.jsonl")
    assert summary["rollouts"] == 32
    assert summary["judged"] == summary["correct"] == len(critiques) > 0
    assert {critique["problem"] for critique in critiques} <= {row["extra_info"]["question"] for row in rows}
    assert all(critique["answer"] == critique["ground_truth"] for critique in critiques)

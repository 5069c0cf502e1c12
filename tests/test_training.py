"""Real trainings: veRL's trainer, Ray, vLLM for policy and judge, and weights that are updated."""

from __future__ import annotations

import random
import time
import zlib

import pytest

from tests.conftest import Training, grpo, read_lines
from verl_fapo.critique import split_paragraphs
from verl_fapo.data import gsm8k_rows, write_parquet
from verl_fapo.templates import judge_prompt

METRICS = {
    f"fapo/{name}"
    for name in (
        "alpha", "beta", "gamma", "rho", "phase", "accuracy", "flawed_rate", "groups_without_variance", "judged",
        "flawed", "unknown", "unknown_rate", "from_memory", "judge_tokens", "wait_seconds", "judge_seconds/p50",
        "judge_seconds/p99", "reward_mean", "reward_std", "reward_mean_predicted", "reward_std_predicted",
    )
}  # fmt: skip

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
    rewards = {rollout["id"]: rollout["reward"] for rollout in rollouts if not rollout["validation"]}
    advantages = training.run.advantages()
    trained = {name: rewards[name] for name in advantages}
    assert advantages == pytest.approx(grpo(trained), abs=1e-4), "with all verdicts known it is veRL's GRPO"
    for step in steps:
        assert step["actor/grad_norm"] > 0, "the policy learns"
        assert step["fapo/judged"] == step["fapo/accuracy"] * 16
        assert step.keys() >= METRICS
        assert step["fapo/reward_mean"] == pytest.approx(step["fapo/reward_mean_predicted"])
        assert step["fapo/reward_std"] == pytest.approx(step["fapo/reward_std_predicted"])
        assert step["fapo/alpha"] + step["fapo/beta"] + step["fapo/gamma"] == pytest.approx(1)
    before = steps[-1] | training.run.metrics()[0]
    assert before["fapo_validation/sums/accuracy"] == summary["accuracy_before"]


def test_baseline_needs_no_judge_and_is_verls_grpo_on_outcomes(train):
    training = train("ray_kwargs.ray_init.num_gpus=1", "fapo.judge.model=null", recipe="baseline")
    assert training.wait() == 0, training.log[-3000:]
    rollouts = [line for line in read_lines(training.run.root / "rollouts.jsonl") if not line["validation"]]
    assert {(line["correct"], line["reward"]) for line in rollouts} == {(True, 1.0), (False, -1.0)}
    assert training.run.advantages() == pytest.approx(grpo({line["id"]: line["reward"] for line in rollouts}), abs=1e-4)
    assert training.run.summary["judged"] == 0
    assert not any("fapo/flawed_rate" in step for step in training.run.metrics())
    assert training.leftovers() == []


def test_neutral_leaves_rollouts_without_verdict_out_of_their_groups(train, judge_server):
    def reply(prompt: str) -> tuple[int, str]:
        return 200, ("I can not say.", "\\boxed{0}", "\\boxed{-1}")[zlib.crc32(prompt.encode()) % 3]

    training = train(*judge_server(reply).overrides(), "fapo.judge.on_unknown=neutral", "fapo.judge.max_unknown_rate=1")
    assert training.wait() == 0, training.log[-3000:]
    rollouts = [line for line in read_lines(training.run.root / "rollouts.jsonl") if not line["validation"]]
    unknown = {line["id"] for line in rollouts if line["verdict"] == "unknown"}
    assert 0 < len(unknown) < sum(line["judged"] for line in rollouts)
    twin = grpo({line["id"]: line["reward"] for line in rollouts}, left_out=unknown)
    assert training.run.advantages() == pytest.approx(twin, abs=1e-4)


def test_resumed_run_asks_nothing_that_was_answered(train, judge_server):
    def reply(prompt: str) -> tuple[int, str]:
        time.sleep(0.3)
        return 200, "\\boxed{-1}"

    judge = judge_server(reply)
    every_step = ["trainer.save_freq=1", "trainer.test_freq=-1", "trainer.val_before_train=false"]
    every_step.append("fapo.memory.path=kept.sqlite")
    training = train(*judge.overrides(), *every_step, "trainer.total_training_steps=50")
    training.wait_for(lambda: len(training.run.metrics()) >= 2)
    time.sleep(random.uniform(0, 2))
    for process in training.processes():
        process.kill()
    training.process.wait()
    before = list(training.run.judged())
    steps = len(training.run.metrics())
    training = train(*judge.overrides(), *every_step, f"trainer.total_training_steps={steps + 2}")
    assert training.wait() == 0, training.log[-3000:]
    assert training.run.summary["status"] == "completed"
    after = list(training.run.judged())
    prompts = {judge_prompt(line["problem"], "7", split_paragraphs(line["solution"])) for line in [*before, *after]}
    asked_again = {prompt for prompt in prompts if judge.asked[prompt] > 1}
    answered = {judge_prompt(line["problem"], "7", split_paragraphs(line["solution"])) for line in before}
    assert not asked_again & answered
    assert {line["id"] for line in before} <= {line["id"] for line in after}, "nothing is lost"
    assert len({line["id"] for line in after}) == len(after), "nothing is doubled"
    assert any(line["from_memory"] for line in after if line["id"] not in {line["id"] for line in before})
    assert (training.folder / "kept.sqlite").is_file(), "in the folder of the command, not of a worker"


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

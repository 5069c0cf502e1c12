from __future__ import annotations

import random
import statistics
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_fapo import neutral
from verl_fapo.neutral import leave_out, neutral_advantages, split_groups

ESTIMATORS = [
    pytest.param([], id="GRPO"),
    pytest.param(["algorithm.norm_adv_by_std_in_grpo=false"], id="GRPO without std"),
    pytest.param(["algorithm.adv_estimator=rloo"], id="RLOO"),
]


def twin(scores: dict[str, float], unknown: set[str], config) -> dict[str, float]:
    """Advantages by key, written plainly."""
    groups = defaultdict(list)
    for key in scores:
        if key not in unknown:
            groups[key.split("_")[0]].append(scores[key])
    advantages = {}
    for key, score in scores.items():
        group = groups[key.split("_")[0]]
        if key in unknown or len(group) < 2:
            advantages[key] = 0.0
        elif config.algorithm.adv_estimator == "rloo":
            advantages[key] = score - (sum(group) - score) / (len(group) - 1)
        elif config.algorithm.norm_adv_by_std_in_grpo:
            advantages[key] = (score - statistics.mean(group)) / (statistics.stdev(group) + 1e-6)
        else:
            advantages[key] = score - statistics.mean(group)
    return advantages


@st.composite
def steps(draw) -> tuple[dict[str, float], set[str]]:
    """Scores by key, in any order, and who is unknown."""
    scores = {}
    for group in range(draw(st.integers(1, 4))):
        for session in range(draw(st.integers(1, 6))):
            scores[f"u{group}_{session}_0"] = draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
    keys = draw(st.permutations(list(scores)))
    return {key: scores[key] for key in keys}, set(draw(st.lists(st.sampled_from(keys), unique=True)))


@pytest.mark.parametrize("overrides", ESTIMATORS)
def test_unknown_rollouts_have_advantage_0_and_the_others_that_of_a_group_without_them(compose, overrides):
    config = compose("+recipe=fapo", *overrides)

    @settings(max_examples=100, deadline=None)
    @given(steps())
    def check(step: tuple[dict[str, float], set[str]]) -> None:
        scores, unknown = step
        keys = list(scores)
        affected, compared = split_groups(keys, {key.rpartition("_")[0] for key in unknown})
        rng = random.Random(1)
        lengths = [rng.randint(1, 5) for _ in affected]
        rewards, mask = torch.zeros(len(affected), 5), torch.zeros(len(affected), 5)
        for row, (key, length) in enumerate(zip(affected, lengths, strict=True)):
            rewards[row, length - 1] = scores[key]
            mask[row, :length] = 1
        advantages = neutral_advantages(rewards, mask, keys=affected, compared=compared, config=config)
        expected = twin(scores, unknown, config)
        for row, (key, length) in enumerate(zip(affected, lengths, strict=True)):
            assert advantages[row, :length].tolist() == pytest.approx([expected[key]] * length, abs=1e-4)
            assert advantages[row, length:].tolist() == [0.0] * (5 - length)
        groups_of_unknown = {key.split("_")[0] for key in unknown}
        assert set(affected) == {key for key in keys if key.split("_")[0] in groups_of_unknown}

    check()


@pytest.mark.parametrize(
    ("unknown", "affected", "compared"),
    [
        pytest.param(set(), [], set(), id="none"),
        pytest.param({"a_1"}, ["a_0_0", "a_1_0", "a_2_0"], {"a_0_0", "a_2_0"}, id="one of three"),
        pytest.param({"a_0", "a_1"}, ["a_0_0", "a_1_0", "a_2_0"], set(), id="one is left"),
        pytest.param({"b_0", "b_1"}, ["b_0_0", "b_1_0"], set(), id="a whole group"),
        pytest.param({"c_0"}, [], set(), id="of another step"),
    ],
)
def test_only_groups_that_hold_an_unknown_rollout_are_touched(unknown, affected, compared):
    assert split_groups(["a_0_0", "b_0_0", "a_1_0", "b_1_0", "a_2_0"], unknown) == (affected, compared)


def test_rollout_of_several_trajectories_is_left_out_or_compared_as_one():
    keys = ["a_0_0", "a_0_1", "a_1_0", "a_2_0"]
    assert split_groups(keys, {"a_0"}) == (keys, {"a_1_0", "a_2_0"})
    assert split_groups(keys, {"a_1", "a_2"}) == (keys, set())


@pytest.mark.parametrize(
    ("overrides", "field"),
    [([], "rm_scores"), (["algorithm.use_kl_in_reward=true"], "token_level_rewards")],
    ids=["rewards as scored", "rewards less KL"],
)
def test_advantages_of_the_affected_groups_are_written_and_no_others(compose, monkeypatch, overrides, field):
    from tensordict import TensorDict

    batch = SimpleNamespace(keys=["a_0_0", "b_0_0", "a_1_0", "a_2_0", "b_1_0"], partition_id="train")
    rewards = torch.nested.nested_tensor([[0.0, 1.0], [-1.0], [0.0, 0.0, 1.0]], layout=torch.jagged)
    mask = torch.nested.nested_tensor([[1, 1], [1], [1, 1, 1]], layout=torch.jagged)

    def get(*, keys, partition_id, select_fields):
        assert (keys, partition_id) == (["a_0_0", "a_1_0", "a_2_0"], "train")
        assert set(select_fields) == {"response_mask", field}
        return TensorDict({field: rewards, "response_mask": mask}, batch_size=3)

    queue = mock.Mock(kv_batch_get=get)
    monkeypatch.setattr(neutral, "tq", queue)
    leave_out(batch, {"a_2"}, compose("+recipe=fapo", *overrides))
    ((_, written),) = queue.kv_batch_put.call_args_list
    assert (written["keys"], written["partition_id"]) == (["a_0_0", "a_1_0", "a_2_0"], "train")
    first, second, third = written["fields"]["advantages"].unbind()
    half = pytest.approx(1 / 2**0.5, abs=1e-4)
    assert (first.tolist(), (-second).tolist(), third.tolist()) == ([half] * 2, [half], [0.0] * 3)
    assert [row.tolist() for row in written["fields"]["returns"].unbind()] == [
        row.tolist() for row in written["fields"]["advantages"].unbind()
    ]


def test_with_nothing_unknown_nothing_is_read_or_written(compose, monkeypatch):
    queue = mock.Mock()
    monkeypatch.setattr(neutral, "tq", queue)
    leave_out(SimpleNamespace(keys=["a_0_0", "a_1_0"], partition_id="train"), set(), compose("+recipe=fapo"))
    assert queue.mock_calls == []

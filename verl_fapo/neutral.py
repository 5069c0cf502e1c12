"""``fapo.judge.on_unknown=neutral``: a rollout without a verdict says nothing about the others of its group.

It is left out of the group's mean and std, and has advantage 0; so has the only one that is then left. Groups in which
all verdicts are known are not touched. Keys are veRL's, ``uid_session_index``; ids ``uid_session``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.workers.utils.padding import response_to_nested


def leave_out(batch: KVBatchMeta, unknown: Collection[str], config: DictConfig) -> None:
    """Give the groups that hold rollouts of ``unknown``, by id, their advantages anew; the others keep theirs."""
    affected, compared = split_groups(batch.keys, unknown)
    if not affected:
        return
    rewards = "token_level_rewards" if config.algorithm.use_kl_in_reward else "rm_scores"
    data = tq.kv_batch_get(keys=affected, partition_id=batch.partition_id, select_fields=["response_mask", rewards])
    padded = data.to_padded_tensor()
    advantages = neutral_advantages(
        padded[rewards], padded["response_mask"], keys=affected, compared=compared, config=config
    )
    nested = response_to_nested(advantages, data["response_mask"])
    fields = TensorDict({"advantages": nested, "returns": nested.clone()}, batch_size=len(affected))
    tq.kv_batch_put(keys=affected, partition_id=batch.partition_id, fields=fields)


def split_groups(keys: Sequence[str], unknown: Collection[str]) -> tuple[list[str], set[str]]:
    """The keys of groups that hold a rollout of ``unknown``, and those of them that are still compared."""
    groups: dict[str, set[str]] = {}
    for key in keys:
        groups.setdefault(_group(key), set()).add(_id(key))
    affected = [key for key in keys if not groups[_group(key)].isdisjoint(unknown)]
    compared = {key for key in affected if _id(key) not in unknown and len(groups[_group(key)].difference(unknown)) > 1}
    return affected, compared


def neutral_advantages(
    rewards: Tensor, response_mask: Tensor, *, keys: Sequence[str], compared: Collection[str], config: DictConfig
) -> Tensor:
    """veRL's advantages of the rows whose keys are in ``compared``, computed without the others, which have 0.

    Args:
        rewards: [B, T] rewards of the tokens.
        response_mask: [B, T], 1 for the response's own tokens.
        keys: [B] of the rows.
        config: veRL's.

    Returns:
        [B, T], of the dtype of ``rewards``.
    """
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories  # late: it imports our trainer

    advantages = torch.zeros_like(rewards)
    rows = [row for row, key in enumerate(keys) if key in compared]
    if not rows:
        return advantages
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": rewards[rows], "response_mask": response_mask[rows]}, batch_size=len(rows)
        ),
        non_tensor_batch={"uid": np.array([_group(keys[row]) for row in rows], dtype=object)},
    )
    algorithm = config.algorithm
    data = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[keys[row] for row in rows],
        adv_estimator=algorithm.adv_estimator,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        num_repeat=config.actor_rollout_ref.rollout.n,
        norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
        config=algorithm,
    )
    advantages[rows] = data.batch["advantages"].to(advantages.dtype)
    return advantages


def _id(key: str) -> str:
    return key.rpartition("_")[0]


def _group(key: str) -> str:
    return key.rsplit("_", 2)[0]

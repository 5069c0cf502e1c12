"""veRL's three trainers with FAPO in them: the GenRM, the step's metrics, the run folder and the watchdog."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf, open_dict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer

from verl_fapo.critique import UnknownReason
from verl_fapo.errors import JudgeError, StalledError
from verl_fapo.genrm import GenRMGroup
from verl_fapo.metrics import (
    Extras,
    JudgeHealth,
    ScoredRollout,
    by_data_source,
    fapo_metrics,
    fapo_validation,
    genrm_metrics,
    judge_quality,
    wait_seconds,
)
from verl_fapo.neutral import leave_out
from verl_fapo.rollout import VALIDATION_KEY
from verl_fapo.run_folder import RunFolder
from verl_fapo.settings import read_settings
from verl_fapo.watchdog import Watchdog, is_dead, is_gone

logger = logging.getLogger(__name__)


class FAPOTrainer:
    """What FAPO adds to a veRL trainer; comes before one of them in a class's bases."""

    twin: ClassVar[str]
    """Name of the veRL trainer underneath."""

    def __init__(self, config: DictConfig) -> None:
        self.settings = settings = read_settings(config)
        self.run_folder = RunFolder(settings.run_dir)
        self.genrm = GenRMGroup(settings)
        self.judge_health = JudgeHealth(settings.judge.max_unknown_rate, settings.judge.above_max_unknown_rate)
        self.watchdog = Watchdog(
            self.run_folder,
            servers=lambda: [*self._rollout_server_addresses(), *self.genrm.replicas],
            is_dead=self._is_dead,
            lost=self._lost,
            stall_seconds=settings.stall_seconds,
        )
        self._step_rollouts: list[ScoredRollout] = []
        self._step_wait_seconds = 0.0
        self._on_unknown = settings.judge.on_unknown if settings.penalty else "keep"  # penalty 0 only logs
        self._trains_judge = config.reward.reward_manager.name == "fapo_genrm"
        self._training = False
        with open_dict(config):
            # veRL branches on the literal names of its own modes.
            config.trainer.v1.trainer_mode = self.twin
            # The reward workers may run in another working directory.
            config.fapo.run_dir = str(self.run_folder.root)
            if path := settings.memory.path:
                config.fapo.memory.path = str(Path(path).expanduser().absolute())
        with self._failure_noted():
            super().__init__(config)

    def _setup(self) -> None:
        self.watchdog.start()
        with self._failure_noted():
            self.genrm.start_router(self.config.reward.reward_model.rollout)
            # From here on the judge is an address, to the reward workers that the next lines start.
            self._set("judge.model", self.genrm.model)
            self._set("memory.checkpoint", self.genrm.checkpoint)
            if self.genrm.endpoints:
                self._set("genrm.placement", "external")
                self._set("genrm.endpoints", list(self.genrm.endpoints))
            super()._setup()
            self.genrm.wait_until_ready()

    def _set(self, name: str, value: Any) -> None:
        OmegaConf.update(self.config, f"fapo.{name}", value, force_add=True)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        manager = self.resource_pool_manager
        create_pools = manager.create_resource_pool

        def create_pools_and_start_genrm() -> None:
            create_pools()
            # The trainer's devices must lie together; the GenRM's replicas take theirs from what is left, and load
            # their weights while the trainer's workers do.
            for pool in manager.resource_pool_dict.values():
                pool.get_placement_groups(device_name=self.config.trainer.device)
            self.genrm.start_replicas(self.config.reward.reward_model.rollout)

        manager.create_resource_pool = create_pools_and_start_genrm

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        self.val_dataloader.collate_fn = partial(collate_validation, self.val_dataloader.collate_fn)

    def fit(self, agent_loop_manager: Any) -> None:
        try:
            with self._failure_noted():
                super().fit(agent_loop_manager)
        finally:
            self.watchdog.stop()
            self.genrm.stop()

    def on_train_begin(self) -> None:
        self._training = True
        super().on_train_begin()

    def _validate(self) -> dict[str, float]:
        metrics = super()._validate()
        if not self._training:
            self._record(self.run_folder.log_metrics, metrics)
        return metrics

    def _val_metrics_update(
        self, data_sources: list[str], sample_uids: list[str], infos: dict[str, list], *args: Any, **options: Any
    ) -> dict[str, float]:
        columns = {name: infos[name] for name in ("reward", "acc") if name in infos}  # veRL averages whatever it gets
        metrics = super()._val_metrics_update(data_sources, sample_uids, columns, *args, **options)
        names = [name for name in infos if name != "reward"]
        rows = [dict(zip(names, row, strict=True)) for row in zip(*(infos[name] for name in names), strict=True)]
        scored = [(source, row) for source, row in zip(data_sources, rows, strict=False) if None not in row.values()]
        summarise = judge_quality if self._trains_judge else fapo_validation
        return metrics | by_data_source(summarise, scored)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        # Before the update: a step that a broken judge scored is not learned from.
        rollouts = scored_rollouts(batch)
        self._step_rollouts += rollouts
        if self._trains_judge:  # it may be invalid as often as it likes, its rows may not
            errors = (rollout.extras["reason"] == UnknownReason.ERROR for rollout in rollouts)
            self._check_judge({"judged": 1.0, "unknown": float(error)} for error in errors)
        else:
            self._step_wait_seconds += wait_seconds(rollouts)
            self._check_judge(rollout.extras for rollout in rollouts)
        batch = super()._compute_advantage(batch, metrics)
        if self._on_unknown == "neutral":
            unknown = {rollout.id for rollout in rollouts if rollout.extras["unknown"]}
            leave_out(batch, unknown, self.config)
        self._record(self.run_folder.log_advantages, advantages_by_id(batch))
        return batch

    def _check_judge(self, extras: Iterable[Extras]) -> None:
        try:
            self.judge_health.check(extras)
        except JudgeError as exc:
            dead = "".join(f"; the GenRM replica at {server} is dead" for server in self._dead_judges())
            raise JudgeError(f"{exc}{dead}") from exc

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict, timing_raw: dict, global_steps: int, epoch: int):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)
        metrics.update(self._fapo_metrics(self._step_rollouts))
        self._step_rollouts, self._step_wait_seconds = [], 0.0
        self._record(self.run_folder.log_metrics, metrics)

    def _fapo_metrics(self, rollouts: list[ScoredRollout]) -> dict[str, float]:
        if self._trains_judge:
            return genrm_metrics(rollouts)
        metrics = fapo_metrics(rollouts, penalty=self.settings.penalty, on_unknown=self._on_unknown)
        return metrics | {"fapo/wait_seconds": self._step_wait_seconds}

    def _record(self, log: Callable[[int, dict[str, float]], None], values: dict[str, float]) -> None:
        try:
            log(self.global_steps, values)
        except OSError:  # a full disk is no reason to stop training
            logger.exception("verl_fapo could not record step %d", self.global_steps)

    def _rollout_server_addresses(self) -> list[str]:
        return [address for manager in self._rollout_server_managers() for address in manager.server_addresses]

    def _is_dead(self, server: str) -> bool:
        judge = server in self.genrm.replicas
        engine = self.config.fapo.genrm.engine if judge else self.config.actor_rollout_ref.rollout.name
        # SGLang answers /health by generating, which must not happen while its weights are away.
        return is_dead(server) if engine == "vllm" else is_gone(server)

    def _lost(self, server: str) -> None:
        if server not in self.genrm.replicas:
            raise StalledError(f"the rollout server at {server} died; its error is in Ray's worker logs")
        self.genrm.drop(server)

    def _dead_judges(self) -> list[str]:
        return [server for server in self.genrm.replicas if self._is_dead(server)]

    @contextlib.contextmanager
    def _failure_noted(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            with contextlib.suppress(OSError):  # a full disk must not hide the cause
                self.run_folder.fail(f"{type(exc).__name__}: {exc}")
            raise


def scored_rollouts(batch: KVBatchMeta) -> list[ScoredRollout]:
    """The rollouts of a batch that our manager scored, without veRL's padding.

    One whose agent loop made several sequences counts once, by its last; one with a reward of its own does not.
    """
    keys = real_keys(batch)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields", "rm_scores"])
    rewards = data["rm_scores"].sum(dim=1).tolist()
    scored = [
        ScoredRollout(key=key, reward=reward, extras=extras)
        for key, reward, fields in zip(keys, rewards, data["extra_fields"], strict=True)
        if "judged" in (extras := fields.get("reward_extra_info") or {})
    ]
    return [*{rollout.id: rollout for rollout in sorted(scored, key=lambda rollout: rollout.index)}.values()]


def advantages_by_id(batch: KVBatchMeta) -> dict[str, float]:
    """Mean advantage over the tokens of each rollout, by its id in the run folder."""
    keys = real_keys(batch)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["advantages", "response_mask"])
    mask = data["response_mask"]
    # Select, then compute: what is outside the mask may be anything.
    return {
        key.rpartition("_")[0]: float(row[own.bool()].mean()) if own.any() else 0.0
        for key, row, own in zip(keys, data["advantages"].unbind(), mask.unbind(), strict=True)
    }


def real_keys(batch: KVBatchMeta) -> list[str]:
    """The keys of what is no padding."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def collate_validation(collate: Callable[[list[dict]], dict[str, Any]], rows: list[dict]) -> dict[str, Any]:
    """A batch of rows that say of themselves that they are for validation."""
    return {**collate(rows), VALIDATION_KEY: np.full(len(rows), True, dtype=object)}


@register_trainer("fapo_sync")
class FAPOTrainerSync(FAPOTrainer, PPOTrainerSync):
    """Rollout, then update, on the same devices."""

    twin = "sync"


@register_trainer("fapo_colocate_async")
class FAPOTrainerColocateAsync(FAPOTrainer, PPOTrainerColocateAsync):
    """The same devices, with rollouts that may go on over an update."""

    twin = "colocate_async"


@register_trainer("fapo_separate_async")
class FAPOTrainerSeparateAsync(FAPOTrainer, PPOTrainerSeparateAsync):
    """Rollout and update on devices of their own."""

    twin = "separate_async"

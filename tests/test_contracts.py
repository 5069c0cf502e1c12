"""What we rely on in veRL, vLLM and Hydra: a new release that changes it fails here, by name."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


SIGNATURES = [
    # where, what, parameters that must be there
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_metrics",
     ["self", "batch", "metrics", "timing_raw", "global_steps", "epoch"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._compute_advantage", ["self", "batch", "metrics"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._setup", ["self"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._validate", ["self"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer.fit", ["self", "agent_loop_manager"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer.on_train_begin", ["self"]),
    ("verl.trainer.ppo.v1.trainer_base:PPOTrainer._rollout_server_managers", ["self"]),
    ("verl.experimental.reward_loop.reward_manager.base:RewardManagerBase.__init__",
     ["self", "config", "tokenizer", "compute_score"]),
    ("verl.workers.rollout.replica:RolloutReplica.__init__",
     ["self", "replica_rank", "config", "model_config", "gpus_per_node", "is_reward_model", "name_suffix"]),
    ("verl.workers.rollout.replica:RolloutReplica.init_standalone", ["self"]),
    ("verl.utils.distributed:initialize_global_process_group_ray", ["timeout_second", "backend"]),
    ("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", ["layer", "remove_weight"]),
]  # fmt: skip


@pytest.mark.parametrize(("where", "expected"), SIGNATURES, ids=[where for where, _ in SIGNATURES])
def test_signature(where, expected):
    module, _, path = where.partition(":")
    target = __import__(module, fromlist=["_"])
    for name in path.split("."):
        target = getattr(target, name)
    found = parameters(target)
    assert [name for name in expected if name not in found] == []


def test_our_names_are_in_verls_registries_after_import():
    import verl.trainer.ppo.v1 as v1
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.v1 import get_trainer_cls

    twins = {
        "fapo_sync": v1.PPOTrainerSync,
        "fapo_colocate_async": v1.PPOTrainerColocateAsync,
        "fapo_separate_async": v1.PPOTrainerSeparateAsync,
    }
    for name, twin in twins.items():
        trainer = get_trainer_cls(name)
        assert issubclass(trainer, twin)
        assert get_trainer_cls(trainer.twin) is twin
    assert get_reward_manager_cls("fapo").__name__ == "FAPORewardManager"


def test_verl_branches_on_the_literal_mode_sync():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert 'self.trainer_mode == "sync"' in inspect.getsource(PPOTrainer._build_replay_buffer)
    assert "config.trainer.v1.trainer_mode" in inspect.getsource(PPOTrainer.__init__)


def test_verl_puts_extras_and_uid_where_we_read_them():
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    source = inspect.getsource(AgentLoopWorker._compute_score)
    assert 'final_output.extra_fields["reward_extra_info"] = result["reward_extra_info"]' in source
    unwrapped = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    assert 'uid, session_id = kwargs["uid"], kwargs["session_id"]' in inspect.getsource(
        unwrapped._agent_loop_postprocess
    )


def test_verl_bypasses_the_manager_with_its_own_reward_model_and_not_otherwise(compose):
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    source = inspect.getsource(RewardLoopWorker.compute_score)
    assert "if self.config.reward.reward_model.enable:" in source
    assert compose().reward.reward_model.enable is False


def test_verl_makes_the_response_length_the_engines_cap_and_ours_is_the_critiques_length(compose):
    import verl

    from verl_fapo.genrm import replica_config
    from verl_fapo.settings import parse_settings

    server = Path(verl.__file__).parent / "workers" / "rollout" / "vllm_rollout" / "vllm_async_server.py"
    assert "max_new_tokens=self.config.response_length" in server.read_text()
    rollout = compose("+recipe=fapo").reward.reward_model.rollout
    block = {"judge": {"model": "m", "max_tokens": 9999}, "genrm": {"engine": "sglang", "tensor_parallel": 4}}
    config = replica_config(rollout, parse_settings(block))
    assert (config.response_length, config.name, config.tensor_model_parallel_size) == (9999, "sglang", 4)


def test_pools_reserve_their_devices_once_when_asked():
    from verl.single_controller.ray import RayResourcePool, ResourcePoolManager
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert "if self.pgs is not None:\n            return self.pgs" in inspect.getsource(
        RayResourcePool.get_placement_groups
    )
    assert "resource_pool_dict" in inspect.getsource(ResourcePoolManager.create_resource_pool)
    source = inspect.getsource(PPOTrainer._setup)
    assert source.index("self._init_resource_pool_mgr()") < source.index("create_resource_pool()")


def test_replica_has_what_is_needed_to_end_it():
    from verl.single_controller.ray import RayResourcePool
    from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

    source = inspect.getsource(RolloutReplica.__init__)
    for attribute in ("servers", "workers", "resource_pool"):
        assert f"self.{attribute}" in source
    assert "self.pgs" in inspect.getsource(RayResourcePool.__init__)
    assert {"vllm", "sglang"} <= set(RolloutReplicaRegistry._registry)


def test_verl_config_has_the_keys_that_we_check_and_set(compose):
    config = compose()
    for key in (
        "trainer.use_v1", "trainer.v1.trainer_mode", "trainer.resume_mode", "trainer.default_local_dir",
        "reward.reward_manager.name", "reward.reward_manager.source", "reward.custom_reward_function",
        "reward.reward_model.rollout", "data.train_files", "data.val_files", "data.prompt_key", "data.reward_fn_key",
        "reward_model", "custom_reward_function", "sandbox_fusion", "ray_kwargs.ray_init",
    ):  # fmt: skip
        assert OmegaConf.select(config, key, default="absent") != "absent", key


def test_every_platform_method_that_verl_demands_is_there():
    from verl.plugin.platform.platform_base import PlatformBase

    from verl_fapo.cpu.platform import PlatformCPU

    assert PlatformBase.__abstractmethods__
    assert not PlatformCPU.__abstractmethods__


def test_hydra_lets_a_callback_end_the_command_only_by_system_exit():
    from hydra._internal.callbacks import Callbacks

    assert "except Exception as e:" in inspect.getsource(Callbacks._notify)


def test_hydra_tells_search_path_plugins_and_keeps_an_open_group_open(compose):
    config = compose("+recipe=fapo", "fapo.new_key=1")
    assert config.fapo.new_key == 1


def test_vllm_calls_general_plugins_in_every_process_and_knows_its_cpu_build_by_name():
    from vllm.platforms import cpu_platform_plugin
    from vllm.plugins import DEFAULT_PLUGINS_GROUP

    assert DEFAULT_PLUGINS_GROUP == "vllm.general_plugins"
    assert cpu_platform_plugin() == "vllm.platforms.cpu.CpuPlatform"


def test_trainer_marks_the_rows_of_validation_and_leaves_the_others():
    from verl.utils.dataset.rl_dataset import collate_fn

    from verl_fapo.rollout import VALIDATION_KEY
    from verl_fapo.trainer import collate_validation

    rows = [{"raw_prompt": "a", "index": 0}, {"raw_prompt": "b", "index": 1}]
    batch = collate_validation(collate_fn, rows)
    assert batch[VALIDATION_KEY].tolist() == [True, True]
    assert {**batch, VALIDATION_KEY: None}.keys() == {**collate_fn(rows), VALIDATION_KEY: None}.keys()

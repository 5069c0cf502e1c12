from __future__ import annotations

import subprocess
import sys

import pytest
import torch

RECIPE_ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}


def in_fresh_process(code: str, **environment: str) -> str:
    """What a new interpreter prints: platforms are chosen once a process."""
    import os

    clean = {key: value for key, value in os.environ.items() if not key.startswith("VERL_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True, text=True, timeout=120, env={**clean, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_without_the_recipe_verl_is_left_as_it_was():
    code = """
import verl, verl.utils.distributed as d
from importlib.metadata import PackageNotFoundError, version
from verl.plugin.platform.platform_manager import PlatformRegistry, get_platform
import verl.trainer.ppo.v1
try: name = version("vllm")
except PackageNotFoundError: name = None
group = type(d.initialize_global_process_group_ray).__name__
print(sorted(PlatformRegistry.registered_names()), get_platform().device_name, group, name)
"""
    assert in_fresh_process(code) == "['amd', 'huawei', 'nvidia'] cuda function None"


def test_with_the_recipes_variable_every_process_is_a_cpu_process():
    code = """
import verl, verl.utils.distributed as d
from importlib.metadata import version
from verl.plugin.platform.platform_manager import get_platform
from verl.workers.engine.base import EngineRegistry
import verl.workers.engine.fsdp
import verl.third_party.vllm as v
print(get_platform().device_name, d.initialize_global_process_group_ray.keywords, version("vllm"), v.vllm_version,
      EngineRegistry.get_engine_cls("language_model", "fsdp2").__name__)
"""
    out = in_fresh_process(code, **RECIPE_ENVIRONMENT)
    assert out.splitlines()[-1] == "cpu {'backend': 'gloo'} 0.28.0+cpu 0.28.0+cpu FSDPEngineWithLMHead"


def test_driver_changes_over_after_it_has_chosen_another_platform():
    code = """
import logging
logging.disable(logging.CRITICAL)
import verl
from verl.plugin.platform.platform_manager import get_platform
before = get_platform().device_name
from verl_fapo.cpu.platform import activate
activate(); activate()
from verl.utils.device import get_device_name, get_torch_device
print(before, get_device_name(), get_torch_device().is_available())
"""
    assert in_fresh_process(code) == "cuda cpu True"


@pytest.fixture
def platform():
    from verl_fapo.cpu.platform import PlatformCPU

    return PlatformCPU()


def test_platform_is_never_found_by_guessing(platform):
    assert not platform.is_platform_available(use_smi_check=True)


def test_device_module_answers_what_verl_asks(platform):
    module = platform.device_module
    assert torch.zeros(1).to(platform.current_device()).device == torch.device("cpu")
    free, total = module.mem_get_info()
    assert 0 < free <= total == module.get_device_properties(0).total_memory
    assert 0 < module.memory_allocated() < total
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    for name in ("empty_cache", "ipc_collect", "synchronize", "reset_peak_memory_stats"):
        assert getattr(module, name)() is None


STARTS = [
    # Hydra overrides, what py_executable says, address that the workers are told
    pytest.param([], "fork_client.py /server", "/server", id="by fork"),
    pytest.param(["hydra.callbacks.device.fork_engine=false"], "fork_client.py /server", "", id="engines spawned"),
    pytest.param(["hydra.callbacks.device.fork_server=false"], None, None, id="all as Ray does it"),
    pytest.param(["+ray_kwargs.ray_init.address=10.0.0.1:6379"], None, None, id="on a cluster"),
    pytest.param(["ray_kwargs.ray_init.runtime_env.py_executable=mine"], "mine", "/server", id="the user's own"),
]


@pytest.mark.parametrize(("overrides", "executable", "told"), STARTS)
def test_workers_are_started_by_fork_unless_switched_off(compose, monkeypatch, overrides, executable, told):
    import ray
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    from verl_fapo.cpu import platform
    from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE

    calls = []
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", lambda **kwargs: calls.append(kwargs))
    monkeypatch.setattr(platform, "activate", lambda: None)
    monkeypatch.setattr(platform, "server_address", lambda environment: "/server")
    config = compose("+recipe/device=cpu", *overrides, return_hydra_config=True)
    instantiate(config.hydra.callbacks.device).on_job_start(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    runtime_env = calls[0]["runtime_env"]
    assert (runtime_env["py_executable"] or "").endswith(executable or "")
    assert runtime_env["env_vars"].get(ADDRESS_VARIABLE) == told
    assert runtime_env["env_vars"]["VERL_PLATFORM"] == "cpu"


def test_trainer_looks_often_for_its_rollouts():
    code = """
import verl
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
print(ReplayBuffer("sync", {}, None, "drop", {}).poll_interval)
"""
    assert in_fresh_process(code) == "2.0"
    assert in_fresh_process(code, **RECIPE_ENVIRONMENT) == "0.1"

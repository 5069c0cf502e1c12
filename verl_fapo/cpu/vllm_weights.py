"""Keeps the weights of vLLM's linear layers where a weight update finds them.

vLLM repacks linear weights on a CPU when it loads a model and drops the originals, so that a later
update fails (``'Parameter' object has no attribute 'weight_loader'``).
"""

from __future__ import annotations

import os


def keep_weights_updatable() -> None:
    """Entry point of ``vllm.general_plugins``: vLLM calls it in each of its processes."""
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _dispatch_plain_linear


def _dispatch_plain_linear(layer, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear

from __future__ import annotations

import torch
from vllm.model_executor.layers import utils

from verl_fapo.cpu.vllm_weights import keep_weights_updatable


def test_weight_stays_where_an_update_finds_it_only_with_the_recipe(monkeypatch):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", original := utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    keep_weights_updatable()
    assert utils.dispatch_cpu_unquantized_gemm is original

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    keep_weights_updatable()
    layer = torch.nn.Linear(8, 4)
    weight = layer.weight
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight is weight
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))

from __future__ import annotations

import multiprocessing.spawn

import torch
from vllm.model_executor.layers import utils

from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE
from verl_fapo.cpu.vllm_engine import set_up


def test_weight_stays_where_an_update_finds_it_only_with_the_recipe(monkeypatch):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", original := utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    set_up()
    assert utils.dispatch_cpu_unquantized_gemm is original

    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    set_up()
    layer = torch.nn.Linear(8, 4)
    weight = layer.weight
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layer.weight is weight
    x = torch.randn(2, 8)
    torch.testing.assert_close(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))


def test_engine_is_forked_only_where_the_run_has_a_fork_server(monkeypatch):
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    monkeypatch.setattr(multiprocessing.spawn, "get_command_line", original := multiprocessing.spawn.get_command_line)
    for platform, address in (("", "/somewhere"), ("cpu", "")):
        monkeypatch.setenv("VERL_PLATFORM", platform)
        monkeypatch.setenv(ADDRESS_VARIABLE, address)
        set_up()
        assert multiprocessing.spawn.get_command_line is original
    monkeypatch.setenv(ADDRESS_VARIABLE, "/somewhere")
    set_up()
    assert "/somewhere" in multiprocessing.spawn.get_command_line(tracker_fd=1, pipe_handle=2)

"""Imports point up only: pure, i/o, host, entry."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "verl_fapo"

ROOMS = [
    {"__init__", "errors", "settings", "critique", "imitation", "templates", "rewards", "theory", "metrics", "rollout",
     *(f"answers.{name}" for name in (
         "__init__", "boxes", "comparison", "forms", "numbers", "reading", "spelling", "symbolic", "symbolic_worker",
         "tokens", "units", "verification"))},
    {"judge", "memory", "run_folder", "explain", "data", "watchdog", "report", "critique_view",
     *(f"router.{name}" for name in (
         "__init__", "answer", "control", "dispatcher", "headers", "life_table", "proxy", "replica", "serve"))},
    {"managers.fapo", "managers.fapo_genrm", "managers.__init__", "trainer", "neutral",
     "genrm", "cpu.platform", "cpu.vllm_name", "cpu.vllm_engine",
     "cpu.__init__", "cpu.fork_server", "cpu.fork_client", "plugin", "recipe_group", "checks", "driver",
     *(f"doctor.{name}" for name in (
         "__init__", "examination", "part", "findings", "packages", "imports", "plugin", "machine", "cluster",
         "command", "checkpoints", "endpoints", "data", "run_folder"))},
    {"cli", "demo.__init__", "demo.run", "demo.profiles", "demo.outcome", "demo.world", "demo.lessons",
     "demo.tokenizer", "demo.training", "demo.warmup"},
]  # fmt: skip
HOST_ONLY = {"verl", "ray", "vllm", "transfer_queue", "hydra", "torch"}


def module_names() -> list[str]:
    return [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in sorted(PACKAGE.rglob("*.py"))]


def imports(name: str) -> set[str]:
    tree = ast.parse((PACKAGE / Path(*name.split("."))).with_suffix(".py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


def test_every_module_has_a_room():
    assert sorted(module_names()) == sorted(set().union(*ROOMS))


@pytest.mark.parametrize("name", module_names())
def test_imports_point_up_only(name):
    level = next(i for i, room in enumerate(ROOMS) if name in room)
    for imported in imports(name):
        if imported.startswith("verl_fapo."):
            inner = imported.removeprefix("verl_fapo.")
            allowed = set().union(*ROOMS[: level + 1])
            assert {inner, f"{inner}.__init__"} & allowed, f"{name} imports {imported}"
        if level < 2:
            forbidden = HOST_ONLY - {"torch"} if level == 0 else HOST_ONLY
            assert imported.split(".")[0] not in forbidden, f"{name} imports {imported}"


@pytest.mark.parametrize(
    "module",
    ["verl_fapo.cli", "verl_fapo.judge", "verl_fapo.recipe_group", "verl_fapo.demo.world", "verl_fapo.demo.warmup"],
)
def test_light_modules_load_neither_torch_nor_verl(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'verl', 'ray', 'vllm'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

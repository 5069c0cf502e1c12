"""The recipe group is found after each kind of installation: Hydra says nothing where it is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files, so that building leaves nothing in the clone."""
    folder = tmp_path_factory.mktemp("sources") / "verl-fapo"
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(sources))
    (built,) = out.glob("*.whl")
    return built


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def files_of(package: str) -> str:
    """A program that prints what an installed package holds."""
    return (
        "from importlib.resources import files\n"
        "def show(folder, prefix=''):\n"
        "    for entry in folder.iterdir():\n"
        "        name = prefix + entry.name\n"
        "        if entry.is_dir() and entry.name != '__pycache__':\n"
        "            show(entry, name + '/')\n"
        "        elif name.endswith(('.py', '.yaml')):\n"
        "            print(name)\n"
        f"show(files({package!r}))\n"
    )


@pytest.mark.parametrize("kind", ["ordinary", "editable", "wheel"])
def test_composed_config_holds_the_penalty(kind, request, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True, with_pip=True)
    python = environment / "bin" / "python"
    # An environment with an existing veRL: ours, without our own project in it.
    (site_packages,) = environment.glob("lib/python*/site-packages")
    (site_packages / "existing.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet"]
    if kind == "wheel":
        run(*install, str(request.getfixturevalue("wheel")))
    else:
        run(*install, *(["--editable"] if kind == "editable" else []), str(request.getfixturevalue("sources")))
    where = run(str(python), "-c", "import verl_fapo; print(verl_fapo.__file__)", cwd=tmp_path).strip()
    assert not where.startswith(str(ROOT)), "the installation under test is the one that runs"
    for package, folder in (("verl_fapo", "verl_fapo"), ("verl_fapo.recipes", "recipes")):
        ours = {str(path.relative_to(ROOT / folder)) for suffix in ("py", "yaml") for path in
                (ROOT / folder).rglob(f"*.{suffix}")}  # fmt: skip
        installed = set(run(str(python), "-c", files_of(package), cwd=tmp_path).split())
        assert ours <= installed, "all that is in the clone is in the installation"
    command = ["-m", "verl.trainer.main_ppo", "+recipe=fapo", "+recipe/device=cpu", "fapo.penalty=0.25", "--cfg", "job"]
    config = yaml.safe_load(run(str(python), *command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}))
    assert config["fapo"]["penalty"] == 0.25
    assert config["trainer"]["device"] == "cpu"
    script = run(str(environment / "bin" / "verl-fapo"), "--version", cwd=tmp_path)
    assert "0.1.0" in script

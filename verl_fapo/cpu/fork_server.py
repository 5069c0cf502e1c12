"""Starts the Python processes of a run in a tenth of a second: forked from one that has imported torch and vLLM.

On a CPU nearly all of a run's start is imports, about 8 s in each of a dozen processes, most of them one after the
other. Ray starts its workers through :func:`worker_command`, vLLM its engines through :func:`spawn_through`; both run
``fork_client.py``, which becomes an ordinary Python where no server answers. The server ends with the process that
started it; what was forked lives on.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import hashlib
import json
import logging
import multiprocessing
import multiprocessing.spawn
import os
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from omegaconf import OmegaConf

from verl_fapo.cpu.fork_client import IGNORED, IGNORED_WITH_VALUE, MAX_FILES

ADDRESS_VARIABLE = "VERL_FAPO_FORK_SERVER"
"""Environment variable with the address of a server that runs already: a run uses it instead of one of its own."""

SWITCH = re.compile(r"\+*hydra\.callbacks\.device\.fork_server=")
VARIABLE = re.compile(r"\+*ray_kwargs\.ray_init\.runtime_env\.env_vars\.(\w+)=(?:'(?=.*'$))?(.*?)'?")

CLIENT = Path(__file__).with_name("fork_client.py")

# Nothing that imports ray, whose C++ part reads the worker's own environment when it is imported.
PRELOAD = (
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "tensordict",
    "torchdata.stateful_dataloader",
    "datasets",
    "vllm.config",
    "vllm.engine.arg_utils",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.entrypoints.openai.api_server",
)
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "OMP_", "MKL_", "TORCH_", "TRANSFORMERS_", "TOKENIZERS_", "VLLM_")
LOOK_SECONDS = 5.0
END_SECONDS = 30.0
REQUEST_SECONDS = 10.0
MAX_REQUEST_BYTES = 2**24

SHARED_MEMORY = Path("/dev/shm")
MAPPED = re.compile(rb"^\S+ \S+ \S+ \S+ (\d+) +" + bytes(SHARED_MEMORY) + rb"/", re.MULTILINE)
WEIGHTS = "verl_weights_*"
WEIGHTS_SECONDS = 10.0
"""veRL's buffer of weights, of 512 MB, is not there for longer, but for what a killed process left."""

logger = logging.getLogger(__name__)


class ForkServer:
    """A server in a process of its own.

    Args:
        environment: what it has beside this process's environment; some libraries read theirs when they are imported.
        preload: modules to import.
    """

    def __init__(self, environment: Mapping[str, str], *, preload: Sequence[str] = PRELOAD) -> None:
        self.address = str(Path(tempfile.mkdtemp(prefix="verl_fapo_"), _fingerprint(environment)))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(1000)
            # Holding its standard input is how the server learns that this process has ended, in whatever way.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, self.address, str(listener.fileno()), *preload],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **environment},
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The server's process, parent of all that it forks."""
        return self._process.pid

    def wait_until_ready(self) -> None:
        """Return once it has imported what it imports, or has died of it."""
        subprocess.run([*_client(self.address), "-c", ""], check=False)

    def wait(self) -> None:
        """Return when it ends."""
        self._process.wait()

    def close(self) -> None:
        """End the server, and none of what it forked; may be called again."""
        self._process.stdin.close()
        self._process.wait()
        shutil.rmtree(Path(self.address).parent, ignore_errors=True)  # where it was killed


_own: ForkServer | None = None


def server_address(environment: Mapping[str, str]) -> str:
    """Address of the server for processes with this environment: of the one named by the environment, or our own."""
    global _own
    named = os.environ.get(ADDRESS_VARIABLE, "")
    if named and Path(named).name == _fingerprint(environment):
        if _answers(named):
            return named
        logger.warning("no fork server answers at %s=%s; this run starts its own", ADDRESS_VARIABLE, named)
    if _own is not None and Path(_own.address).name != _fingerprint(environment):
        _own.close()
        _own = None
    _own = _own or ForkServer(environment)
    return _own.address


def start_early(arguments: list[str]) -> None:
    """Start our own server at once where a command line chooses the CPU recipe: it imports while the driver does."""
    chosen = "recipe/device=cpu" in {argument.lstrip("+") for argument in arguments}
    if chosen and not os.environ.get("RAY_ADDRESS") and not any(map(SWITCH.match, arguments)):
        overridden = dict(match.groups() for match in map(VARIABLE.fullmatch, arguments) if match)
        server_address({**recipe_environment(), **overridden})


def recipe_environment() -> dict[str, str]:
    """Environment of a run's workers by ``recipes/device/cpu.yaml``, before any override."""
    recipe = OmegaConf.create(files("verl_fapo.recipes.device").joinpath("cpu.yaml").read_text(encoding="utf-8"))
    return OmegaConf.to_container(recipe.ray_kwargs.ray_init.runtime_env.env_vars)


def worker_command(address: str) -> str:
    """Shell words in place of ``python``, for Ray's ``runtime_env.py_executable``."""
    return shlex.join(_client(address))


def spawn_through(address: str) -> None:
    """Let the method ``spawn`` of ``multiprocessing`` fork from the server, in this process."""
    command_line = multiprocessing.spawn.get_command_line
    multiprocessing.spawn.get_command_line = lambda **kwargs: [*_client(address), *command_line(**kwargs)[1:]]


def _client(address: str) -> list[str]:
    return [sys.executable, "-S", "-E", str(CLIENT), address]


def _fingerprint(environment: Mapping[str, str]) -> str:
    """Says what libraries may read when they are imported."""
    read = {key: value for key, value in {**os.environ, **environment}.items() if key.startswith(READ_AT_IMPORT)}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()[:16]


def _answers(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(address) == 0


def serve(listener: socket.socket, semaphores: str) -> socket.socket | None:
    """Fork a process for each connection, until standard input ends; then see what was forked off.

    Args:
        listener: takes the connections.
        semaphores: how the names of semaphores of the forked processes begin.

    Returns:
        In a forked process the connection that asked for it, in the server None.
    """
    started_at, had_children = time.time(), False
    with listener:
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [], LOOK_SECONDS)[0]):
            if listener in ready:
                connection, _ = listener.accept()
                if os.fork() == 0:
                    return connection
                connection.close()
            if had_children and not living_children():
                remove_shared_memory(semaphores, since=started_at)
            had_children = bool(living_children())
    deadline = time.monotonic() + END_SECONDS
    while living_children() and time.monotonic() < deadline:
        time.sleep(0.2)
    remove_shared_memory(semaphores, since=started_at)
    return None


def living_children() -> list[int]:
    """Pids of what was forked and still lives; those that have ended are forgotten."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def remove_shared_memory(semaphores: str, *, since: float) -> None:
    """Remove what killed processes left in shared memory, unless somebody still has it mapped.

    Args:
        semaphores: how the names of those of the processes forked here begin.
        since: when the first was forked; veRL's buffers of weights are known by their age alone.
    """
    left = [path for path in SHARED_MEMORY.glob(WEIGHTS) if _is_abandoned(path, since)]
    left += SHARED_MEMORY.glob(f"sem.{semaphores}-*")
    mapped = mapped_files() if left else set()
    for path in left:
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_ino not in mapped:
                path.unlink()


def mapped_files() -> set[int]:
    """Inodes of the files in shared memory that any process has mapped: whoever made a semaphore has it under another
    name."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            mapped |= {int(inode) for inode in MAPPED.findall(maps.read_bytes())}
    return mapped


def _is_abandoned(weights: Path, since: float) -> bool:
    with contextlib.suppress(FileNotFoundError):
        created_at = weights.stat().st_ctime
        time.sleep(max(0.0, created_at + WEIGHTS_SECONDS - time.time()) if created_at >= since else 0.0)
        return created_at >= since and weights.exists()
    return False


def preload(modules: Sequence[str]) -> None:
    """Import what most processes of a run need; what cannot be imported here is left to them."""
    for name in modules:
        with contextlib.suppress(Exception, SystemExit):
            import_module(name)
    gc.collect()
    gc.freeze()


def become(connection: socket.socket) -> NoReturn:
    """Turn this forked process into what the client was started as, and run its command."""
    request, received = read_request(connection)
    os.setsid()  # Ray ends the process groups of its workers
    connection = _take_files(connection, received, request["files"])
    take_over(request)
    connection.sendall(os.getpid().to_bytes(8, "big"))
    os.register_at_fork(after_in_child=connection.close)
    threading.Thread(target=_end_with_client, args=(connection,), name="fork-client", daemon=True).start()
    status = 1
    try:
        run(request["arguments"])
        status = 0
    except SystemExit as exc:
        if exc.code is not None and not isinstance(exc.code, int):
            print(exc.code, file=sys.stderr)
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        end(connection, status % 256)


def read_request(connection: socket.socket) -> tuple[dict, list[int]]:
    """What the client sent; ends this process where that is nothing whole, as when somebody only looked."""
    try:
        connection.settimeout(REQUEST_SECONDS)
        head, received, *_ = socket.recv_fds(connection, 8, MAX_FILES)
        connection.settimeout(None)
        size = int.from_bytes(head, "big")
        body = connection.recv(min(size, MAX_REQUEST_BYTES), socket.MSG_WAITALL)
    except OSError:
        os._exit(1)
    if len(head) < 8 or len(body) != size:
        os._exit(1)
    return json.loads(body), received


def take_over(request: Mapping[str, Any]) -> None:
    """Take the client's folder, environment and limits."""
    os.chdir(request["folder"])
    if "--multiprocessing-fork" in request["arguments"]:
        # Or it could not rename itself once its environment changes. Ray's workers do so in another way.
        with contextlib.suppress(ImportError):
            import_module("setproctitle").getproctitle()
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.umask(request["umask"])
    os.setpriority(os.PRIO_PROCESS, 0, max(request["niceness"], os.getpriority(os.PRIO_PROCESS, 0)))
    os.sched_setaffinity(0, request["cores"])
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # or all would draw the same numbers
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path and path not in sys.path]


def run(arguments: list[str]) -> None:
    """Do what ``python ARGUMENTS`` does, for the commands that the client sends."""
    rest = iter(arguments)
    for argument in rest:
        if argument in IGNORED_WITH_VALUE:
            next(rest)
        elif argument == "-c":
            code = next(rest)
            sys.argv = ["-c", *rest]
            _run_main(code, "<string>")
        elif argument == "-m":
            sys.argv = [name := next(rest), *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        elif argument not in IGNORED:
            sys.argv = [argument, *rest]
            sys.path.insert(0, str(Path(argument).resolve().parent))
            _run_main(Path(argument).read_bytes(), argument)


def _run_main(source: str | bytes, file: str) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = file
    exec(compile(source, file, "exec"), main.__dict__)


def end(connection: socket.socket, status: int) -> NoReturn:
    """End as multiprocessing does: a whole finalization would only take time, and libraries complain in it."""
    with contextlib.suppress(Exception):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(OSError):  # closed in what this process forked
        connection.sendall(bytes([status]))
    os._exit(status)


def _take_files(connection: socket.socket, received: list[int], numbers: list[int]) -> socket.socket:
    """Give the files the numbers that they have in the client, the connection another."""
    above = max(numbers, default=2) + 1
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in [connection.fileno(), *received]]
    for file in [connection.detach(), *received]:
        os.close(file)
    for file, number in zip(files[1:], numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    return socket.socket(fileno=files[0])


def _end_if_abandoned(address: str, imported: threading.Event) -> None:
    """End the server when nobody waits for it to be ready any more."""
    select.select([sys.stdin], [], [])
    if not imported.is_set():
        shutil.rmtree(Path(address).parent, ignore_errors=True)
        os._exit(0)


def _end_with_client(connection: socket.socket) -> None:
    connection.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    address, file, *modules = sys.argv[1:]
    listener = socket.socket(fileno=int(file))
    imported = threading.Event()
    threading.Thread(target=_end_if_abandoned, args=(address, imported), daemon=True).start()
    preload(modules)
    imported.set()
    semaphores = f"mp-{Path(address).parent.name}"
    multiprocessing.current_process()._config["semprefix"] = f"/{semaphores}"  # they are of all that is forked
    connection = serve(listener, semaphores)
    if connection is not None:
        become(connection)
    shutil.rmtree(Path(address).parent, ignore_errors=True)
    os._exit(0)


if __name__ == "__main__":
    main()

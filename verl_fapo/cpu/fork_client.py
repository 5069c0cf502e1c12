"""Runs a Python command in a process forked by the fork server; run by path, with the standard library alone.

    python -S -E fork_client.py SOCKET PYTHON_ARGUMENTS...

It stands for that process: it passes on what it got (arguments, environment, folder, open files) and SIGTERM, ends
when the process ends, and takes it along when it is killed. Where no server answers it becomes the ordinary
``python PYTHON_ARGUMENTS...``.
"""

import json
import os
import signal
import socket
import sys
import time

ANSWER_SECONDS = 60.0
MAX_FILES = 250  # Linux passes no more at once
IGNORED = ("-u", "-B", "-E", "-s", "-I", "-O")
IGNORED_WITH_VALUE = ("-W", "-X")


def inherited_files() -> list[int]:
    """The open files that this process was started with."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the listing's own
            pass
    return sorted(found)


def is_known(arguments: list[str]) -> bool:
    """Whether the server reads a command as Python would: options that it ignores, then -c, -m or a file."""
    rest = iter(arguments)
    for argument in rest:
        if argument in IGNORED_WITH_VALUE:
            next(rest, None)
        elif argument not in IGNORED:
            return argument in ("-c", "-m") or not argument.startswith("-")
    return False


def fork(address: str, arguments: list[str]) -> tuple[socket.socket, int] | None:
    """Have the process made; its connection and its pid, or None where no server answers."""
    files = inherited_files()
    if len(files) > MAX_FILES or not is_known(arguments):
        return None
    os.umask(umask := os.umask(0))
    connection = socket.socket(socket.AF_UNIX)
    try:
        request = {
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "files": files,
            "umask": umask,
            "niceness": os.getpriority(os.PRIO_PROCESS, 0),
            "cores": sorted(os.sched_getaffinity(0)),
        }
        connect(connection, address)
        body = json.dumps(request).encode()
        socket.send_fds(connection, [len(body).to_bytes(8, "big")], files)
        connection.sendall(body)
        answer = connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(answer) < 8:
        return None
    connection.settimeout(None)
    for file in files:
        if file != 2:
            os.close(file)  # it is up to the process when these end
    return connection, int.from_bytes(answer, "big")


def connect(connection: socket.socket, address: str) -> None:
    """Connect, also where so many wait already that there is no room in the queue for a while."""
    connection.settimeout(ANSWER_SECONDS)
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return connection.connect(address)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def main() -> int:
    address, *arguments = sys.argv[1:]
    forked = fork(address, arguments)
    if forked is None:
        print(f"verl_fapo: no fork server at {address}; an ordinary Python starts instead", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    connection, pid = forked
    signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(pid, signum))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process has its own session, as a worker of Ray has
    status = 1
    while answer := connection.recv(1):
        status = answer[0]
    return status


if __name__ == "__main__":
    sys.exit(main())

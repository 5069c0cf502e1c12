from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from verl_fapo import watchdog as watchdog_module
from verl_fapo.errors import StalledError
from verl_fapo.run_folder import RolloutLog, RunFolder
from verl_fapo.watchdog import FAILURES_UNTIL_DEAD, Watchdog, is_dead, is_gone


@pytest.fixture
def health_server():
    class Handler(BaseHTTPRequestHandler):
        status = 200

        def do_GET(self) -> None:
            self.send_response(Handler.status)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.handler = Handler
        server.address = f"127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path)
    folder.open("", started_at=time.time(), resumed=False)
    return folder


def watch(run: RunFolder, **changes: object) -> Watchdog:
    """A watchdog over a run without servers, that ends it when it loses one."""

    def lost(server: str) -> None:
        raise StalledError(f"{server} died")

    return Watchdog(run, **{"servers": list, "is_dead": is_dead, "lost": lost, "stall_seconds": 1000.0, **changes})


@pytest.mark.parametrize(("status", "dead"), [(200, False), (404, False), (503, True), (500, True)])
def test_server_is_dead_if_it_says_so(health_server, status, dead):
    health_server.handler.status = status
    assert is_dead(health_server.address) is dead


def test_closed_port_is_dead_and_gone(unused_tcp_port):
    assert is_dead(f"127.0.0.1:{unused_tcp_port}")
    assert is_gone(f"127.0.0.1:{unused_tcp_port}")


def test_server_that_takes_connections_is_not_gone_whatever_its_health(health_server):
    health_server.handler.status = 503
    assert not is_gone(health_server.address)


def test_server_that_talks_nonsense_is_dead():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            with listener.accept()[0] as connection:
                connection.send(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=talk)
        thread.start()
        assert is_dead(f"127.0.0.1:{listener.getsockname()[1]}")
        thread.join()


def test_health_is_asked_past_a_proxy(health_server, unused_tcp_port):
    code = f"from verl_fapo.watchdog import is_dead; print(is_dead({health_server.address!r}))"
    environment = {**os.environ, "http_proxy": f"http://127.0.0.1:{unused_tcp_port}", "no_proxy": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


def test_process_ends_even_if_the_cause_can_not_be_written(tmp_path):
    code = """
import sys
from verl_fapo import watchdog
from verl_fapo.run_folder import RunFolder
watchdog.CHECK_SECONDS = 0.05
run = RunFolder(sys.argv[1])
run.fail = lambda cause: (_ for _ in ()).throw(OSError(28, "No space left on device"))
watchdog.Watchdog(run, stall_seconds=0.0, servers=list, is_dead=bool, lost=print).start()
import time; time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, timeout=30)
    assert done.returncode == 1


def test_stall_is_noticed_even_if_the_servers_can_not_be_asked(run):
    def servers():
        raise OSError("no route")

    watchdog = watch(run, stall_seconds=0.1, servers=servers)
    time.sleep(0.2)
    with pytest.raises(StalledError, match="no rollout scored"):
        watchdog.check()


def test_watch_goes_on_after_an_error_of_its_own(run, monkeypatch, caplog):
    monkeypatch.setattr(watchdog_module, "CHECK_SECONDS", 0.01)
    looked = threading.Event()
    looks = []

    def servers():
        looks.append(1)
        if len(looks) == 1:
            raise OSError("stale file handle")
        looked.set()
        return []

    watchdog = watch(run, stall_seconds=1000, servers=servers)
    watchdog.start()
    assert looked.wait(10)
    watchdog.stop()
    watchdog.join(10)
    assert "stale file handle" in caplog.text


def test_server_that_is_slow_is_not_dead(monkeypatch):
    monkeypatch.setattr(watchdog_module, "CHECK_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not is_dead(f"127.0.0.1:{listener.getsockname()[1]}")


def test_dead_server_ends_the_run_after_several_looks(run, unused_tcp_port):
    watchdog = watch(run, stall_seconds=1000, servers=lambda: [f"127.0.0.1:{unused_tcp_port}"])
    for _ in range(FAILURES_UNTIL_DEAD - 1):
        watchdog.check()
    with pytest.raises(StalledError, match=f"{unused_tcp_port} died"):
        watchdog.check()


def test_server_that_recovers_is_forgiven(run, health_server):
    watchdog = watch(run, stall_seconds=1000, servers=lambda: [health_server.address])
    for _ in range(5):
        for status in (*[503] * (FAILURES_UNTIL_DEAD - 1), 200):
            health_server.handler.status = status
            watchdog.check()


def test_run_without_progress_is_ended_and_one_with_progress_is_not(run):
    watchdog = watch(run, stall_seconds=0.2, servers=list)
    time.sleep(0.3)
    with pytest.raises(StalledError, match="no rollout scored and no step ended"):
        watchdog.check()
    RolloutLog(run.root).write({"id": "a_0", "judged": False})
    watchdog.check()


def test_server_that_can_be_spared_is_reported_until_it_is_taken_out(run, unused_tcp_port):
    servers, lost = [f"127.0.0.1:{unused_tcp_port}"], []

    def spare(server: str) -> None:
        lost.append(server)
        if len(lost) == 1:
            raise OSError("the router does not answer")
        servers.remove(server)

    watchdog = watch(run, servers=lambda: list(servers), lost=spare)
    for _ in range(FAILURES_UNTIL_DEAD - 1):
        watchdog.check()
    with pytest.raises(OSError):
        watchdog.check()
    watchdog.check()
    watchdog.check()
    assert len(lost) == 2 and not servers, "tried again until it went through"


def test_cause_is_written_before_the_last_act(tmp_path):
    code = """
import sys
from verl_fapo import watchdog
from verl_fapo.run_folder import RunFolder
watchdog.CHECK_SECONDS = 0.05
run = RunFolder(sys.argv[1])
watchdog.Watchdog(run, stall_seconds=0.0, servers=list, is_dead=bool, lost=print,
                  before_end=lambda: print(run.failure, flush=True)).start()
import time; time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stdout.startswith("StalledError: no rollout scored")


def test_stopped_watchdog_ends_nothing(run, monkeypatch):
    monkeypatch.setattr(watchdog_module, "CHECK_SECONDS", 0.01)

    def lost(server: str) -> None:
        watchdog.stop()
        raise StalledError("just now")

    watchdog = watch(run, servers=lambda: ["h:1"], is_dead=lambda server: True, lost=lost)
    watchdog.start()
    watchdog.join(10)
    assert run.failure is None

"""``verl-fapo route`` as a process, with the clients that people have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from verl_fapo.cli import main


class Replica(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wait = 0.0

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "m", "object": "model", "created": 0, "owned_by": "x"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.wait)
        message = {"role": "assistant", "content": request["messages"][0]["content"].upper()}
        if not request.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._reply({"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for letter in message["content"]:
            chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            event = json.dumps({**chunk, "choices": [{"index": 0, "delta": {"content": letter}}]})
            self._chunk(f"data: {event}\n\n")
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _reply(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients of these tests leave as they like."""


@pytest.fixture
def replica(monkeypatch) -> Iterator[str]:
    server = QuietServer(("127.0.0.1", 0), Replica)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def route() -> Iterator:
    """Starts ``verl-fapo route`` and gives its process and its address."""
    processes = []

    def route(*arguments: str) -> tuple[subprocess.Popen, str]:
        command = [sys.executable, "-m", "verl_fapo.cli", "route", "--port", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stdout.readline()
        assert line.startswith("routing http://"), process.stderr.read()
        return process, line.split()[1]

    yield route
    for process in processes:
        process.kill()
        process.communicate()


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def test_openai_client_asks_streams_and_lists(route, replica):
    openai = pytest.importorskip("openai")
    _, url = route("--worker", replica)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="m", messages=messages)
        assert answer.choices[0].message.content == "HELLO"
        parts = client.chat.completions.create(model="m", messages=messages, stream=True)
        assert [part.choices[0].delta.content for part in parts] == list("HELLO")
        assert [model.id for model in client.models.list()] == ["m"]


def test_openai_client_reads_what_the_router_itself_says(route, replica):
    openai = pytest.importorskip("openai")
    _, url = route(replica, "--api-key", "secret")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="router's key"),
    ):
        client.models.list()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_curl_asks_with_a_large_body(route, replica, tmp_path):
    _, url = route("--worker", replica)
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 3_000_000}]}))
    command = ["curl", "-sS", "--max-time", "20", "-H", "Expect: 100-continue", "--data-binary", f"@{body}"]
    done = subprocess.run([*command, f"{url}/v1/chat/completions"], capture_output=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "X" * 3_000_000


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here (apt-get install prometheus)")
def test_prometheus_scrapes_it(route, replica, tmp_path, unused_tcp_port):
    _, url = route("--worker", replica)
    get(f"{url}/v1/models")
    config = tmp_path / "prometheus.yml"
    target = url.removeprefix("http://")
    config.write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: router, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{unused_tcp_port}"
    command = [
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={tmp_path}",
        f"--web.listen-address={address}",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        found, deadline = [], time.monotonic() + 30
        while not found and time.monotonic() < deadline:
            time.sleep(0.5)
            try:
                query = f"http://{address}/api/v1/query?query=fapo_router_requests_total"
                found = json.loads(get(query))["data"]["result"]
            except OSError:
                continue
        assert [sample["metric"]["status"] for sample in found] == ["200"]
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_what_runs_end(route, replica, number, monkeypatch):
    monkeypatch.setattr(Replica, "wait", 1.0)
    process, url = route("--worker", replica)
    answers = []

    def ask() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": "late"}]}).encode()
        answers.append(get(urllib.request.Request(f"{url}/v1/chat/completions", data=body)))

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(0.4)
    process.send_signal(number)
    asking.join(20)
    assert b"LATE" in answers[0]
    assert process.wait(20) == 0


def test_second_signal_ends_it_at_once(route, replica, monkeypatch):
    monkeypatch.setattr(Replica, "wait", 5.0)
    process, url = route("--worker", replica)
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        body = b'{"messages": [{"content": "x"}]}'
        client.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        time.sleep(0.4)
        process.send_signal(signal.SIGTERM)
        assert "1 requests" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - began < 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["--worker", "localhost:8000"], "http://host:8000", id="worker is no URL"),
        pytest.param(["--worker", "http://h:1/v1"], "without /v1", id="worker with v1"),
        pytest.param(["--set", "polcy=x"], "did you mean fapo.router.policy?", id="unknown setting"),
        pytest.param(["--set", "policy=fastest"], "fapo.router.policy='fastest'", id="unknown policy"),
        pytest.param(["--set", "policy"], "expected KEY=VALUE", id="no value"),
        pytest.param(["--set", "policy=["], "fapo.router.policy", id="no YAML"),
        pytest.param(["--host", "192.0.2.1"], "can not listen on 192.0.2.1", id="not our address"),
    ],
)
def test_bad_input_is_a_line(arguments, said):
    result = CliRunner().invoke(main, ["route", "--port", "0", *arguments])
    assert result.exit_code == 2
    assert said in result.output and "Traceback" not in result.output


def test_port_that_is_taken_is_a_line(route, replica):
    _, url = route("--worker", replica)
    result = CliRunner().invoke(main, ["route", "--port", url.rpartition(":")[2]])
    assert result.exit_code == 2 and "name another --port" in result.output


def test_key_may_come_from_the_environment(route, replica):
    os.environ["FAPO_API_KEY"] = "secret"
    _, url = route("--worker", replica)
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": "Bearer secret"})
    assert b'"m"' in get(request)


def test_every_setting_is_in_the_documentation():
    from verl_fapo.settings import RouterSettings

    docs = Path(__file__).parents[2].joinpath("docs", "router.md").read_text()
    for name in RouterSettings.model_fields:
        assert f"`{name}`" in docs, name

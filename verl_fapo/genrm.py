"""The GenRM's replicas: veRL's own inference servers on devices of their own, behind one address."""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Future
from threading import Thread

import ray
from omegaconf import DictConfig, OmegaConf
from verl.workers.config import HFModelConfig
from verl.workers.rollout.replica import RolloutReplica, get_rollout_replica_class

from verl_fapo.errors import GenRMError
from verl_fapo.settings import FAPOSettings

logger = logging.getLogger(__name__)


class GenRMGroup:
    """Serves the judge.

    ``endpoints`` and ``model`` are what its clients need; both are known once :meth:`launch` returns, while the
    replicas load their weights. With ``placement: external`` nothing is started.
    """

    def __init__(self, settings: FAPOSettings) -> None:
        self.endpoints = settings.genrm.endpoints
        self.model = settings.judge.model
        self._settings = settings.genrm
        self._replicas: list[RolloutReplica] = []
        self._router = None
        self._ready: Future[None] | None = None

    def launch(self, rollout_config: DictConfig) -> None:
        """Start the router, and begin to start the replicas.

        Args:
            rollout_config: ``reward.reward_model.rollout`` of the veRL config, whose engine settings
                (memory, context, dtype, ...) the replicas take.
        """
        if self._settings.placement == "external":
            return
        model_config = HFModelConfig(path=self.model)
        self.model = model_config.local_path
        self._router = Router.remote()
        self.endpoints = (ray.get(self._router.start.remote()),)
        self._replicas = self._make_replicas(rollout_config, model_config)
        self._ready = Future()
        Thread(target=self._start_replicas, name="genrm-start", daemon=True).start()

    def wait_until_ready(self) -> None:
        """Return when every replica answers.

        Raises:
            GenRMError: a replica did not start, or not within ``fapo.genrm.start_seconds``.
        """
        if self._ready is None:
            return
        try:
            self._ready.result()
        except TimeoutError as exc:
            raise GenRMError(
                f"the GenRM replicas were not ready within {self._settings.start_seconds:g} s; look for their errors "
                "in Ray's worker logs, or raise fapo.genrm.start_seconds"
            ) from exc
        except Exception as exc:  # veRL and the engines raise what they like when a server does not start
            raise GenRMError(f"a GenRM replica of {self.model} did not start: {exc}") from exc

    def _make_replicas(self, rollout_config: DictConfig, model_config: HFModelConfig) -> list[RolloutReplica]:
        overrides = {"name": self._settings.engine, "tensor_model_parallel_size": self._settings.tensor_parallel}
        replica_class = get_rollout_replica_class(self._settings.engine)
        return [
            replica_class(
                replica_rank=rank,
                config=OmegaConf.merge(rollout_config, overrides),
                model_config=model_config,
                gpus_per_node=self._settings.n_gpus_per_node,
                is_reward_model=True,
                name_suffix="fapo",
            )
            for rank in range(self._settings.replicas)
        ]

    def _start_replicas(self) -> None:
        try:
            asyncio.run(self._init_replicas())
            ray.get(self._router.route_to.remote([f"http://{r.server_address}" for r in self._replicas]))
            logger.warning("GenRM %s: %d replica(s) behind %s", self.model, len(self._replicas), *self.endpoints)
            self._ready.set_result(None)
        except BaseException as exc:  # carried over to wait_until_ready
            self._ready.set_exception(exc)

    async def _init_replicas(self) -> None:
        async with asyncio.timeout(self._settings.start_seconds):
            await asyncio.gather(*(replica.init_standalone() for replica in self._replicas))

    def stop(self) -> None:
        """End all that was started; may be called again."""
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


@ray.remote(num_cpus=0)
class Router:
    """veRL's router in a process that ends with the run.

    veRL itself forks it off the trainer, where it holds the trainer's connections open: Ray then does not notice
    that the trainer died, and the command waits for ever.
    """

    async def start(self) -> str:
        """Serve on a free port of this node, 503 until there are workers; returns the base URL once it is served."""
        import uvicorn
        from verl.experimental.reward_loop.router.naive_router import NaiveRouter

        host = ray.util.get_node_ip_address().strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        self._router = NaiveRouter([])
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
        self._router.request_counts = dict.fromkeys(worker_urls, 0)
        self._router.worker_urls = worker_urls

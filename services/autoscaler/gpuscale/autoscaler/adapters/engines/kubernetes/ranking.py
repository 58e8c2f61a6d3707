"""The allocator's ranking of nodes, for pods that the adapter makes itself."""

import asyncio

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger

TIMEOUT = 3.0
"""Seconds that the ranking may take; a pod without it starts where the cluster's scheduler says."""
SILENCE = 15.0
"""Seconds for which an allocator that did not answer is not asked again: many pods must not wait for it one by one."""

_log = get_logger(__name__)


class AllocatorRanking:
    """A `NodeRanking` by what the fleet measures. Ids of nodes are the names of the cluster's nodes."""

    def __init__(self, allocator: grpc.aio.Channel) -> None:
        self._stub = allocator_api.CapacityServiceStub(allocator)
        self._silent = False
        self._again = 0.0

    async def best(self, gpu_count: int) -> tuple[str, ...]:
        """As `NodeRanking.best`: none without telemetry, or where no node has as many idle GPUs."""
        now = asyncio.get_running_loop().time()
        if now < self._again:
            return ()
        try:
            with rpc_errors():
                answer = await self._stub.RankNodes(
                    allocator_api.RankNodesRequest(gpu_count=gpu_count), timeout=TIMEOUT
                )
        except GpuscaleError as error:
            if not self._silent:
                _log.warning("no ranking of nodes; the cluster's scheduler decides", why=error.message)
            self._silent = True
            self._again = now + SILENCE
            return ()
        self._silent = False
        return tuple(
            node.name.removeprefix("nodes/") for node in answer.nodes if node.sufficient and not node.fallback
        )

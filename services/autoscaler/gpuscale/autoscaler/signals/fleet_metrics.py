"""Readings of GPUs and hosts, as the fleet streams them.

The stream is opened once some signal wants it. While it is down what was read ages, and beyond three periods of its
agent it does not count. A GPU or host that should tell and does not is silent; one that cannot tell is left out.
"""

import asyncio
from collections.abc import Collection, Sequence
from typing import NoReturn

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.domain.model import GpuSignal, HostSignal
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.signals.fleet_readings import SILENT, HeldNode, Told
from gpuscale.common import names, wire
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff

LEAST_INTERVAL = 0.5
"""Seconds between two messages of the fleet; signals need no more."""
_RETRY_CAP = 5.0

_log = get_logger(__name__)


class FleetMetrics:
    """Follows the fleet, and answers what signals ask of it.

    Args:
        fleet: channel to the fleet.
        clock: what readings are dated by.
    """

    def __init__(self, fleet: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = monitor_api.FleetServiceStub(fleet)
        self._clock = clock
        self._nodes: dict[str, HeldNode] = {}
        self._wanted = asyncio.Event()
        self._problem = "the fleet has not answered yet"

    async def run(self) -> NoReturn:
        """Follow the fleet for ever, from the first question on, over broken streams and restarts of the fleet."""
        await self._wanted.wait()
        backoff = Backoff(cap=_RETRY_CAP)
        while True:
            problem = "it ended the stream"
            try:
                await self._follow(backoff)
            except GpuscaleError as error:
                problem = error.message
            if not self._problem:
                _log.warning("lost the fleet", problem=problem)
            self._problem = f"the fleet cannot be followed: {problem}"
            await asyncio.sleep(backoff.next())

    def gpus(self, source: GpuSignal, own: Collection[str], oldest: float) -> Sample:
        """A reading of GPUs; `own` are the UUIDs of those that the endpoint's ready replicas hold.

        One whose value is older than `oldest` seconds is silent, as are those of a node that is not online.
        """
        self._wanted.set()
        if source.own_replicas:
            if not own:
                return Sample(problem="no ready replica holds a GPU")
            known = {uuid: told for held in self._nodes.values() for uuid, told in held.gpus(source.metric)}
            told = [known.get(uuid.lower(), SILENT) for uuid in own]
        else:
            told = [told for held in self._of(source.nodes) for _, told in held.gpus(source.metric)]
        return self._sample([*told, *self._unknown(source.nodes)], source.metric, oldest)

    def hosts(self, source: HostSignal, oldest: float) -> Sample:
        """A reading of hosts; one whose value is older than `oldest` seconds, or that is not online, is silent."""
        self._wanted.set()
        told = [held.host(source.metric) for held in self._of(source.nodes)]
        return self._sample([*told, *self._unknown(source.nodes)], source.metric, oldest)

    def _of(self, nodes: Collection[str]) -> Sequence[HeldNode]:
        return [held for node, held in self._nodes.items() if not nodes or node in nodes]

    def _unknown(self, nodes: Collection[str]) -> Sequence[Told]:
        """One silence for each node that is named and that the fleet does not know."""
        return [SILENT for node in nodes if node not in self._nodes]

    def _sample(self, told: Sequence[Told], metric: str, oldest: float) -> Sample:
        now = self._clock.now()
        able = [one for one in told if one.able]
        known = [(one.value, one.at) for one in able if one.value is not None and now <= one.fresh_until]
        fresh = [(value, at) for value, at in known if now - at <= oldest]
        counted = fresh or known  # where all are too old, their age says so
        silent = len(able) - len(fresh)
        if counted:
            values = tuple(value for value, _ in counted)
            return Sample(values, min(at for _, at in counted), silent_count=silent)
        nothing = f"none of {silent} tells {metric}" if silent else f"nothing in the fleet has {metric}"
        return Sample(problem=self._problem or nothing, silent_count=silent)

    async def _follow(self, backoff: Backoff) -> None:
        request = monitor_api.WatchNodesRequest(min_interval=wire.to_duration(LEAST_INTERVAL))
        first_round: dict[str, HeldNode] | None = {}
        with rpc_errors():
            async for message in self._stub.WatchNodes(request):
                backoff.reset()
                self._take_in(message, self._nodes if first_round is None else first_round)
                if first_round is not None and message.full:
                    self._nodes, first_round = first_round, None
                    if self._problem:
                        _log.info("following the fleet", nodes=len(self._nodes))
                    self._problem = ""

    def _take_in(self, message: monitor_api.WatchNodesResponse, nodes: dict[str, HeldNode]) -> None:
        arrived = self._clock.now()
        for node in message.nodes:
            if (ids := names.match(names.NODE, node.name)) is not None:
                nodes[ids["node"]] = HeldNode(node, arrived)
        for name in message.removed:
            if (ids := names.match(names.NODE, name)) is not None:
                nodes.pop(ids["node"], None)

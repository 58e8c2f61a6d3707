"""Readings of GPUs and hosts, as streamed by the fleet.

The stream is opened once a signal needs it. While it is down readings age, and do not count beyond three periods of their
agent. A GPU or host that should report but does not is silent; one that cannot report is left out.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.message import Message

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.autoscaler.domain.signals import Sample
from gpuscale.autoscaler.domain.spec import GpuSignal, HostSignal
from gpuscale.common import names, wire
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, endings

FRESH_PERIODS = 3
"""Periods for which a reading counts (DESIGN: older than three is STALE)."""
DEFAULT_PERIOD = 1.0
"""Seconds between two snapshots of an agent that does not say."""
_DERIVED: Mapping[tuple[type, str], tuple[tuple[str, str], Callable[[float, float], float]]] = {
    (types_api.GpuReading, "memory_used_percent"): (
        ("memory_used_bytes", "memory_total_bytes"),
        lambda used, total: 100 * used / total,
    ),
    (types_api.HostReading, "memory_used_percent"): (
        ("memory_available_bytes", "memory_total_bytes"),
        lambda left, total: 100 * (1 - left / total),
    ),
    (types_api.HostReading, "load_per_core"): (("load_1m", "cpu_count"), lambda load, cores: load / cores),
}
"""Metrics that are quotients of two fields of a reading, the second of which is not 0."""
# A GPU in one of these answers; the freshness of each reading is judged separately.
_ANSWERING = frozenset(
    {
        types_api.GpuState.GPU_STATE_OK,
        types_api.GpuState.GPU_STATE_DEGRADED,
        types_api.GpuState.GPU_STATE_SLOW,
    }
)


@dataclass(frozen=True, slots=True)
class Told:
    """The reading of one GPU or host."""

    value: float | None = None  # None if there is none
    at: float = 0.0  # when it was read, in seconds since boot
    fresh_until: float = 0.0  # when it will be three periods old
    able: bool = True  # whether it supports the reading; a device that does not is not silent


SILENT = Told()


@dataclass(frozen=True, slots=True)
class HeldNode:
    """A node as the fleet last sent it, and when that arrived, in seconds since boot."""

    message: monitor_api.Node
    arrived: float

    def gpus(self, metric: str) -> Iterator[tuple[str, Told]]:
        """The UUID of each GPU, in lower case, with its reading, except those divided into MIG instances."""
        snapshot = self.message.snapshot
        for gpu in snapshot.gpus:
            if gpu.state == types_api.GpuState.GPU_STATE_DIVIDED:
                continue
            told = self._told(gpu.reading, metric)
            yield gpu.uuid.lower(), told if gpu.state in _ANSWERING or not told.able else SILENT
        if snapshot.gpu_problem and not snapshot.gpus:
            yield "", SILENT  # nobody knows how many there are

    def host(self, metric: str) -> Told:
        """The reading of its host."""
        return self._told(self.message.snapshot.host_reading, metric)

    def _told(self, reading: types_api.GpuReading | types_api.HostReading, metric: str) -> Told:
        fields, derive = _DERIVED.get((type(reading), metric), ((metric,), None))
        message = cast("Message", reading)  # any field of it
        found = [float(getattr(message, field)) for field in fields if message.HasField(field)]
        value = None
        if len(found) == len(fields):
            value = found[0] if derive is None else derive(*found) if found[1] else None
        unsupported = types_api.ReadingStatus.READING_STATUS_NOT_SUPPORTED
        if value is None and any(
            one.status == unsupported and one.field in fields for one in reading.absent_readings
        ):
            return Told(able=False)
        if self.message.state != monitor_api.NodeState.NODE_STATE_ONLINE:
            return SILENT
        snapshot = self.message.snapshot
        at = self.arrived - max(wire.seconds(snapshot.age), wire.seconds(reading.age))
        return Told(value, at, at + FRESH_PERIODS * (wire.seconds(snapshot.period) or DEFAULT_PERIOD))


LEAST_INTERVAL = 0.5
"""Seconds between messages of the fleet; signals need no more."""
_RETRY_CAP = 5.0

_log = get_logger(__name__)


class FleetMetrics:
    """Follows the fleet, and answers signals' queries."""

    def __init__(self, fleet: grpc.aio.Channel, clock: Clock) -> None:
        self._stub = monitor_api.FleetServiceStub(fleet)
        self._clock = clock
        self._nodes: dict[str, HeldNode] = {}
        self._wanted = asyncio.Event()
        self._problem = "the fleet has not answered yet"

    async def run(self) -> None:
        """Follow the fleet for ever, once queried, across broken streams and restarts of the fleet."""
        await self._wanted.wait()
        async for problem in endings(self._follow, _RETRY_CAP):
            if not self._problem:
                _log.warning("lost the fleet", problem=problem)
            self._problem = f"the fleet cannot be followed: {problem}"

    def gpus(self, source: GpuSignal, own: Collection[str], oldest: float) -> Sample:
        """A GPU reading; `own` are the UUIDs held by the endpoint's ready replicas.

        GPUs with a reading older than `oldest` seconds, or on a node that is not online, are silent.
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
        """A host reading; hosts with a reading older than `oldest` seconds, or not online, are silent."""
        self._wanted.set()
        told = [held.host(source.metric) for held in self._of(source.nodes)]
        return self._sample([*told, *self._unknown(source.nodes)], source.metric, oldest)

    def _of(self, nodes: Collection[str]) -> Sequence[HeldNode]:
        return [held for node, held in self._nodes.items() if not nodes or node in nodes]

    def _unknown(self, nodes: Collection[str]) -> Sequence[Told]:
        """One silence for each named node that the fleet does not know."""
        return [SILENT for node in nodes if node not in self._nodes]

    def _sample(self, told: Sequence[Told], metric: str, oldest: float) -> Sample:
        now = self._clock.now()
        known = [(one.value, one.at) for one in told if one.value is not None and now <= one.fresh_until]
        fresh = [(value, at) for value, at in known if now - at <= oldest]
        silent = sum(one.able for one in told) - len(fresh)
        if known:
            values, dates = zip(*(fresh or known), strict=True)  # if all are too old, their age shows it
            return Sample(values, min(dates), silent_count=silent)
        nothing = f"none of {silent} reports {metric}" if silent else f"nothing in the fleet has {metric}"
        return Sample(problem=self._problem or nothing, silent_count=silent)

    async def _follow(self, backoff: Backoff) -> None:
        request = monitor_api.WatchNodesRequest(min_interval=wire.to_duration(LEAST_INTERVAL))
        first_round: dict[str, HeldNode] | None = {}
        with rpc_errors():
            async for message in self._stub.WatchNodes(request):
                backoff.reset()
                nodes, arrived = self._nodes if first_round is None else first_round, self._clock.now()
                for node in message.nodes:
                    if (ids := names.match(names.NODE, node.name)) is not None:
                        nodes[ids["node"]] = HeldNode(node, arrived)
                for name in message.removed:
                    if (ids := names.match(names.NODE, name)) is not None:
                        nodes.pop(ids["node"], None)
                if first_round is not None and message.full:
                    self._nodes, first_round = first_round, None
                    if self._problem:
                        _log.info("following the fleet", nodes=len(self._nodes))
                    self._problem = ""

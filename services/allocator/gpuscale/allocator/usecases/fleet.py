"""The fleet as the allocator knows it: every node as last reported, in the order in which nodes were first seen.

`FleetFollower` follows the fleet's WatchNodes stream into a `FleetView`. While the stream is down the view stays and ages:
readings older than three periods are STALE, so nothing is granted on outdated reports. This host's clock counts the ages from
the arrival of a message.

A node that the fleet no longer names is kept as OFFLINE with its GPUs: a restarted fleet only knows the agents that have come
back so far, and "not back yet" must not mean "never existed". Only a node that the fleet was told to forget is removed, once
nothing is held on it.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc

from gpuscale.allocator.domain.model import WHOLE, Gpu, GpuProcess, HardwareLook, Node, NodeState
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import names, wire
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.runtime.tasks import Backoff, Clock, endings
from gpuscale.common.topology import PciPlace


class FleetView:
    """The known nodes.

    `complete` says whether the fleet has named all its nodes since the allocator started, and one of them has reported. `ranks`
    has the rank of each node seen before; new nodes get the next higher ranks.
    """

    def __init__(self, ranks: Mapping[str, int]) -> None:
        self._ranks = dict(ranks)
        self._next_rank = max(ranks.values(), default=-1) + 1
        self.unsaved: dict[str, int] = {}
        """Ranks given that are not on disk yet."""
        self._nodes = {
            node: Node(node, rank, NodeState.OFFLINE, (), reported=False) for node, rank in ranks.items()
        }
        self._named_all = False
        self.complete = False

    @property
    def nodes(self) -> Sequence[Node]:
        """All known nodes."""
        return tuple(self._nodes.values())

    def get(self, node: str) -> Node | None:
        """A node by its id."""
        return self._nodes.get(node)

    def _update(self, nodes: Mapping[str, Node]) -> None:
        self._nodes.update(nodes)
        self.complete = self._named_all and any(node.reported for node in self._nodes.values())

    def rank(self, node: str) -> int:
        """The permanent rank of a node; a new node gets the next one."""
        if node not in self._ranks:
            self._ranks[node] = self.unsaved[node] = self._next_rank
            self._next_rank += 1
        return self._ranks[node]

    def forget(self, node_ids: Iterable[str]) -> Sequence[Node]:
        """These nodes are gone for good, unless they report again; returns the known ones, updated."""
        gone = {
            node: replace(self._nodes[node], state=NodeState.OFFLINE, gpus=(), reported=True, forgotten=True)
            for node in node_ids
            if node in self._nodes
        }
        self._update(gone)
        return tuple(gone.values())

    def drop(self, node: str) -> int:
        """Remove a node; returns its rank. It is a new node if it ever reports again."""
        del self._nodes[node]
        self._update({})
        self.unsaved.pop(node, None)
        return self._ranks.pop(node)

    def renew(self, node_ids: Iterable[str], now: float) -> Sequence[str]:
        """These nodes reported no change; returns the known ones, whose readings stay fresh for longer."""
        found = [node for one in node_ids if (node := self._nodes.get(one)) and node.reported]
        for node in found:
            until = now + node.fresh_for
            for gpu in node.gpus:
                if gpu.fresh_until > float("-inf"):
                    gpu.fresh_until = max(until, gpu.fresh_until)
        return [node.id for node in found]

    def apply(self, nodes: Iterable[Node], *, full: bool) -> Sequence[Node]:
        """Take in the state of nodes, and return all that changed; with `full`, the fleet knows no others.

        A node without a snapshot, as after a restart of the fleet, keeps its GPUs.
        """
        changed: dict[str, Node] = {}
        for node in nodes:
            known = self._nodes.get(node.id)
            keeps = not (node.reported or known is None or known.forgotten)
            changed[node.id] = replace(known, state=node.state) if known and keeps else node
        if full:
            self._named_all = True
            for node in self._nodes.values():
                changed.setdefault(node.id, replace(node, state=NodeState.OFFLINE))
        self._update(changed)
        return tuple(changed.values())


FRESH_PERIODS = 3
"""Periods for which a reading is fresh (DESIGN: older than three is STALE)."""
DEFAULT_PERIOD = 1.0
"""Default seconds between two snapshots of an agent."""
MIN_INTERVAL = 0.1
"""Seconds between messages: reports of thousands of nodes are combined."""
_RETRY_CAP = 5.0

_NODE_STATES = {
    monitor_api.NodeState.NODE_STATE_ONLINE: NodeState.ONLINE,
    monitor_api.NodeState.NODE_STATE_STALE: NodeState.STALE,
}
# A GPU in one of these answers, or did until now; its readings are judged one by one.
_ANSWERING = {
    types_api.GpuState.GPU_STATE_OK,
    types_api.GpuState.GPU_STATE_DEGRADED,
    types_api.GpuState.GPU_STATE_SLOW,
    types_api.GpuState.GPU_STATE_STALE,
}

_log = get_logger(__name__)


@dataclass(eq=False)
class FleetFollower:
    """Keeps a view current for as long as it runs.

    `seen` is called with nodes that changed, `renewed` with those whose readings only stay fresh for longer. `problem` is why the
    view is not being kept current; empty while it is.
    """

    channel: grpc.aio.Channel
    view: FleetView
    clock: Clock
    save_ranks: Callable[[Mapping[str, int]], Awaitable[None]]
    seen: Callable[[Sequence[Node]], None]
    renewed: Callable[[Sequence[str]], None]
    problem: str = field(default="the fleet has not answered yet", init=False)

    def no_telemetry(self) -> UnavailableError:
        """The error for an incomplete view."""
        problem = self.problem or "no agent has reported to the fleet yet"
        return UnavailableError(
            f"the fleet's GPUs are not known yet: {problem}", reason="NO_TELEMETRY", retry_after=1.0
        )

    async def run(self) -> None:
        """Follow the fleet for ever, across broken streams and restarts of the fleet."""
        follow = partial(self._follow, Attempts(_log, "cannot save node ranks", UnavailableError))
        async for problem in endings(follow, _RETRY_CAP, "the fleet ended the stream"):
            if not self.problem:
                _log.warning("lost the fleet", problem=problem)
            self.problem = problem

    async def _follow(self, saving: Attempts, backoff: Backoff) -> None:
        first_round: list[Node] = []
        full = False
        stub, interval = monitor_api.FleetServiceStub(self.channel), wire.to_duration(MIN_INTERVAL)
        request = monitor_api.WatchNodesRequest(min_interval=interval, placement_only=True)
        with rpc_errors():
            async for message in stub.WatchNodes(request):
                backoff.reset()
                now = self.clock.now()
                nodes = [*filter(None, (node_of(node, self.view, now) for node in message.nodes))]
                if full:
                    named = filter(None, (names.match(names.NODE, name) for name in message.removed))
                    gone = self.view.forget(ids["node"] for ids in named)
                    self.seen([*self.view.apply(nodes, full=False), *gone])
                    again = (names.match(names.NODE, name) for name in message.unchanged)
                    self.renewed(self.view.renew([ids["node"] for ids in again if ids], now))
                else:
                    first_round += nodes
                    full = message.full
                    if not full:
                        continue
                    self.seen(self.view.apply(first_round, full=True))
                    if self.problem:
                        _log.info("following the fleet", nodes=len(self.view.nodes))
                        self.problem = ""
                if unsaved := self.view.unsaved.copy():
                    with saving:  # again with the next message; a grant would fail on the same disk
                        await self.save_ranks(unsaved)
                        for node_id in unsaved:
                            self.view.unsaved.pop(node_id, None)


def node_of(message: monitor_api.Node, view: FleetView, now: float) -> Node | None:
    """The node of a message that arrived at `now`; None if its name is invalid.

    The fleet reports a node once its agent has connected, before the first snapshot: such a node has not reported.
    """
    ids = names.match(names.NODE, message.name)
    if ids is None:
        return None
    node = ids["node"]
    snapshot = message.snapshot
    fresh_for = FRESH_PERIODS * (wire.seconds(snapshot.period) or DEFAULT_PERIOD)
    fresh_until = now - wire.seconds(snapshot.age) + fresh_for
    by_uuid = {gpu.uuid: gpu for gpu in snapshot.gpus}
    host = snapshot.host_reading
    return Node(
        id=node,
        rank=view.rank(node),
        state=_NODE_STATES.get(message.state, NodeState.OFFLINE),
        gpus=tuple(
            _gpu(gpu, min(fresh_until, now - wire.seconds(gpu.reading.age) + fresh_for), fresh_for)
            for gpu in by_uuid.values()
        ),
        labels=dict(snapshot.host.labels),
        cpu_milli=host.cpu_count * WHOLE if host.cpu_count else None,
        memory_total_bytes=host.memory_total_bytes or None,
        reported=message.HasField("snapshot"),
        gpu_problem=snapshot.gpu_problem,
        fresh_for=fresh_for,
    )


_ECC: tuple[Any, ...] = ("ecc_volatile_corrected_count", "ecc_volatile_uncorrected_count")


def _gpu(message: types_api.Gpu, fresh_until: float, fresh_for: float) -> Gpu:
    reading = message.reading
    stale = message.state == types_api.GpuState.GPU_STATE_STALE
    trouble = ""
    if message.state not in _ANSWERING:
        known = message.state in types_api.GpuState.values()
        trouble = types_api.GpuState.Name(message.state) if known else f"STATE_{message.state}"
    quarantine = message.quarantine
    if message.HasField("quarantine_time"):
        quarantine += f", since {wire.to_datetime(message.quarantine_time):%Y-%m-%d %H:%M:%S} UTC"
    return Gpu(
        uuid=message.uuid,
        index=message.index,
        model=message.model,
        simulated=message.simulated,
        trouble=trouble.removeprefix("GPU_STATE_"),
        memory_total_bytes=reading.memory_total_bytes or None,
        memory_free_bytes=reading.memory_free_bytes if reading.HasField("memory_free_bytes") else None,
        utilization_percent=reading.utilization_percent if reading.HasField("utilization_percent") else None,
        fresh_until=float("-inf") if stale else fresh_until,
        memory_used_bytes=reading.memory_used_bytes if reading.HasField("memory_used_bytes") else None,
        mig_profile=message.mig_profile,
        parent=message.parent_uuid,
        place=PciPlace(message.pci_path, message.numa_node if message.HasField("numa_node") else None),
        nvlinks={peer.uuid: peer.link_count for peer in message.nvlinks},
        processes=tuple(
            GpuProcess(
                pid=one.pid,
                memory_bytes=one.memory_used_bytes if one.HasField("memory_used_bytes") else None,
                command=one.command,
                reservation=ids["reservation"]
                if (ids := names.match(names.RESERVATION, one.reservation))
                else None,
                unknown=one.holder_unknown,
                start_ticks=one.start_ticks if one.HasField("start_ticks") else None,
            )
            for one in reading.processes
        ),
        quarantine=quarantine,
        processes_known=all(one.field != "processes" for one in reading.absent_readings),
        power_watts=reading.power_watts if reading.HasField("power_watts") else None,
        power_limit_watts=reading.power_limit_watts if reading.HasField("power_limit_watts") else None,
        rated_watts=reading.power_limit_default_watts or reading.power_limit_watts or None,
        energy_joules=reading.energy_joules if reading.HasField("energy_joules") else None,
        hardware=HardwareLook(
            reading.sm_clock_mhz if reading.HasField("sm_clock_mhz") else None,
            tuple(one for one in reading.throttle_reasons if one != "gpu_idle"),
            *(getattr(reading, name) if reading.HasField(name) else None for name in _ECC),
        ),
        read_at=fresh_until - fresh_for,
    )

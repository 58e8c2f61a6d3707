"""Records of nodes and their streams, the owners of GPUs, and when nodes turn stale.

`Fit` decides which snapshots a scheduler needs. The utilization of a GPU that only leases use is not among the reasons.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from heapq import heappop, heappush
from typing import Self

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.wire import seconds, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.model.nodes import Epoch, NodeSample, NodeState, is_gone, node_state, stale_at
from gpuscale.monitor.wire import Change, Picture, count_on

RELAXED = 10.0
"""Seconds after which any change is sent."""
SETTLED = 2.0
"""The same after processes came or went, so that their use is seen even if they end soon."""
UTILIZATION_STEP, MEMORY_STEP = 5.0, 1 / 64
"""The least change that counts: points of utilization, and a share of a GPU's memory."""
_USED, _FREE, _TOTAL = (
    types_api.GpuReading.DESCRIPTOR.fields_by_name[name].number
    for name in ("utilization_percent", "memory_free_bytes", "memory_total_bytes")
)


_Facts = tuple[int, int, tuple[bool, bool], bool, frozenset[tuple[int, str, bool]]]
_NOBODY: frozenset[tuple[int, str, bool]] = frozenset()


class Fit:
    """What a scheduler was sent of a node; `number` changes whenever it must be sent again."""

    __slots__ = ("_at", "_free", "_gpus", "_host", "_lags", "_leased", "_relaxed", "_used", "number")

    def __init__(self) -> None:
        self.number = 0
        self._at = float("-inf")
        self._relaxed = RELAXED
        self._host: tuple[int, int] | None = None
        self._gpus: list[_Facts] = []
        self._leased: list[bool] = []
        self._lags = False
        self._used: Sequence[float] = ()
        self._free: Sequence[float] = ()

    def take(self, picture: Picture, now: float, change: Change | None) -> bool:
        """Whether to send a picture after `change`, or after a whole snapshot for None."""
        if change is not None and now < self._at + self._relaxed and not self._decides(picture, change):
            return False
        self._at, self._relaxed = now, RELAXED
        if change is None or change.host is not None:
            host = picture.host_reading
            self._host = host.cpu_count, host.memory_total_bytes
        if change is None or change.gpus:  # tables of numbers change none of this
            gpus = picture.snapshot.gpus
            same: dict[_Facts, _Facts] = {}  # most GPUs of a node share them
            facts = [same.setdefault(one, one) for one in map(_facts, gpus)]
            if change is not None and facts != self._gpus:
                self._relaxed = SETTLED
            self._gpus = facts
            self._leased = [  # whether only leases use it
                bool(processes) and not unreadable and all(reservation for _, reservation, _ in processes)
                for *_, unreadable, processes in facts
            ]
            self._lags = any(seconds(gpu.reading.age) > picture.period / 2 for gpu in gpus)
        self._used, self._free = picture.column(_USED), picture.column(_FREE)
        return True

    def _decides(self, picture: Picture, change: Change) -> bool:
        host = picture.host_reading if change.host is not None else None
        if self._lags or (host is not None and self._host != (host.cpu_count, host.memory_total_bytes)):
            return True
        gpus = picture.snapshot.gpus if change.gpus else ()
        for place in [one.place for one in change.gpus]:
            reading = gpus[place].reading
            if _facts(gpus[place]) != self._gpus[place] or seconds(reading.age) > picture.period / 2:
                return True
            now = ([reading.utilization_percent], [reading.memory_free_bytes])
            if self._moved(picture, (_USED, _FREE), [place], now):
                return True
        numbers = change.numbers
        return self._moved(picture, numbers.fields, numbers.places, numbers.columns)

    def _moved(
        self,
        picture: Picture,
        fields: Iterable[int],
        places: Sequence[int],
        columns: Iterable[Sequence[float]],
    ) -> bool:
        """Whether one of these readings is far from what was sent and matters."""
        for number, values in zip(fields, columns, strict=False):
            if number not in (_USED, _FREE):
                continue
            totals = picture.column(_TOTAL) if number == _FREE else ()
            for place, value in zip(places or range(len(values)), values, strict=True):
                if number == _FREE:
                    moved = abs(value - self._free[place]) > totals[place] * MEMORY_STEP
                else:
                    moved = not self._leased[place] and abs(value - self._used[place]) > UTILIZATION_STEP
                if moved:
                    return True
        return False


def _facts(gpu: types_api.Gpu) -> _Facts:
    """Everything else of a GPU that matters to a scheduler."""
    reading = gpu.reading
    found, absent = reading.processes, reading.absent_readings
    processes = (
        frozenset((one.pid, one.reservation, one.holder_unknown) for one in found) if found else _NOBODY
    )
    unreadable = bool(absent) and any(one.field == "processes" for one in absent)
    known = reading.HasField("utilization_percent"), reading.HasField("memory_free_bytes")
    return gpu.state, reading.memory_total_bytes, known, unreadable, processes


@dataclass(slots=True)
class NodeRecord:
    """The state of a node."""

    node: str
    first_seen: datetime
    epoch: Epoch
    agent_version: str
    stream: "AgentStream | None" = None
    sample: NodeSample | None = None
    # the last snapshot, received at `received_at`
    picture: Picture | None = None
    received_at: float = 0.0
    rejected_count: int = 0
    shown_state: NodeState = NodeState.OFFLINE  # the state that watchers were sent last
    # quarantined GPUs, by lower-case UUID
    quarantines: Mapping[str, monitor_internal.Quarantine] = field(
        default_factory=dict[str, monitor_internal.Quarantine]
    )
    awaited: bool = False  # whether `Online` watches it
    fit: Fit = field(default_factory=Fit)

    @property
    def snapshot(self) -> types_api.Snapshot | None:
        """The last snapshot, built on each access; do not modify or keep it. None without one."""
        return None if self.picture is None else self.picture.snapshot

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs of the node, in lower case. No other node has one of them."""
        return () if self.picture is None else self.picture.uuids

    def state(self, now: float) -> NodeState:
        """The state of the node at `now`."""
        return node_state(self.sample, streaming=self.stream is not None, now=now)

    def is_gone(self, now: float) -> bool:
        """Whether the node is gone, as `nodes.is_gone` says."""
        return is_gone(self.sample, streaming=self.stream is not None, now=now)


@dataclass(slots=True, eq=False)
class AgentStream:
    """The state of one agent's stream, until its block ends."""

    record: NodeRecord
    epoch: Epoch
    end: Callable[[], None]  # ends it
    left: "Callable[[AgentStream], None]"  # called when its block ends
    acked_seq: int = -1  # seq of its last accepted snapshot; -1 for none
    # seq of the snapshot that a delta must change; None if a whole one must come
    base_seq: int | None = None
    rejected_count: int = 0  # rejected messages
    rejected_reason: str = ""  # the reason of the last one
    # the quarantines that were sent to its agent; None before the first acknowledgement
    told: Mapping[str, monitor_internal.Quarantine] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.left(self)

    @property
    def node(self) -> str:
        """Id of the node."""
        return self.record.node


class Owners:
    """The nodes of all GPUs, by lower-case UUID."""

    def __init__(self) -> None:
        self._owners: dict[str, NodeRecord] = {}

    def find(self, uuid: str) -> NodeRecord | None:
        """The node of a GPU; None if no node reports it."""
        return self._owners.get(uuid.lower())

    def refuse(self, record: NodeRecord, picture: Picture, now: float) -> str:
        """Why a node may not report the GPUs of a picture; empty if it may."""
        if record.uuids == picture.uuids:
            return ""
        for place, uuid in enumerate(picture.uuids):
            owner = self._owners.get(uuid, record)
            if owner is not record and not owner.is_gone(now):
                return f"GPU {picture.snapshot.gpus[place].uuid} is reported by {node_name(owner.node)}"
        return ""

    def own(self, record: NodeRecord, picture: Picture) -> list[NodeRecord]:
        """Take over the GPUs of a node's next picture; returns the nodes that lost one."""
        if record.uuids == picture.uuids:
            return []
        self._release(record, set(record.uuids).difference(picture.uuids))
        losers: list[NodeRecord] = []
        for uuid in picture.uuids:
            owner = self._owners.get(uuid)
            if owner is not None and owner is not record:
                if owner.picture is not None:  # remove the GPU from the lost node
                    kept = types_api.Snapshot()
                    owner.picture.write(kept)
                    del kept.gpus[owner.uuids.index(uuid)]
                    owner.picture = Picture(kept)
                    owner.picture.rest()
                losers.append(owner)
            self._owners[uuid] = record
        return losers

    def forget(self, record: NodeRecord) -> None:
        """Release all GPUs of a node."""
        self._release(record, record.uuids)

    def _release(self, record: NodeRecord, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if self._owners.get(uuid) is record:
                del self._owners[uuid]


class Online:
    """ONLINE nodes by the time at which a snapshot turns stale. Newer snapshots are looked for only then."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, NodeRecord]] = []
        self._count = 0

    def await_stale(self, record: NodeRecord) -> None:
        """Watch a node that has a snapshot."""
        if record.sample is not None:
            record.awaited = True
            self._count += 1
            heappush(self._heap, (stale_at(record.sample), self._count, record))

    def due(self, now: float) -> list[NodeRecord]:
        """The nodes whose last snapshot is now stale; they are no longer watched."""
        found: list[NodeRecord] = []
        while self._heap and self._heap[0][0] < now:
            record = heappop(self._heap)[2]
            record.awaited = False
            if record.sample is not None and stale_at(record.sample) >= now:
                self.await_stale(record)
            else:
                found.append(record)
        return found


_STATE = {state: api.NodeState.Value(f"NODE_STATE_{state.name}") for state in NodeState}


def to_node(record: NodeRecord, now: float) -> api.Node:
    """A node as a message, with ages as of `now` on the fleet's clock."""
    state = record.state(now)
    node = api.Node(
        name=node_name(record.node),
        state=_STATE[state],
        agent_version=record.agent_version,
        first_seen_time=to_timestamp(record.first_seen),
        rejected_count=record.rejected_count,
    )
    if record.picture is not None:
        record.picture.write(node.snapshot)
        count_on(node.snapshot, now - record.received_at)
        if state is not NodeState.ONLINE:
            for gpu in node.snapshot.gpus:
                gpu.state = types_api.GpuState.GPU_STATE_STALE
        for gpu in node.snapshot.gpus if record.quarantines else ():
            found = record.quarantines.get  # a MIG instance has the quarantine of its GPU
            quarantine = found(gpu.uuid.lower()) or found(gpu.parent_uuid.lower())
            if quarantine is not None:
                gpu.quarantine = quarantine.reason
                gpu.quarantine_time.CopyFrom(quarantine.start_time)
    return node

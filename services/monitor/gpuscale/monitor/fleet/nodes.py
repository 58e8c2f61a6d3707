"""The index of all nodes: their streams, last snapshots and refusals.

A node has one stream at a time. A stream with the same or a newer epoch takes the node over and ends the older one; within an
epoch only a higher seq is accepted. So no order of arrival moves a node back in time.

`Directory` finds GPUs and nodes by resource name or UUID.
"""

from bisect import bisect, bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import errors
from gpuscale.common.names import GPU, NODE, gpu_name, match, node_name
from gpuscale.common.rpc.feed import ResourceFeed
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import seconds
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.fleet.record import AgentStream, NodeRecord, Online, Owners, to_node
from gpuscale.monitor.fleet.validation import broken_rule, refuse_change, refuse_snapshot
from gpuscale.monitor.model.nodes import Epoch, NodeSample, NodeState, refuse_epoch, refuse_sample
from gpuscale.monitor.recording import Target
from gpuscale.monitor.wire import Change, Picture

Observer = Callable[[str, Picture, float, Change | None], None]
"""Called with each accepted snapshot: node id, picture with changes merged, time on the fleet's clock, and the change (None for
a whole snapshot). Must be quick, must not raise, and must not modify or keep the picture."""
FaultObserver = Callable[[str, monitor_internal.ReportedFaults, float], None]
"""Called with faults that an agent reports: node id, faults, time on the fleet's clock. Must be quick and must not raise."""

SHARED_SECONDS = 0.1
"""How long an encoded node is shared; the ages in it lag behind by at most this."""

_log = get_logger(__name__)


class Nodes:
    """All nodes that reported since the fleet started, without forgotten ones.

    `awaited`: nodes with health events of an earlier run. `taken_count`: accepted snapshots.
    """

    def __init__(self, clock: Clock, max_nodes: int) -> None:
        self._clock = clock
        self._max_nodes = max_nodes
        self._records: dict[str, NodeRecord] = {}
        self._ids: list[str] = []  # in order
        self._owners = Owners()
        self._online = Online()
        self.feed: ResourceFeed[NodeRecord] = ResourceFeed(
            api.WatchNodesResponse, lambda record, _: to_node(record, clock.now()), shared=SHARED_SECONDS
        )
        self.observers: tuple[Observer, ...] = ()
        self.fault_observers: tuple[FaultObserver, ...] = ()
        self.awaited: set[str] = set()
        self.taken_count = 0

    def find(self, node: str) -> NodeRecord | None:
        """A node by id; None if it is unknown."""
        return self._records.get(node)

    def is_known(self, node: str) -> bool:
        """Whether a node has reported or is awaited."""
        return node in self._records or node in self.awaited

    def get(self, node: str) -> NodeRecord:
        """A node by id. NotFoundError if it never reported."""
        return errors.NotFoundError.unless(self._records.get(node), node_name(node))

    def owner(self, uuid: str) -> NodeRecord | None:
        """The node that reports a GPU; None without one."""
        return self._owners.find(uuid)

    def silence(self, now: float) -> Iterator[tuple[str, bool]]:
        """Each node id, and whether the node is STALE or OFFLINE."""
        for node, record in self._records.items():
            yield node, record.state(now) is not NodeState.ONLINE

    def quarantine(self, node: str, found: Mapping[str, monitor_internal.Quarantine]) -> None:
        """Set the quarantined GPUs of a node, by lower-case UUID."""
        record = self._records.get(node)
        if record is not None and record.quarantines != found:
            record.quarantines = found
            self._changed(record, self._clock.now())

    def all(self, after: str = "") -> Iterator[NodeRecord]:
        """All nodes by id, or those with higher ids; they may come and go between two of them."""
        return filter(None, map(self._records.get, self._ids[bisect(self._ids, after) :]))

    def forget(self, node: str) -> None:
        """Forget a node until an agent reports for it again. FailedPreconditionError while one streams."""
        if node in self.awaited:
            self.awaited.discard(node)
            _log.info("a node is no longer awaited", node=node)
            return
        record = self.get(node)
        if record.stream is not None:
            raise errors.FailedPreconditionError(
                f"the agent of {node_name(node)} is streaming: stop it first", reason="NODE_STREAMS"
            )
        self._owners.forget(record)
        del self._records[node], self._ids[bisect_left(self._ids, node)]
        self.feed.remove(node_name(node))
        _log.info("a node is forgotten", node=node)

    def connected(self, hello: monitor_internal.Hello, end: Callable[[], None]) -> AgentStream:
        """The stream of an agent, which reports for its node until its block ends. `end` ends it from outside.

        AbortedError if an agent that started later reports for the node, ResourceExhaustedError if there are too many nodes.
        """
        now = self._clock.now()
        epoch = Epoch(hello.start_time.seconds + hello.start_time.nanos / 1e9, hello.epoch)
        record = self._records.get(hello.node)
        if record is None:
            if len(self._records) >= self._max_nodes:
                raise errors.ResourceExhaustedError(
                    f"the fleet has {self._max_nodes} nodes already", reason="TOO_MANY_NODES"
                )
            self.awaited.discard(hello.node)
            record = NodeRecord(hello.node, self._clock.wall(), epoch, agent_version="")
            self._records[hello.node] = record
            insort(self._ids, hello.node)
        reason = refuse_epoch(record.epoch, epoch, gone=record.is_gone(now))
        if reason:
            raise errors.AbortedError(reason, reason="NEWER_EPOCH", metadata={"name": node_name(hello.node)})
        if record.stream is not None:
            _log.warning(
                "another stream takes over a node", node=hello.node, same_agent=epoch == record.epoch
            )
            record.stream.end()
        record.epoch = epoch
        record.agent_version = hello.agent_version
        record.stream = stream = AgentStream(record, epoch, end, self.left)
        self._changed(record, now)
        return stream

    def left(self, stream: AgentStream) -> None:
        """Note that the block of a stream ended."""
        if stream.record.stream is stream:
            stream.record.stream = None
            self._changed(stream.record, self._clock.now())
            _log.info("a node's stream ended", node=stream.node)

    def take(self, stream: AgentStream, request: monitor_internal.StreamTelemetryRequest) -> bool:
        """Accept a message after Hello, or count it as rejected; returns whether it was accepted."""
        now = self._clock.now()
        kind = request.WhichOneof("message")
        if stream.record.stream is not stream:
            reason = "another stream reports for this node"
        elif kind == "delta":
            reason = self._take_delta(stream, request.delta, now)
        elif kind == "snapshot":
            reason = self._take_snapshot(stream, request.snapshot, now)
        elif kind == "faults":
            reason = broken_rule(request.faults)
            for observe in () if reason else self.fault_observers:
                observe(stream.node, request.faults, now)
        elif kind is None and request.ByteSize():
            return True  # a kind of message from a newer agent
        else:
            reason = "it is not a snapshot"
        if not reason:
            return True
        if reason != stream.rejected_reason:
            _log.warning("a snapshot is refused", node=stream.node, reason=reason)
        stream.base_seq = None
        stream.rejected_count += 1
        stream.rejected_reason = reason
        stream.record.rejected_count += 1
        self.feed.put(node_name(stream.node), stream.record)
        return False

    def sweep(self) -> None:
        """Tell watchers of nodes that have become STALE."""
        now = self._clock.now()
        for record in self._online.due(now):
            if record.shown_state is NodeState.ONLINE:
                self._changed(record, now)

    def _take_snapshot(self, stream: AgentStream, snapshot: types_api.Snapshot, now: float) -> str:
        record = stream.record
        sample = NodeSample(stream.epoch, snapshot.seq, now - seconds(snapshot.age), seconds(snapshot.period))
        reason = refuse_snapshot(snapshot, stream.node, stream.epoch.id) or refuse_sample(
            record.sample, sample
        )
        if reason:
            return reason
        held = [(gpu, gpu.reading) for gpu in snapshot.gpus]  # or protobuf makes both anew for each who looks
        for gpu, _ in held:
            gpu.name = gpu_name.__wrapped__(record.node, gpu.uuid)  # of more GPUs than its cache holds
            _forget_quarantine(gpu)
        picture = Picture(snapshot)
        reason = self._owners.refuse(record, picture, now)
        if not reason:
            for loser in self._owners.own(record, picture):
                self._changed(loser, now)
            self._took(stream, sample, picture, now, None)
        return reason

    def _take_delta(self, stream: AgentStream, delta: monitor_internal.SnapshotDelta, now: float) -> str:
        picture, last = stream.record.picture, stream.record.sample
        if stream.base_seq is None or delta.base_seq != stream.base_seq or picture is None or last is None:
            return "it does not change the last accepted snapshot"
        change = Change.of(delta)
        sample = NodeSample(stream.epoch, change.stamp.seq, now - change.stamp.age, last.period)
        reason = refuse_sample(last, sample) or refuse_change(change, picture)
        if not reason:
            for gpu in change.gpus:
                _forget_quarantine(gpu)
            picture.merge(change)
            self._took(stream, sample, picture, now, change)
        return reason

    def _took(
        self, stream: AgentStream, sample: NodeSample, picture: Picture, now: float, change: Change | None
    ) -> None:
        record = stream.record
        record.sample, record.picture, record.received_at = sample, picture, now
        stream.acked_seq = stream.base_seq = sample.seq
        self.taken_count += 1
        for observe in self.observers:
            observe(record.node, picture, now, change)
        decides = record.fit.take(picture, now, change)
        picture.rest()
        self._changed(record, now, decides=decides)

    def _changed(self, record: NodeRecord, now: float, *, decides: bool = True) -> None:
        record.fit.number += decides
        record.shown_state = state = record.state(now)
        if state is NodeState.ONLINE and not record.awaited:
            self._online.await_stale(record)
        self.feed.put(node_name(record.node), record)


def _forget_quarantine(gpu: types_api.Gpu | monitor_internal.GpuDelta) -> None:
    """Drop the quarantine that an agent repeats, as the fleet knows better."""
    gpu.ClearField("quarantine")
    gpu.ClearField("quarantine_time")


MOST_GPUS = 1_024


class Directory:
    """Finds GPUs and nodes in the index."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def gpus(self, names: Sequence[str], uuids: Sequence[str]) -> list[Target]:
        """The GPUs of these names (a node means all of its GPUs) and UUIDs, without duplicates. NotFoundError if unknown."""
        found = {target.uuid.lower(): target for target in self._targets(names, uuids)}
        if not names and not uuids:
            raise _nothing()
        if len(found) > MOST_GPUS:
            raise errors.InvalidArgumentError(f"must name at most {MOST_GPUS} GPUs", field="names")
        return list(found.values())

    def subjects(self, names: Sequence[str], uuids: Sequence[str]) -> dict[str, str]:
        """The UUIDs of the nodes (empty) and GPUs of these names and UUIDs, by name. NotFoundError if unknown."""
        nodes = [name for name in names if match(NODE, name) is not None]
        found = {node_name(self._record(name).node): "" for name in nodes}
        gpus = [name for name in names if name not in nodes]
        found |= {target.name: target.uuid for target in self._targets(gpus, uuids)}
        if not found:
            raise _nothing()
        return found

    def _targets(self, names: Sequence[str], uuids: Sequence[str]) -> Iterator[Target]:
        for name in names:
            if match(NODE, name) is not None:
                record = self._record(name)
                yield from (_target(record, gpu) for gpu in _gpus(record))
            elif (ids := match(GPU, name)) is not None:
                yield _named(self._record(node_name(ids["node"])), name)
            else:
                raise errors.InvalidArgumentError(f"names must look like {NODE} or {GPU}", field="names")
        for uuid in uuids:
            owner = errors.NotFoundError.unless(self._nodes.owner(uuid), f"GPU {uuid}")
            yield _named(owner, gpu_name(owner.node, uuid))

    def _record(self, name: str) -> NodeRecord:
        return self._nodes.get(name.partition("/")[2])


def _named(record: NodeRecord, name: str) -> Target:
    for gpu in _gpus(record):
        if gpu.name == name:
            return _target(record, gpu)
    raise errors.NotFoundError.of(name)


def _gpus(record: NodeRecord) -> Sequence[types_api.Gpu]:
    snapshot = record.snapshot
    return snapshot.gpus if snapshot is not None else ()


def _target(record: NodeRecord, gpu: types_api.Gpu) -> Target:
    period = record.picture.period if record.picture is not None else 0.0
    return Target(gpu.name, gpu.uuid, gpu.index, gpu.model, period)


def _nothing() -> errors.InvalidArgumentError:
    return errors.InvalidArgumentError("names or uuids must name something", field="names")

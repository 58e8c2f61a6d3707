"""The index of all nodes: who reports for each, what was reported last, and what was refused.

A node has one stream at a time. A stream with the same or a newer epoch takes the node over and the older one is told
to end; within an epoch only a higher seq is taken in. So no order in which messages arrive moves a node back.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.clock import Clock
from gpuscale.common.errors import AbortedError, NotFoundError, ResourceExhaustedError
from gpuscale.common.logs import get_logger
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.wire import seconds
from gpuscale.monitor.fleet.model import Epoch, NodeState, Sample, refuse_epoch, refuse_sample
from gpuscale.monitor.fleet.sanity import refuse_snapshot
from gpuscale.monitor.fleet.staleness import is_gone, node_state
from gpuscale.monitor.fleet.watch import Watchers

_log = get_logger(__name__)


class Stream:
    """One agent's stream, as far as the index is concerned.

    Attributes:
        acked_seq: seq of its last snapshot that was taken in; -1 for none.
        rejected_count: how many of its snapshots were refused.
        rejected_reason: why the last one was.
    """

    def __init__(self, node: str, epoch: Epoch, end: Callable[[], None]) -> None:
        self.node = node
        self.epoch = epoch
        self.end = end
        self.acked_seq = -1
        self.rejected_count = 0
        self.rejected_reason = ""


@dataclass(slots=True)
class Record:
    """What is known of a node. `snapshot` is as it was received at `received_at`, with its GPUs named."""

    node: str
    first_seen: datetime
    epoch: Epoch
    agent_version: str
    stream: Stream | None = None
    sample: Sample | None = None
    snapshot: types_api.Snapshot | None = None
    received_at: float = 0.0
    rejected_count: int = 0
    shown_state: NodeState = NodeState.OFFLINE

    def state(self, now: float) -> NodeState:
        """Whether the node can be counted on."""
        return node_state(self.sample, streaming=self.stream is not None, now=now)

    def is_gone(self, now: float) -> bool:
        """Whether the node is given up."""
        return is_gone(self.sample, streaming=self.stream is not None, now=now)


class Nodes:
    """All nodes that reported since the fleet started."""

    def __init__(self, clock: Clock, max_nodes: int) -> None:
        self._clock = clock
        self._max_nodes = max_nodes
        self._records: dict[str, Record] = {}
        self._owners: dict[str, str] = {}  # GPU UUID in lower case: id of the node that reports it
        self.watchers = Watchers()

    def get(self, node: str) -> Record:
        """A node by its id.

        Raises:
            NotFoundError: it never reported.
        """
        record = self._records.get(node)
        if record is None:
            raise NotFoundError(f"there is no {node_name(node)}", metadata={"name": node_name(node)})
        return record

    def all(self) -> list[Record]:
        """Every node, by id."""
        return [self._records[node] for node in sorted(self._records)]

    @contextmanager
    def connected(self, hello: monitor_api.Hello, end: Callable[[], None]) -> Generator[Stream]:
        """The stream of an agent, which reports for its node until the block ends; `end` tells it to.

        Raises:
            AbortedError: an agent that started later reports for the node.
            ResourceExhaustedError: there are too many nodes.
        """
        stream = self._connect(hello, end)
        try:
            yield stream
        finally:
            self._disconnect(stream)

    def take(self, stream: Stream, request: monitor_api.StreamTelemetryRequest) -> bool:
        """Take in a snapshot, or refuse and count it; whether it was taken in."""
        record = self._records[stream.node]
        now = self._clock.now()
        snapshot = request.snapshot
        sample = Sample(
            epoch=stream.epoch,
            seq=snapshot.seq,
            sampled_at=now - seconds(snapshot.age),
            period=seconds(snapshot.period),
        )
        reason = self._refuse(record, stream, request, sample, now)
        if reason:
            self._reject(record, stream, reason)
            return False
        self._own(record, snapshot, now)
        record.sample, record.snapshot, record.received_at = sample, snapshot, now
        stream.acked_seq = sample.seq
        self._changed(record, now)
        return True

    def sweep(self) -> None:
        """Tell watchers of nodes whose state changed because time passed."""
        now = self._clock.now()
        for record in self._records.values():
            if record.state(now) is not record.shown_state:
                self._changed(record, now)

    def _connect(self, hello: monitor_api.Hello, end: Callable[[], None]) -> Stream:
        now = self._clock.now()
        epoch = Epoch(hello.start_time.seconds + hello.start_time.nanos / 1e9, hello.epoch)
        record = self._records.get(hello.node)
        if record is None:
            record = self._add(hello.node, epoch)
        reason = refuse_epoch(record.epoch, epoch, gone=record.is_gone(now))
        if reason:
            raise AbortedError(reason, reason="NEWER_EPOCH", metadata={"name": node_name(hello.node)})
        if record.stream is not None:
            _log.warning(
                "another stream takes over a node", node=hello.node, same_agent=epoch == record.epoch
            )
            record.stream.end()
        record.epoch = epoch
        record.agent_version = hello.agent_version
        record.stream = Stream(hello.node, epoch, end)
        self._changed(record, now)
        return record.stream

    def _add(self, node: str, epoch: Epoch) -> Record:
        if len(self._records) >= self._max_nodes:
            raise ResourceExhaustedError(
                f"the fleet has {self._max_nodes} nodes already", reason="TOO_MANY_NODES"
            )
        record = Record(node, self._clock.wall(), epoch, agent_version="")
        self._records[node] = record
        return record

    def _disconnect(self, stream: Stream) -> None:
        record = self._records[stream.node]
        if record.stream is stream:
            record.stream = None
            self._changed(record, self._clock.now())
            _log.info("a node's stream ended", node=stream.node)

    def _refuse(
        self,
        record: Record,
        stream: Stream,
        request: monitor_api.StreamTelemetryRequest,
        sample: Sample,
        now: float,
    ) -> str:
        """Why a message of a stream is refused; empty if it is not."""
        if not request.HasField("snapshot"):
            return "it is not a snapshot"
        if record.stream is not stream:
            return "another stream reports for this node"
        return (
            refuse_snapshot(request.snapshot, stream.node, stream.epoch.id)
            or refuse_sample(record.sample, sample)
            or self._refuse_owned(request.snapshot, now)
        )

    def _refuse_owned(self, snapshot: types_api.Snapshot, now: float) -> str:
        for gpu in snapshot.gpus:
            owner = self._owners.get(gpu.uuid.lower(), snapshot.node)
            if owner != snapshot.node and not self._records[owner].is_gone(now):
                return f"GPU {gpu.uuid} is reported by {node_name(owner)}"
        return ""

    def _own(self, record: Record, snapshot: types_api.Snapshot, now: float) -> None:
        """Name the GPUs of a snapshot and note that the node reports them, and no longer those it left out."""
        uuids = {gpu.uuid.lower() for gpu in snapshot.gpus}
        before = record.snapshot.gpus if record.snapshot else ()
        for gpu in before:
            uuid = gpu.uuid.lower()
            if uuid not in uuids and self._owners.get(uuid) == record.node:
                del self._owners[uuid]
        for gpu in snapshot.gpus:
            gpu.name = gpu_name(record.node, gpu.uuid)
            uuid = gpu.uuid.lower()
            owner = self._owners.get(uuid)
            if owner is not None and owner != record.node:
                self._disown(self._records[owner], uuid, now)
            self._owners[uuid] = record.node

    def _disown(self, record: Record, uuid: str, now: float) -> None:
        """Strike a GPU that another node reports from a node that is gone."""
        if record.snapshot is not None:
            kept = [gpu for gpu in record.snapshot.gpus if gpu.uuid.lower() != uuid]
            del record.snapshot.gpus[:]
            record.snapshot.gpus.extend(kept)
            self._changed(record, now)

    def _reject(self, record: Record, stream: Stream, reason: str) -> None:
        if reason != stream.rejected_reason:
            _log.warning("a snapshot is refused", node=record.node, reason=reason)
        stream.rejected_count += 1
        stream.rejected_reason = reason
        record.rejected_count += 1
        self.watchers.mark(record.node)

    def _changed(self, record: Record, now: float) -> None:
        record.shown_state = record.state(now)
        self.watchers.mark(record.node)

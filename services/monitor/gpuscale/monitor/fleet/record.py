"""What the fleet keeps of a node, and of the stream that reports for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.monitor.fleet.staleness import is_gone, node_state
from gpuscale.monitor.model.nodes import Epoch, NodeState, Sample
from gpuscale.monitor.wire.merging import Picture


@dataclass(slots=True)
class Record:
    """What is known of a node.

    Attributes:
        picture: the last snapshot as it was received at `received_at`, with its GPUs named.
        shown_state: the state that watchers were told of last.
        quarantines: GPUs of it that no work should be placed on, by UUID in lower case, as health found.
        awaited: it is among the nodes that are watched for turning stale.
        encoded: the node as watchers get it, and when that was made; None since it changed.
    """

    node: str
    first_seen: datetime
    epoch: Epoch
    agent_version: str
    stream: "Stream | None" = None
    sample: Sample | None = None
    picture: Picture | None = None
    received_at: float = 0.0
    rejected_count: int = 0
    shown_state: NodeState = NodeState.OFFLINE
    quarantines: Mapping[str, monitor_api.Quarantine] = field(
        default_factory=dict[str, monitor_api.Quarantine]
    )
    encoded: tuple[bytes, float] | None = None
    awaited: bool = False

    @property
    def snapshot(self) -> types_api.Snapshot | None:
        """The last snapshot, if there was one; not to be changed or kept. It is put together for each who asks."""
        return None if self.picture is None else self.picture.snapshot

    @property
    def uuids(self) -> tuple[str, ...]:
        """The GPUs of the node, in lower case: no other node has one of them."""
        return () if self.picture is None else self.picture.uuids

    def state(self, now: float) -> NodeState:
        """Whether the node can be counted on."""
        return node_state(self.sample, streaming=self.stream is not None, now=now)

    def is_gone(self, now: float) -> bool:
        """Whether the node is given up."""
        return is_gone(self.sample, streaming=self.stream is not None, now=now)


@dataclass(slots=True, eq=False)
class Stream:
    """One agent's stream, as far as the index is concerned.

    Attributes:
        end: tells it to end.
        acked_seq: seq of its last snapshot that was taken in; -1 for none.
        base_seq: seq of the snapshot that a delta has to change; None where a whole one has to come.
        rejected_count: how many of its messages were refused.
        rejected_reason: why the last one was.
        told: the quarantines that its agent was told of; None before the first acknowledgement.
    """

    record: Record
    epoch: Epoch
    end: Callable[[], None]
    acked_seq: int = -1
    base_seq: int | None = None
    rejected_count: int = 0
    rejected_reason: str = ""
    told: Mapping[str, monitor_api.Quarantine] | None = None

    @property
    def node(self) -> str:
        """Id of the node."""
        return self.record.node

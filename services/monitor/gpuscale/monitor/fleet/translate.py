"""From the index to the messages of the contract."""

from google.protobuf.duration_pb2 import Duration

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.wire import seconds, to_duration, to_timestamp
from gpuscale.monitor.fleet.model import NodeState
from gpuscale.monitor.fleet.nodes import Record

_STATE = {one: monitor_api.NodeState.Value(f"NODE_STATE_{one.name}") for one in NodeState}


def to_node(record: Record, now: float) -> monitor_api.Node:
    """The node as it is at `now`, in seconds of the fleet's clock: ages are counted on until then."""
    state = record.state(now)
    node = monitor_api.Node(
        name=node_name(record.node),
        state=_STATE[state],
        agent_version=record.agent_version,
        first_seen_time=to_timestamp(record.first_seen),
        rejected_count=record.rejected_count,
    )
    if record.snapshot is not None:
        node.snapshot.CopyFrom(record.snapshot)
        _age(node.snapshot, now - record.received_at)
        if state is not NodeState.ONLINE:
            for gpu in node.snapshot.gpus:
                gpu.state = types_api.GpuState.GPU_STATE_STALE
    return node


def _age(snapshot: types_api.Snapshot, elapsed: float) -> None:
    """Make every age in the snapshot larger by the seconds that passed since it was received."""
    _add(snapshot.age, elapsed)
    if snapshot.host_reading.HasField("age"):
        _add(snapshot.host_reading.age, elapsed)
    for gpu in snapshot.gpus:
        if gpu.reading.HasField("age"):
            _add(gpu.reading.age, elapsed)


def _add(age: Duration, elapsed: float) -> None:
    age.CopyFrom(to_duration(seconds(age) + elapsed))

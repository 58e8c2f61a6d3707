"""From the index to the messages of the contract."""

from collections.abc import Mapping

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.wire import to_timestamp
from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.model.nodes import NodeState
from gpuscale.monitor.wire.merging import count_on

_STATE = {one: monitor_api.NodeState.Value(f"NODE_STATE_{one.name}") for one in NodeState}


def quarantine_of(
    gpu: types_api.Gpu, quarantines: Mapping[str, monitor_api.Quarantine]
) -> monitor_api.Quarantine | None:
    """The quarantine of a GPU by those of its node, by UUID in lower case; a MIG instance has that of its GPU."""
    found = quarantines.get(gpu.uuid.lower())
    return found or (quarantines.get(gpu.parent_uuid.lower()) if gpu.parent_uuid else None)


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
    if record.picture is not None:
        record.picture.write(node.snapshot)
        count_on(node.snapshot, now - record.received_at)
        if state is not NodeState.ONLINE:
            for gpu in node.snapshot.gpus:
                gpu.state = types_api.GpuState.GPU_STATE_STALE
        for gpu in node.snapshot.gpus if record.quarantines else ():
            quarantine = quarantine_of(gpu, record.quarantines)
            if quarantine is not None:
                gpu.quarantine = quarantine.reason
                gpu.quarantine_time.CopyFrom(quarantine.start_time)
    return node

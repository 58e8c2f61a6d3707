"""From the index to the messages of the contract."""

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.names import node_name
from gpuscale.common.wire import to_timestamp
from gpuscale.monitor.model.nodes import NodeState
from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.wire.merging import count_on

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
    if record.picture is not None:
        record.picture.write(node.snapshot)
        count_on(node.snapshot, now - record.received_at)
        if state is not NodeState.ONLINE:
            for gpu in node.snapshot.gpus:
                gpu.state = types_api.GpuState.GPU_STATE_STALE
        for gpu in node.snapshot.gpus if record.quarantines else ():
            whole = record.quarantines.get(gpu.parent_uuid.lower(), gpu.quarantine)
            gpu.quarantine = record.quarantines.get(gpu.uuid.lower(), whole)
    return node

"""The stream of nodes to those who watch them: each node is encoded once for all who are told of it at that time."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import node_name
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.wire import seconds
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import Record
from gpuscale.monitor.fleet.translate import to_node

# A message of a watch stays far below gRPC's limit of 4 MiB: a node with eight GPUs takes about 3 KiB.
NODES_PER_MESSAGE = 500
# The ages in an encoding are counted to when it was made; this much they may lag behind.
SHARED_SECONDS = 0.1

_FULL = monitor_api.WatchNodesResponse(full=True).SerializeToString()


class NodeFeed:
    """Streams the nodes of an index."""

    def __init__(self, nodes: Nodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock

    async def stream(self, request: monitor_api.WatchNodesRequest, _: object) -> AsyncGenerator[bytes, None]:
        """Every node, then those that changed, as encoded WatchNodesResponse."""
        interval = seconds(request.min_interval)
        with self._nodes.watchers.watch() as watch:
            everything = [record.node for record in self._nodes.all()]
            for start in range(0, len(everything) or 1, NODES_PER_MESSAGE):
                end = start + NODES_PER_MESSAGE
                full = _FULL if end >= len(everything) else b""
                yield self._message(everything[start:end]) + full
            while True:
                await asyncio.sleep(interval)
                changed = await watch.changed()
                for start in range(0, len(changed), NODES_PER_MESSAGE):
                    yield self._message(changed[start : start + NODES_PER_MESSAGE])

    def _message(self, nodes: Sequence[str]) -> bytes:
        """The nodes as they are now; those that are not known any more, by name."""
        now = self._clock.now()
        parts: list[bytes] = []
        for node in nodes:
            record = self._nodes.find(node)
            if record is None:
                parts.append(monitor_api.WatchNodesResponse(removed=[node_name(node)]).SerializeToString())
            else:
                parts.append(_encoded(record, now))
        return b"".join(parts)


def _encoded(record: Record, now: float) -> bytes:
    """A WatchNodesResponse with this node alone."""
    if record.encoded is not None:
        encoding, made_at = record.encoded
        if now - made_at <= SHARED_SECONDS:
            return encoding
    encoding = monitor_api.WatchNodesResponse(nodes=[to_node(record, now)]).SerializeToString()
    record.encoded = encoding, now
    return encoding

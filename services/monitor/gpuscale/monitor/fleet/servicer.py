"""FleetService on the wire."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.auth import Role, current_principal
from gpuscale.common.clock import Clock
from gpuscale.common.errors import FailedPreconditionError, PermissionDeniedError
from gpuscale.common.names import NODE, parse
from gpuscale.common.paging import page
from gpuscale.common.validation import validate
from gpuscale.common.wire import seconds
from gpuscale.monitor.fleet.nodes import Nodes, Stream
from gpuscale.monitor.fleet.stream import Requests
from gpuscale.monitor.fleet.translate import to_node

HELLO_SECONDS = 10.0
ACKNOWLEDGE_SECONDS = 5.0
# A message of a watch stays far below gRPC's limit of 4 MiB: a node with eight GPUs takes about 1.5 KiB.
NODES_PER_MESSAGE = 500


class FleetServicer(monitor_api.FleetServiceServicer):
    """Takes in streams and answers from the index."""

    def __init__(self, nodes: Nodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock

    async def StreamTelemetry(
        self,
        request_iterator: AsyncIterator[monitor_api.StreamTelemetryRequest],
        context: grpc.aio.ServicerContext[
            monitor_api.StreamTelemetryRequest, monitor_api.StreamTelemetryResponse
        ],
    ) -> AsyncGenerator[monitor_api.StreamTelemetryResponse, None]:
        """Take in an agent's stream; acknowledge the first snapshot, then every 5 s and whatever is refused."""
        requests = Requests(request_iterator)
        hello = _hello(await requests.next(HELLO_SECONDS))
        with self._nodes.connected(hello, requests.end) as stream:
            yield _acknowledgement(stream)
            acknowledged_at = float("-inf")
            while (request := await requests.next()) is not None:
                first = stream.acked_seq < 0
                taken = self._nodes.take(stream, request)
                now = self._clock.now()
                if first or not taken or now - acknowledged_at >= ACKNOWLEDGE_SECONDS:
                    acknowledged_at = now
                    yield _acknowledgement(stream)

    async def ListNodes(
        self,
        request: monitor_api.ListNodesRequest,
        context: grpc.aio.ServicerContext[monitor_api.ListNodesRequest, monitor_api.ListNodesResponse],
    ) -> monitor_api.ListNodesResponse:
        """A page of nodes."""
        found, token = page(
            self._nodes.all(),
            key=lambda record: record.node,
            page_size=request.page_size,
            page_token=request.page_token,
        )
        now = self._clock.now()
        return monitor_api.ListNodesResponse(
            nodes=[to_node(record, now) for record in found], next_page_token=token
        )

    async def GetNode(
        self,
        request: monitor_api.GetNodeRequest,
        context: grpc.aio.ServicerContext[monitor_api.GetNodeRequest, monitor_api.GetNodeResponse],
    ) -> monitor_api.GetNodeResponse:
        """One node."""
        record = self._nodes.get(parse(NODE, request.name)["node"])
        return monitor_api.GetNodeResponse(node=to_node(record, self._clock.now()))

    async def WatchNodes(
        self,
        request: monitor_api.WatchNodesRequest,
        context: grpc.aio.ServicerContext[monitor_api.WatchNodesRequest, monitor_api.WatchNodesResponse],
    ) -> AsyncGenerator[monitor_api.WatchNodesResponse, None]:
        """Every node, then those that changed."""
        interval = seconds(request.min_interval)
        with self._nodes.watchers.watch() as watch:
            everything = [record.node for record in self._nodes.all()]
            for start in range(0, len(everything) or 1, NODES_PER_MESSAGE):
                end = start + NODES_PER_MESSAGE
                yield self._message(everything[start:end], full=end >= len(everything))
            while True:
                await asyncio.sleep(interval)
                changed = await watch.changed()
                for start in range(0, len(changed), NODES_PER_MESSAGE):
                    yield self._message(changed[start : start + NODES_PER_MESSAGE])

    def _message(self, nodes: Sequence[str], *, full: bool = False) -> monitor_api.WatchNodesResponse:
        """The nodes as they are now."""
        now = self._clock.now()
        return monitor_api.WatchNodesResponse(
            nodes=[to_node(self._nodes.get(node), now) for node in nodes], full=full
        )


def _hello(request: monitor_api.StreamTelemetryRequest | None) -> monitor_api.Hello:
    """The Hello of a stream's first message.

    Raises:
        FailedPreconditionError: it is not Hello.
        InvalidArgumentError: it breaks a rule of the contract.
        PermissionDeniedError: an agent says that it is another node than its own.
    """
    if request is None or not request.HasField("hello"):
        raise FailedPreconditionError("the first message must be hello", reason="HELLO_EXPECTED")
    validate(request)
    principal = current_principal()
    if principal.role is Role.AGENT and principal.name != request.hello.node:
        raise PermissionDeniedError(
            f"{principal.name} may only report for the node of that name", reason="NOT_YOUR_NODE"
        )
    return request.hello


def _acknowledgement(stream: Stream) -> monitor_api.StreamTelemetryResponse:
    return monitor_api.StreamTelemetryResponse(
        acked_seq=stream.acked_seq,
        rejected_count=stream.rejected_count,
        rejected_reason=stream.rejected_reason,
    )

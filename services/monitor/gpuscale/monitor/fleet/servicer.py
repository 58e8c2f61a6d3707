"""FleetService on the wire."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from random import SystemRandom

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, PermissionDeniedError
from gpuscale.common.names import NODE, parse
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.security.auth import Context, Role, current_principal
from gpuscale.common.wire import page
from gpuscale.monitor.fleet.feed import NodeFeed
from gpuscale.monitor.fleet.nodes import Nodes
from gpuscale.monitor.fleet.record import Stream
from gpuscale.monitor.fleet.stream import Requests
from gpuscale.monitor.fleet.translate import to_node
from gpuscale.monitor.wire.encoded import encoded_stream

SERVICE = "gpuscale.api.monitor.v1.FleetService"
HELLO_SECONDS = 10.0
# An answer costs about as much as taking in a snapshot, so few are given; agents wait for one much longer.
ACKNOWLEDGE_SECONDS = 20.0

_random = SystemRandom()


class FleetServicer(monitor_api.FleetServiceServicer):
    """Takes in streams and answers from the index."""

    def __init__(self, nodes: Nodes, clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        self.feed = NodeFeed(nodes, clock)

    async def StreamTelemetry(
        self,
        request_iterator: AsyncIterator[monitor_api.StreamTelemetryRequest],
        context: Context,
    ) -> AsyncGenerator[monitor_api.StreamTelemetryResponse, None]:
        """Take in an agent's stream; acknowledge the first snapshot, then now and then, and whatever is refused."""
        requests = Requests(context.read)
        with self._nodes.connected(_hello(await requests.first(HELLO_SECONDS)), requests.end) as stream:
            yield _acknowledgement(stream)
            due = float("-inf")
            while (request := await requests.next()) is not None:
                whole = stream.base_seq is None
                taken = self._nodes.take(stream, request)
                del request  # thousands of streams would each keep one while they wait for the next
                now = stream.record.received_at
                resumed = whole and stream.base_seq is not None
                if now >= due or not taken or resumed or stream.told != stream.record.quarantines:
                    due = now + ACKNOWLEDGE_SECONDS * _random.uniform(0.5, 1.0)  # not all streams at once
                    yield _acknowledgement(stream)

    async def ListNodes(
        self,
        request: monitor_api.ListNodesRequest,
        context: Context,
    ) -> monitor_api.ListNodesResponse:
        """A page of nodes."""
        nodes, boot_id = self._nodes.all(), request.boot_id
        if boot_id:
            nodes = [one for one in nodes if one.picture is not None and one.picture.boot_id == boot_id]
        found, token = page(
            nodes,
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
        context: Context,
    ) -> monitor_api.GetNodeResponse:
        """One node."""
        record = self._nodes.get(parse(NODE, request.name)["node"])
        return monitor_api.GetNodeResponse(node=to_node(record, self._clock.now()))

    async def WatchNodes(
        self,
        request: monitor_api.WatchNodesRequest,
        context: Context,
    ) -> AsyncGenerator[monitor_api.WatchNodesResponse, None]:
        """Every node, then those that changed. On the wire `add_fleet` puts the encoded stream in its place."""
        async with aclosing(self.feed.stream(request, context)) as encoded:
            async for message in encoded:
                yield monitor_api.WatchNodesResponse.FromString(message)

    async def ForgetNode(
        self,
        request: monitor_api.ForgetNodeRequest,
        context: Context,
    ) -> monitor_api.ForgetNodeResponse:
        """Forget a node."""
        self._nodes.forget(parse(NODE, request.name)["node"])
        return monitor_api.ForgetNodeResponse()


def add_fleet(servicer: FleetServicer, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    watch = encoded_stream(SERVICE, "WatchNodes", monitor_api.WatchNodesRequest, servicer.feed.stream)
    server.add_generic_rpc_handlers((watch,))
    monitor_api.add_FleetServiceServicer_to_server(servicer, server)


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
    stream.told = stream.record.quarantines
    return monitor_api.StreamTelemetryResponse(
        acked_seq=stream.acked_seq,
        rejected_count=stream.rejected_count,
        rejected_reason=stream.rejected_reason,
        resync=stream.base_seq is None,
        quarantines=stream.told.values(),
    )

"""The clients: the generated, typed stubs of every service, behind one channel.

    with connect() as client:
        for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            print([node.name for node in page.nodes])
        reservation = client.reserve(2, "training", min_memory_bytes=8 << 30, ttl=60)

Every call raises errors of the tree (`GpuscaleError`); a unary call without a timeout of its own gets the client's.
"""

import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub
    from gpuscale.api.autoscaler.v1.adapter_service_pb2_grpc import AdapterServiceAsyncStub
    from gpuscale.api.autoscaler.v1.decision_service_pb2_grpc import DecisionServiceAsyncStub
    from gpuscale.api.autoscaler.v1.endpoint_service_pb2_grpc import EndpointServiceAsyncStub
    from gpuscale.api.autoscaler.v1.queue_watcher_service_pb2_grpc import QueueWatcherServiceAsyncStub
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub


class ReserveOptions(TypedDict, total=False):
    """What `reserve` may be told beside how many GPUs and for whom; what is absent or None is the server's default."""

    ttl: float | None
    """Seconds that the lease lasts from each renewal."""
    min_memory_bytes: int | None
    """Least free memory of each GPU."""
    max_utilization_percent: float | None
    """Each GPU must be used less than this; 100 admits any."""
    allow_unknown_utilization: bool
    """Admit GPUs whose utilization cannot be read."""
    nodes: Sequence[str]
    """Only these nodes, as `nodes/{node}`."""
    labels: Mapping[str, str]
    """The holder's own labels."""
    request_id: str | None
    """A UUID that makes the call repeatable; a new one when not given."""


def reserve_request(gpu_count: int, holder: str, options: ReserveOptions) -> allocator_api.ReserveRequest:
    """The request that `reserve` sends.

    Raises:
        TypeError: an option that there is not; it would be lost in silence.
    """
    unknown = sorted(options.keys() - ReserveOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"reserve() has no option {', '.join(unknown)}")
    ttl = options.get("ttl")
    return allocator_api.ReserveRequest(
        request_id=options.get("request_id") or str(uuid.uuid4()),
        holder=holder,
        gpu_count=gpu_count,
        min_memory_bytes=options.get("min_memory_bytes"),
        max_utilization_percent=options.get("max_utilization_percent"),
        allow_unknown_utilization=options.get("allow_unknown_utilization", False),
        ttl=None if ttl is None else to_duration(ttl),
        nodes=options.get("nodes", ()),
        labels=options.get("labels", {}),
    )


class Client:
    """A sync client; `connect` makes one. Leaving its block, or `close`, closes the channel."""

    def __init__(self, channel: grpc.Channel, address: str) -> None:
        self._channel = channel
        self.address = address
        self.agent = monitor_api.AgentServiceStub(channel)
        self.fleet = monitor_api.FleetServiceStub(channel)
        self.allocator = allocator_api.AllocatorServiceStub(channel)
        self.endpoints = autoscaler_api.EndpointServiceStub(channel)
        self.queue_watchers = autoscaler_api.QueueWatcherServiceStub(channel)
        self.decisions = autoscaler_api.DecisionServiceStub(channel)
        self.adapters = autoscaler_api.AdapterServiceStub(channel)

    def reserve(
        self, gpu_count: int, holder: str, **options: Unpack[ReserveOptions]
    ) -> allocator_api.Reservation:
        """Reserve GPUs of one node, all or none.

        Raises:
            ResourceExhaustedError: no room now (reason NO_CAPACITY).
            FailedPreconditionError: more than any node has (reason UNSATISFIABLE).
            GpuscaleError: anything else that went wrong.
        """
        return self.allocator.Reserve(reserve_request(gpu_count, holder, options)).reservation

    def close(self) -> None:
        """Close the channel; calls that are under way end with CancelledCallError."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """An async client; `connect_async` makes one. Leaving its block, or `close`, closes the channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._channel = channel
        self.address = address
        self.agent: AgentServiceAsyncStub = monitor_api.AgentServiceStub(channel)
        self.fleet: FleetServiceAsyncStub = monitor_api.FleetServiceStub(channel)
        self.allocator: AllocatorServiceAsyncStub = allocator_api.AllocatorServiceStub(channel)
        self.endpoints: EndpointServiceAsyncStub = autoscaler_api.EndpointServiceStub(channel)
        self.queue_watchers: QueueWatcherServiceAsyncStub = autoscaler_api.QueueWatcherServiceStub(channel)
        self.decisions: DecisionServiceAsyncStub = autoscaler_api.DecisionServiceStub(channel)
        self.adapters: AdapterServiceAsyncStub = autoscaler_api.AdapterServiceStub(channel)

    async def reserve(
        self, gpu_count: int, holder: str, **options: Unpack[ReserveOptions]
    ) -> allocator_api.Reservation:
        """Reserve GPUs of one node, all or none.

        Raises:
            ResourceExhaustedError: no room now (reason NO_CAPACITY).
            FailedPreconditionError: more than any node has (reason UNSATISFIABLE).
            GpuscaleError: anything else that went wrong.
        """
        return (await self.allocator.Reserve(reserve_request(gpu_count, holder, options))).reservation

    async def close(self) -> None:
        """Close the channel; calls that are under way end with CancelledCallError."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

"""The clients: the generated, typed stubs of every service, behind one channel.

    with connect() as client:
        for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            print([node.name for node in page.nodes])
        with client.reserve(gpus=2, min_memory="8GiB") as lease:
            subprocess.run(["python", "train.py"], env=lease.env(), check=True)

Every call raises errors of the tree (`GpuscaleError`); a unary call without a timeout of its own gets the client's.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Self, Unpack

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client.asks import ReserveOptions, as_seconds, default_holder, reserve_request
from gpuscale.client.lease import AsyncLease, AsyncReserving, Lease, abandon, abandon_async, now, timer_of
from gpuscale.client.listing import pages, pages_async
from gpuscale.client.retries import retrying, retrying_async
from gpuscale.client.this_host import (
    NODE_VARIABLE,
    ThisHost,
    admission,
    admit,
    admit_async,
    confine,
    only_here,
)
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, UnimplementedError
from gpuscale.common.rpc.channel import RPC_TIMEOUT

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub
    from gpuscale.api.allocator.v1.capacity_service_pb2_grpc import CapacityServiceAsyncStub
    from gpuscale.api.allocator.v1.node_service_pb2_grpc import NodeServiceAsyncStub
    from gpuscale.api.allocator.v1.quota_service_pb2_grpc import QuotaServiceAsyncStub
    from gpuscale.api.autoscaler.v1.adapter_service_pb2_grpc import AdapterServiceAsyncStub
    from gpuscale.api.autoscaler.v1.backtest_service_pb2_grpc import BacktestServiceAsyncStub
    from gpuscale.api.autoscaler.v1.decision_service_pb2_grpc import DecisionServiceAsyncStub
    from gpuscale.api.autoscaler.v1.endpoint_service_pb2_grpc import EndpointServiceAsyncStub
    from gpuscale.api.autoscaler.v1.metric_service_pb2_grpc import MetricServiceAsyncStub
    from gpuscale.api.autoscaler.v1.preset_service_pb2_grpc import PresetServiceAsyncStub
    from gpuscale.api.autoscaler.v1.queue_watcher_service_pb2_grpc import QueueWatcherServiceAsyncStub
    from gpuscale.api.autoscaler.v1.rule_service_pb2_grpc import RuleServiceAsyncStub
    from gpuscale.api.monitor.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from gpuscale.api.monitor.v1.driver_service_pb2_grpc import DriverServiceAsyncStub
    from gpuscale.api.monitor.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub
    from gpuscale.api.monitor.v1.health_service_pb2_grpc import HealthServiceAsyncStub
    from gpuscale.api.monitor.v1.history_service_pb2_grpc import HistoryServiceAsyncStub
    from gpuscale.api.monitor.v1.join_service_pb2_grpc import JoinServiceAsyncStub
    from gpuscale.api.monitor.v1.login_service_pb2_grpc import LoginServiceAsyncStub
    from gpuscale.api.monitor.v1.recording_service_pb2_grpc import RecordingServiceAsyncStub
    from gpuscale.api.monitor.v1.work_service_pb2_grpc import WorkServiceAsyncStub


_ANYWHERE = "pass nodes=[...], or anywhere=True for any host"


def _wants_this_host(request: allocator_api.ReserveRequest, options: ReserveOptions) -> bool:
    """Whether a request is kept to this host: nothing says where else its GPUs may be."""
    return not (options.get("anywhere") or request.ask.nodes or request.ask.gpus)


def reserve_timeout(options: ReserveOptions) -> float | None:
    """Seconds that the call of `reserve` may take; the client's own timeout where it does not wait in the queue."""
    wait = as_seconds("wait", options.get("wait"))
    return wait + RPC_TIMEOUT if wait else None


class Client:
    """A sync client; `connect` makes one. Leaving its block, or `close`, closes the channel."""

    def __init__(self, channel: grpc.Channel, address: str, node: str | None = None) -> None:
        self._channel = channel
        self._host = ThisHost(node)
        self.address = address
        self.agent: monitor_api.AgentServiceStub = monitor_api.AgentServiceStub(channel)
        self.work: monitor_api.WorkServiceStub = monitor_api.WorkServiceStub(channel)
        self.driver: monitor_api.DriverServiceStub = monitor_api.DriverServiceStub(channel)
        self.fleet: monitor_api.FleetServiceStub = monitor_api.FleetServiceStub(channel)
        self.recordings: monitor_api.RecordingServiceStub = monitor_api.RecordingServiceStub(channel)
        self.history: monitor_api.HistoryServiceStub = monitor_api.HistoryServiceStub(channel)
        self.health: monitor_api.HealthServiceStub = monitor_api.HealthServiceStub(channel)
        self.joining: monitor_api.JoinServiceStub = monitor_api.JoinServiceStub(channel)
        self.logins: monitor_api.LoginServiceStub = monitor_api.LoginServiceStub(channel)
        self.allocator: allocator_api.AllocatorServiceStub = allocator_api.AllocatorServiceStub(channel)
        self.capacity: allocator_api.CapacityServiceStub = allocator_api.CapacityServiceStub(channel)
        self.nodes: allocator_api.NodeServiceStub = allocator_api.NodeServiceStub(channel)
        self.quotas: allocator_api.QuotaServiceStub = allocator_api.QuotaServiceStub(channel)
        self.endpoints: autoscaler_api.EndpointServiceStub = autoscaler_api.EndpointServiceStub(channel)
        self.queue_watchers: autoscaler_api.QueueWatcherServiceStub = autoscaler_api.QueueWatcherServiceStub(
            channel
        )
        self.decisions: autoscaler_api.DecisionServiceStub = autoscaler_api.DecisionServiceStub(channel)
        self.adapters: autoscaler_api.AdapterServiceStub = autoscaler_api.AdapterServiceStub(channel)
        self.metrics: autoscaler_api.MetricServiceStub = autoscaler_api.MetricServiceStub(channel)
        self.rules: autoscaler_api.RuleServiceStub = autoscaler_api.RuleServiceStub(channel)
        self.presets: autoscaler_api.PresetServiceStub = autoscaler_api.PresetServiceStub(channel)
        self.backtests: autoscaler_api.BacktestServiceStub = autoscaler_api.BacktestServiceStub(channel)

    def this_node(self, *, check: bool = False) -> str | None:
        """Id of the node that this host is; None where no agent of the fleet runs on it, or the server has no fleet.

        The fleet is asked until it is found, unless `connect` or GPUSCALE_NODE says it.

        Args:
            check: ask even then.

        Raises:
            FailedPreconditionError: it may be any of several (NODE_AMBIGUOUS), or is not the one that was said
                (NODE_MISMATCH).
            GpuscaleError: the fleet could not be asked.
        """
        request = self._host.request()
        if request is None or (self._host.node and not check):
            return self._host.node
        try:
            return self._host.find(
                node for page in pages(self.fleet.ListNodes, request) for node in page.nodes
            )
        except UnimplementedError:
            return self._host.node

    def reserve(self, gpus: int = 1, holder: str = "", **options: Unpack[ReserveOptions]) -> Lease:
        """Reserve GPUs, all or none; each member's are of one node. A call without an answer is repeated, with one id.

        On a node they are GPUs of this host, unless `nodes`, `only_gpus` or `anywhere` say otherwise.

        Args:
            gpus: how many, of each member.
            holder: who will hold them; USER@HOST when not given.
            options: which GPUs will do, and how they are asked for.

        Raises:
            ResourceExhaustedError: no room now (reason NO_CAPACITY), or none came in time (WAIT_TIMEOUT).
            FailedPreconditionError: more than any node has (reason UNSATISFIABLE), what the `request_id` was granted
                has ended (RESERVATION_ENDED), or which node this host is cannot be told (NODE_AMBIGUOUS).
            GpuscaleError: anything else that went wrong.
        """
        request = reserve_request(gpus, holder or default_holder(), options)
        node = retrying(self.this_node) if _wants_this_host(request, options) else None
        if node:
            confine(request.ask, node)

        def attempt() -> Lease:
            sent = now()
            response = self.allocator.Reserve(request, timeout=reserve_timeout(options))
            granted, timer = response.reservation, timer_of(request, response.reservation, sent)
            return Lease(
                self.allocator,
                granted,
                timer,
                self.this_node,
                partial(self._admit, granted, response.lease_token),
            )

        try:
            return retrying(attempt)
        except KeyboardInterrupt:
            abandon(self.allocator, request)
            raise
        except GpuscaleError as error:
            raise only_here(error, node, _ANYWHERE) from error.__cause__

    def _admit(self, reservation: allocator_api.Reservation, lease_token: str) -> None:
        """Have this host's agent know this process as the holder's, where GPUs are here and an agent answers.

        Raises:
            FailedPreconditionError: the reservation is over.
        """
        if request := admission(reservation, lease_token, self._host.node):
            self._host.say_unadmitted(admit(request, self.work, self.address))

    def close(self) -> None:
        """Close the channel; calls that are under way end with CancelledCallError."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """An async client; `connect_async` makes one. Leaving its block, or `close`, closes the channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str, node: str | None = None) -> None:
        self._channel = channel
        self._host = ThisHost(node)
        self.address = address
        self.agent: AgentServiceAsyncStub = monitor_api.AgentServiceStub(channel)
        self.work: WorkServiceAsyncStub = monitor_api.WorkServiceStub(channel)
        self.driver: DriverServiceAsyncStub = monitor_api.DriverServiceStub(channel)
        self.fleet: FleetServiceAsyncStub = monitor_api.FleetServiceStub(channel)
        self.recordings: RecordingServiceAsyncStub = monitor_api.RecordingServiceStub(channel)
        self.history: HistoryServiceAsyncStub = monitor_api.HistoryServiceStub(channel)
        self.health: HealthServiceAsyncStub = monitor_api.HealthServiceStub(channel)
        self.joining: JoinServiceAsyncStub = monitor_api.JoinServiceStub(channel)
        self.logins: LoginServiceAsyncStub = monitor_api.LoginServiceStub(channel)
        self.allocator: AllocatorServiceAsyncStub = allocator_api.AllocatorServiceStub(channel)
        self.capacity: CapacityServiceAsyncStub = allocator_api.CapacityServiceStub(channel)
        self.nodes: NodeServiceAsyncStub = allocator_api.NodeServiceStub(channel)
        self.quotas: QuotaServiceAsyncStub = allocator_api.QuotaServiceStub(channel)
        self.endpoints: EndpointServiceAsyncStub = autoscaler_api.EndpointServiceStub(channel)
        self.queue_watchers: QueueWatcherServiceAsyncStub = autoscaler_api.QueueWatcherServiceStub(channel)
        self.decisions: DecisionServiceAsyncStub = autoscaler_api.DecisionServiceStub(channel)
        self.adapters: AdapterServiceAsyncStub = autoscaler_api.AdapterServiceStub(channel)
        self.metrics: MetricServiceAsyncStub = autoscaler_api.MetricServiceStub(channel)
        self.rules: RuleServiceAsyncStub = autoscaler_api.RuleServiceStub(channel)
        self.presets: PresetServiceAsyncStub = autoscaler_api.PresetServiceStub(channel)
        self.backtests: BacktestServiceAsyncStub = autoscaler_api.BacktestServiceStub(channel)

    async def this_node(self) -> str | None:
        """Id of the node that this host is, as `Client.this_node`.

        Raises:
            FailedPreconditionError: it may be any of several (NODE_AMBIGUOUS).
            GpuscaleError: the fleet could not be asked.
        """
        request = self._host.request()
        if request is None or self._host.node:
            return self._host.node
        try:
            found = [node async for page in pages_async(self.fleet.ListNodes, request) for node in page.nodes]
        except UnimplementedError:
            found = []
        return self._host.find(found)

    def _known_node(self) -> str | None:
        """This host's node, without asking.

        Raises:
            FailedPreconditionError: it was not asked for yet (NODE_NOT_ASKED).
        """
        if self._host.node is None and not self._host.asked:
            raise FailedPreconditionError(
                f"which node this host is was not asked yet: `await client.this_node()` once, set {NODE_VARIABLE},"
                " or name a node: lease.env(node=...)",
                reason="NODE_NOT_ASKED",
            )
        return self._host.node

    def reserve(self, gpus: int = 1, holder: str = "", **options: Unpack[ReserveOptions]) -> AsyncReserving:
        """Reserve GPUs, as `Client.reserve`: `async with` keeps them, `await` leaves that to the caller.

        Raises (once awaited or entered):
            ResourceExhaustedError: no room now (reason NO_CAPACITY), or none came in time (WAIT_TIMEOUT).
            FailedPreconditionError: more than any node has (reason UNSATISFIABLE), what the `request_id` was granted
                has ended (RESERVATION_ENDED), or which node this host is cannot be told (NODE_AMBIGUOUS).
            GpuscaleError: anything else that went wrong.
        """
        request = reserve_request(gpus, holder or default_holder(), options)

        async def attempt() -> AsyncLease:
            sent = now()
            response = await self.allocator.Reserve(request, timeout=reserve_timeout(options))
            granted, timer = response.reservation, timer_of(request, response.reservation, sent)
            return AsyncLease(
                self.allocator,
                granted,
                timer,
                self._known_node,
                partial(self._admit, granted, response.lease_token),
            )

        async def reserve() -> AsyncLease:
            node = await retrying_async(self.this_node) if _wants_this_host(request, options) else None
            if node:
                confine(request.ask, node)
            try:
                return await retrying_async(attempt)
            except asyncio.CancelledError:
                await abandon_async(self.allocator, request)
                raise
            except GpuscaleError as error:
                raise only_here(error, node, _ANYWHERE) from error.__cause__

        return AsyncReserving(reserve)

    async def _admit(self, reservation: allocator_api.Reservation, lease_token: str) -> None:
        """As `Client._admit`.

        Raises:
            FailedPreconditionError: the reservation is over.
        """
        if request := admission(reservation, lease_token, self._host.node):
            self._host.say_unadmitted(await admit_async(request, self.work, self.address))

    async def close(self) -> None:
        """Close the channel; calls that are under way end with CancelledCallError."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

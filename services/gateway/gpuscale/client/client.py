"""The clients: typed stubs of every service on one channel.

    with connect() as client:
        for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            print([node.name for node in page.nodes])
        with client.reserve(gpus=2, min_memory="8GiB") as lease:
            subprocess.run(["python", "train.py"], env=lease.env(), check=True)

Every call raises a `GpuscaleError` on failure; a unary call without a timeout gets the client's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.audit import v1 as audit_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client.asks import (
    ReserveOptions,
    RunOptions,
    as_seconds,
    default_holder,
    job_request,
    reserve_request,
)
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
    from gpuscale.client.jobs import AsyncJob, Job
    from gpuscale.client.tables import TableRows

_ANYWHERE = "pass nodes=[...], or anywhere=True for any host"


def _wants_this_host(request: allocator_api.ReserveRequest, options: ReserveOptions) -> bool:
    """Whether a request is limited to this host: no option names a place."""
    return not (options.get("anywhere") or request.ask.nodes or request.ask.gpus)


def reserve_timeout(options: ReserveOptions) -> float | None:
    """Most seconds for the call of `reserve`; the client's timeout if it does not queue."""
    wait = as_seconds("wait", options.get("wait"))
    return wait + RPC_TIMEOUT if wait else None


CALLABLE = frozenset({"nodes", "quotas", "endpoints", "decisions", "adapters", "recordings", "health"})
"""Stubs named like a kind of resource."""


class _Stubs:
    """The stubs of a client, each loaded and created on first use."""

    _channel: Any

    if not TYPE_CHECKING:  # type checkers use the annotations of the clients, which are strings at run time

        def __getattr__(self, name: str) -> object:
            package, _, stub = Client.__annotations__.get(name, "").partition(".")
            if package == "Callable[":
                return partial(self.table, name)
            if not stub:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            kind: Any = getattr(globals()[package], stub)
            if name in CALLABLE:  # `client.nodes()` is short for `client.table("nodes")`
                kind = type(stub, (kind,), {"__call__": lambda _, **options: self.table(name, **options)})
            vars(self)[name] = made = kind(self._channel)
            return made

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *Client.__annotations__})


class Client(_Stubs):
    """A sync client, opened by `connect`. The end of its block, or `close`, closes the channel."""

    gpus: Callable[..., TableRows]
    reservations: Callable[..., TableRows]
    jobs: Callable[..., TableRows]
    agent: monitor_api.AgentServiceStub
    work: monitor_api.WorkServiceStub
    driver: monitor_api.DriverServiceStub
    fleet: monitor_api.FleetServiceStub
    recordings: monitor_api.RecordingServiceStub
    history: monitor_api.HistoryServiceStub
    health: monitor_api.HealthServiceStub
    joining: monitor_api.JoinServiceStub
    logins: monitor_api.LoginServiceStub
    allocator: allocator_api.AllocatorServiceStub
    capacity: allocator_api.CapacityServiceStub
    nodes: allocator_api.NodeServiceStub
    quotas: allocator_api.QuotaServiceStub
    bookings: allocator_api.BookingServiceStub
    usage: allocator_api.UsageServiceStub
    policies: allocator_api.PolicyServiceStub
    notifications: allocator_api.NotificationServiceStub
    power: allocator_api.PowerServiceStub
    audit: audit_api.AuditServiceStub
    endpoints: autoscaler_api.EndpointServiceStub
    queue_watchers: autoscaler_api.QueueWatcherServiceStub
    decisions: autoscaler_api.DecisionServiceStub
    adapters: autoscaler_api.AdapterServiceStub
    metrics: autoscaler_api.MetricServiceStub
    rules: autoscaler_api.RuleServiceStub
    presets: autoscaler_api.PresetServiceStub
    backtests: autoscaler_api.BacktestServiceStub

    def __init__(
        self, channel: grpc.Channel, address: str, node: str | None = None, authority: Path | None = None
    ) -> None:
        self._channel = channel
        self._host = ThisHost(node)
        self._authority = authority
        self.address = address

    def this_node(self, *, check: bool = False) -> str | None:
        """The id of this host's node; None if no agent of the fleet runs on it, or the server has no fleet.

        Queries the fleet until found, unless `connect` or GPUSCALE_NODE names the node.

        Args:
            check: query the fleet even then.

        Raises:
            FailedPreconditionError: several nodes match (NODE_AMBIGUOUS), or the configured one runs elsewhere
                (NODE_MISMATCH).
            GpuscaleError: the fleet cannot be queried.
        """
        request = self._host.request()
        if request is None or (self._host.node and not check):
            return self._host.node
        try:
            return self._host.find(node for one in pages(self.fleet.ListNodes, request) for node in one.nodes)
        except UnimplementedError:
            return self._host.node

    def reserve(self, gpus: int = 1, holder: str = "", **options: Unpack[ReserveOptions]) -> Lease:
        """Reserve GPUs, all or none; those of a member are on one node. Retries without an answer are idempotent.

        On a node, GPUs are of this host unless `nodes`, `only_gpus` or `anywhere` is given.

        Args:
            gpus: number of GPUs per member.
            holder: the holder; USER@HOST by default.
            options: which GPUs qualify, and how to request them.

        Raises:
            ResourceExhaustedError: no room now (reason NO_CAPACITY), or none came in time (WAIT_TIMEOUT).
            FailedPreconditionError: more than any node has (reason UNSATISFIABLE), the grant of this `request_id` has
                ended (RESERVATION_ENDED), or several nodes match this host (NODE_AMBIGUOUS).
            GpuscaleError: any other error.
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
            raise only_here(error, node, _ANYWHERE) from None

    def run(
        self, command: Sequence[str], gpus: int = 1, *, members: int = 1, **options: Unpack[RunOptions]
    ) -> Job:
        """Run a command on reserved GPUs, on this host or over ssh. It keeps running when this program ends.

        On a node it runs on this host unless `nodes`, `only_gpus`, `members` or `anywhere` is given. Returns once it runs
        or is queued; docs/jobs.md says what a node needs.

        Args:
            command: the program and its arguments.
            gpus: number of GPUs per member.
            members: number of members; each runs the command.
            options: which GPUs qualify, and how to run it.

        Raises:
            ResourceExhaustedError: no room now (NO_CAPACITY), with `wait=0`.
            FailedPreconditionError: more than any node has (UNSATISFIABLE), or it did not start (JOB_NOT_STARTED).
            UnavailableError: a node cannot be reached (NO_SUPERVISOR), or the connection was lost (CONNECTION_LOST): with
                a `request_id` the call can be repeated.
            GpuscaleError: any other error.
        """
        from gpuscale.client.jobs import start_job

        return start_job(self, job_request(command, gpus, members, options), command, options)

    def table(self, kind: str, **options: Any) -> TableRows:
        """All resources of a kind, such as "nodes", as a list that notebooks show as a table, with `to_pandas()`.

        Args:
            kind: the kind, as in `gpuscalectl get`.
            options: fields of its List request, such as `filter="state = ACTIVE"`.

        Raises:
            InvalidArgumentError: unknown kind, option or field.
            GpuscaleError: the call failed.
        """
        from gpuscale.client.tables import table

        return table(self, kind, options)

    def authority(self) -> str:
        """The certificate authority of the server, PEM; empty without TLS and for the system's authorities.

        Raises FailedPreconditionError: the file cannot be read (TLS_FILES).
        """
        try:
            return self._authority.read_text(encoding="utf-8") if self._authority else ""
        except (OSError, UnicodeDecodeError) as error:
            message = f"TLS file {self._authority} cannot be read: {type(error).__name__}"
            raise FailedPreconditionError(message, reason="TLS_FILES") from error

    def _admit(self, reservation: allocator_api.Reservation, lease_token: str) -> None:
        """Admit this process with this host's agent, if GPUs are here and an agent answers.

        Raises FailedPreconditionError: the reservation is over.
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


class AsyncClient(_Stubs):
    """An async client, opened by `connect_async`. The end of its block, or `close`, closes the channel."""

    gpus: Callable[..., Awaitable[TableRows]]
    reservations: Callable[..., Awaitable[TableRows]]
    jobs: Callable[..., Awaitable[TableRows]]
    agent: monitor_api.AgentServiceAsyncStub
    work: monitor_api.WorkServiceAsyncStub
    driver: monitor_api.DriverServiceAsyncStub
    fleet: monitor_api.FleetServiceAsyncStub
    recordings: monitor_api.RecordingServiceAsyncStub
    history: monitor_api.HistoryServiceAsyncStub
    health: monitor_api.HealthServiceAsyncStub
    joining: monitor_api.JoinServiceAsyncStub
    logins: monitor_api.LoginServiceAsyncStub
    allocator: allocator_api.AllocatorServiceAsyncStub
    capacity: allocator_api.CapacityServiceAsyncStub
    nodes: allocator_api.NodeServiceAsyncStub
    quotas: allocator_api.QuotaServiceAsyncStub
    bookings: allocator_api.BookingServiceAsyncStub
    usage: allocator_api.UsageServiceAsyncStub
    policies: allocator_api.PolicyServiceAsyncStub
    notifications: allocator_api.NotificationServiceAsyncStub
    power: allocator_api.PowerServiceAsyncStub
    audit: audit_api.AuditServiceAsyncStub
    endpoints: autoscaler_api.EndpointServiceAsyncStub
    queue_watchers: autoscaler_api.QueueWatcherServiceAsyncStub
    decisions: autoscaler_api.DecisionServiceAsyncStub
    adapters: autoscaler_api.AdapterServiceAsyncStub
    metrics: autoscaler_api.MetricServiceAsyncStub
    rules: autoscaler_api.RuleServiceAsyncStub
    presets: autoscaler_api.PresetServiceAsyncStub
    backtests: autoscaler_api.BacktestServiceAsyncStub

    def __init__(
        self,
        channel: grpc.aio.Channel,
        address: str,
        node: str | None = None,
        blocking: Callable[[], Client] | None = None,
    ) -> None:
        self._channel = channel
        self._blocking = blocking
        self._of_jobs: Client | None = None
        self._starting: set[asyncio.Task[Job]] = set()
        self._host = ThisHost(node)
        self.address = address

    async def this_node(self) -> str | None:
        """The id of this host's node, like `Client.this_node`, with the same errors."""
        request = self._host.request()
        if request is None or self._host.node:
            return self._host.node
        try:
            found = [node async for page in pages_async(self.fleet.ListNodes, request) for node in page.nodes]
        except UnimplementedError:
            found = []
        return self._host.find(found)

    async def table(self, kind: str, **options: Any) -> TableRows:
        """All resources of a kind, like `Client.table`."""
        from gpuscale.client.tables import table_async

        return await table_async(self, kind, options)

    def _known_node(self) -> str | None:
        """This host's node, without a call. Raises FailedPreconditionError: it was not queried yet (NODE_NOT_ASKED)."""
        if self._host.node is None and not self._host.asked:
            raise FailedPreconditionError(
                f"this host's node is not known yet: call `await client.this_node()` once, set {NODE_VARIABLE},"
                " or name a node: lease.env(node=...)",
                reason="NODE_NOT_ASKED",
            )
        return self._host.node

    def reserve(self, gpus: int = 1, holder: str = "", **options: Unpack[ReserveOptions]) -> AsyncReserving:
        """Reserve GPUs, like `Client.reserve`, with the same errors once awaited or entered.

        `async with` renews the lease; with `await` the caller does.
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
                raise only_here(error, node, _ANYWHERE) from None

        return AsyncReserving(reserve)

    async def run(
        self, command: Sequence[str], gpus: int = 1, *, members: int = 1, **options: Unpack[RunOptions]
    ) -> AsyncJob:
        """Run a command on reserved GPUs, like `Client.run`, which it calls in a thread with its own connection. Raises the same errors."""
        from gpuscale.client.jobs import AsyncJob, give_back, start_job

        if self._blocking is None:
            raise FailedPreconditionError("this client cannot run jobs; open it with connect_async")
        client = self._of_jobs = self._of_jobs or self._blocking()
        request = job_request(command, gpus, members, options)
        given_up = threading.Event()

        def start() -> Job:
            job = start_job(client, request, command, options)
            if given_up.is_set():
                give_back(client, job.look())
            return job

        starting = asyncio.create_task(asyncio.to_thread(start), name=f"start {request.job.command}")
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return AsyncJob(self, await asyncio.shield(starting))
        except asyncio.CancelledError:
            given_up.set()
            starting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
            await abandon_async(self.allocator, request)
            raise

    async def _admit(self, reservation: allocator_api.Reservation, lease_token: str) -> None:
        """Like `Client._admit`, with the same errors."""
        if request := admission(reservation, lease_token, self._host.node):
            self._host.say_unadmitted(await admit_async(request, self.work, self.address))

    async def close(self) -> None:
        """Close the channel; calls that are under way end with CancelledCallError."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        if self._of_jobs:
            self._of_jobs.close()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

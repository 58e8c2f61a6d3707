"""An allocator in memory with the contract's manners: idempotent requests, leases without a clock, fences, refusals."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from gpuscale.api.allocator import v1 as api
from gpuscale.common import errors
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.security.auth import Authenticator

ACTIVE = api.Reservation.STATE_ACTIVE
SERVICE = "gpuscale.api.allocator.v1.AllocatorService"
QUOTA_SERVICE = "gpuscale.api.allocator.v1.QuotaService"
CAPACITY_SERVICE = "gpuscale.api.allocator.v1.CapacityService"


class FakeAllocator(api.AllocatorServiceServicer):
    """Grants the GPUs of `nodes`, first free first.

    Attributes:
        reservations: all that were ever granted, by name.
        calls: how often each RPC was called.
        failure: raised by every call while it is set.
        waiting: requests of each tenant that wait.
        answers: while it is not set, grants are made and not answered.
        models: product names of its GPUs, by UUID, where a test states them.
        drained: when each node that is drained is to be empty, by the loop's clock, and why.
    """

    def __init__(self, nodes: Mapping[str, Sequence[str]]) -> None:
        self.nodes = {node: list(gpus) for node, gpus in nodes.items()}
        self.reservations: dict[str, api.Reservation] = {}
        self.requests: dict[str, tuple[str, bytes]] = {}
        self.calls: Counter[str] = Counter()
        self.failure: errors.GpuscaleError | None = None
        self.waiting: dict[str, int] = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self.models: dict[str, str] = {}
        self.drained: dict[str, tuple[float, str]] = {}
        self._watchers: set[asyncio.Event] = set()

    @property
    def held(self) -> list[str]:
        """UUIDs of the GPUs that are held, each as often as it is."""
        return [gpu.uuid for one in self.reservations.values() if one.state == ACTIVE for gpu in one.gpus]

    def expire(self, name: str) -> None:
        self.reservations[name].state = api.Reservation.STATE_EXPIRED

    def drain(self, node: str, grace: float, why: str = "nodes/n is drained: fan") -> None:
        """Grant nothing on a node, and say of all that is there that it will be taken away; `end` does so."""
        self.drained[node] = asyncio.get_running_loop().time() + grace, why
        self._tell()

    def end(self, node: str) -> None:
        """The deadline of a drain has come."""
        for one in self.reservations.values():
            if one.state == ACTIVE and one.gpus[0].node == node:
                one.state, one.end_reason = api.Reservation.STATE_CANCELLED, self.drained[node][1]
        self._tell()

    def undrain(self, node: str) -> None:
        self.drained.pop(node, None)
        self._tell()

    def _tell(self) -> None:
        for one in self._watchers:
            one.set()

    def _to_leave(self, one: api.Reservation) -> api.Reservation:
        """With what is left of it, and when it will be taken away."""
        shown = api.Reservation()
        shown.CopyFrom(one)
        if one.state == ACTIVE:
            now, found = datetime.now(UTC), self.drained.get(one.gpus[0].node)
            shown.remaining.FromSeconds(60)
            shown.expire_time.FromDatetime(now + timedelta(seconds=60))
            if found is not None:
                left = timedelta(seconds=found[0] - asyncio.get_running_loop().time())
                shown.revoke_time.FromDatetime(now + left)
                shown.end_reason = found[1]
        return shown

    async def WatchReservations(self, request: api.WatchReservationsRequest, context: Any) -> Any:
        assert request.revoked, "the other watch is not made up here"
        told: set[str] = set()
        changed, full = asyncio.Event(), True
        self._watchers.add(changed)
        try:
            while True:
                all_ = {name: self._to_leave(one) for name, one in self.reservations.items()}
                leaving = {name for name, one in all_.items() if one.HasField("revoke_time")}
                found = [all_[name] for name in sorted(leaving | told)]
                yield api.WatchReservationsResponse(reservations=found, full=full)
                told, full = leaving, False
                await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def called(self, method: str) -> None:
        """Count a call, and fail it while `failure` is set."""
        self.calls[method] += 1
        if self.failure is not None:
            raise self.failure

    async def Reserve(self, request: api.ReserveRequest, context: Any) -> api.ReserveResponse:
        self.called("Reserve")
        content = request.SerializeToString(deterministic=True)
        known = self.requests.get(request.request_id)
        if known is not None:
            if known[1] != content:
                raise errors.AlreadyExistsError("the request id was used with other arguments")
            return api.ReserveResponse(reservation=self.reservations[known[0]])
        reservation = self._grant(request)
        self.reservations[reservation.name] = reservation
        self.requests[request.request_id] = (reservation.name, content)
        await self.answers.wait()
        return api.ReserveResponse(reservation=reservation)

    async def ReserveAndWatch(self, request: api.ReserveAndWatchRequest, context: Any) -> Any:
        """Looks again and again while the wait lasts; nobody's turn is made up here."""
        clock = asyncio.get_running_loop().time
        until, told = clock() + request.reserve.wait.ToTimedelta().total_seconds(), False
        while True:
            try:
                answer = await self.Reserve(request.reserve, context)
            except errors.ResourceExhaustedError as error:
                if clock() >= until:
                    over = errors.ResourceExhaustedError("not served in time", reason="WAIT_TIMEOUT")
                    raise over from error
                if not told:
                    yield api.ReserveAndWatchResponse(waiting=api.QueuePlace(message=error.message))
                told = True
                await asyncio.sleep(0.5)
                continue
            yield api.ReserveAndWatchResponse(reservation=answer.reservation, lease_token=answer.lease_token)
            return

    def _grant(self, request: api.ReserveRequest) -> api.Reservation:
        wanted = [name.removeprefix("nodes/") for name in request.ask.nodes] or list(self.nodes)
        unknown = [node for node in wanted if node not in self.nodes]
        if unknown:
            names = {"name": ",".join(f"nodes/{one}" for one in unknown)}
            raise errors.NotFoundError(f"no such node: {', '.join(unknown)}", metadata=names)
        if all(len(self.nodes[node]) < request.ask.gpu_count for node in wanted):
            raise errors.FailedPreconditionError("no node has that many GPUs", reason="UNSATISFIABLE")
        held = set(self.held)
        for node in wanted:
            free = [uuid for uuid in self.nodes[node] if uuid not in held and node not in self.drained]
            if asked := request.ask.models:
                free = [uuid for uuid in free if any(one in self.models.get(uuid, "") for one in asked)]
            if len(free) >= request.ask.gpu_count:
                fence = len(self.reservations) + 1
                chosen = free[: request.ask.gpu_count]
                models = {uuid: self.models.get(uuid, "") for uuid in chosen}
                gpus = [api.ReservedGpu(node=node, uuid=one, model=models[one]) for one in chosen]
                return api.Reservation(
                    name=f"reservations/v{fence}", holder=request.holder, state=ACTIVE, fence=fence,
                    gpus=gpus, request_id=request.request_id, tenant=request.tenant,
                )  # fmt: skip
        raise errors.ResourceExhaustedError("all GPUs are held", reason="NO_CAPACITY", retry_after=0.2)

    def _find(self, name: str, fence: int) -> api.Reservation:
        found = self.reservations.get(name)
        if found is None:
            raise errors.NotFoundError(f"there is no {name}")
        if found.fence != fence:
            raise errors.FailedPreconditionError("another fence", reason="FENCE_MISMATCH")
        return found

    async def RenewReservation(self, request: api.RenewReservationRequest, context: Any) -> Any:
        self.called("RenewReservation")
        found = self._find(request.name, request.fence)
        if found.state != ACTIVE:
            raise errors.FailedPreconditionError(f"{request.name} has ended", reason="RESERVATION_ENDED")
        return api.RenewReservationResponse(reservation=found)

    async def ReleaseReservation(self, request: api.ReleaseReservationRequest, context: Any) -> Any:
        self.called("ReleaseReservation")
        found = self._find(request.name, request.fence)
        if found.state == ACTIVE:
            found.state = api.Reservation.STATE_RELEASED
        return api.ReleaseReservationResponse(reservation=found)

    async def GetReservation(self, request: api.GetReservationRequest, context: Any) -> Any:
        self.called("GetReservation")
        if request.name not in self.reservations:
            raise errors.NotFoundError(f"there is no {request.name}")
        return api.GetReservationResponse(reservation=self.reservations[request.name])

    async def ListReservations(self, request: api.ListReservationsRequest, context: Any) -> Any:
        self.called("ListReservations")
        return api.ListReservationsResponse(reservations=list(self.reservations.values()))


class FakeCapacity(api.CapacityServiceServicer):
    """The room of a fake allocator: how many GPUs of each node asked for are free."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator

    async def ExplainPlacement(self, request: api.ExplainPlacementRequest, context: Any) -> Any:
        self._allocator.called("ExplainPlacement")
        held = set(self._allocator.held)
        live = [one for one in self._allocator.reservations.values() if one.state == ACTIVE]

        def outlook(uuid: str) -> api.GpuOutlook:
            on = [one.name for one in live if any(gpu.uuid == uuid for gpu in one.gpus)]
            return api.GpuOutlook(uuid=uuid, obstacle=api.Obstacle.OBSTACLE_HELD, reservations=on)

        nodes = [
            api.NodeOutlook(
                name=name,
                fitting_count=len(set(gpus) - held),
                gpus=[outlook(uuid) for uuid in gpus if uuid in held],
            )
            for node, gpus in self._allocator.nodes.items()
            if (name := f"nodes/{node}") in request.ask.nodes
        ]
        return api.ExplainPlacementResponse(nodes=nodes)


class FakeQuotas(api.QuotaServiceServicer):
    """The quotas of a fake allocator: nothing but how many requests wait, one tenant on each page."""

    def __init__(self, allocator: FakeAllocator) -> None:
        self._allocator = allocator

    async def ListQuotas(self, request: api.ListQuotasRequest, context: Any) -> api.ListQuotasResponse:
        self._allocator.called("ListQuotas")
        tenants = sorted(self._allocator.waiting)
        if not tenants:
            return api.ListQuotasResponse()
        at = int(request.page_token or 0)
        found = api.Quota(tenant=tenants[at], waiting_count=self._allocator.waiting[tenants[at]])
        return api.ListQuotasResponse(
            quotas=[found], next_page_token=str(at + 1) if at + 1 < len(tenants) else ""
        )


@asynccontextmanager
async def serving(allocator: FakeAllocator) -> AsyncGenerator[str]:
    """Serve it on a free port; yields the address."""
    server = Server(ServerOptions(), Authenticator())
    quotas = FakeQuotas(allocator)
    server.add(
        Registration(SERVICE, partial(api.add_AllocatorServiceServicer_to_server, allocator)),
        Registration(QUOTA_SERVICE, partial(api.add_QuotaServiceServicer_to_server, quotas)),
        Registration(
            CAPACITY_SERVICE, partial(api.add_CapacityServiceServicer_to_server, FakeCapacity(allocator))
        ),
    )
    address = server.bind()
    async with server:
        yield address

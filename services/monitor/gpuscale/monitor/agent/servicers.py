"""AgentService, DriverService and WorkService on the wire. A snapshot becomes a message once, for all who ask or watch."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import grpc

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import PermissionDeniedError
from gpuscale.common.names import LEASE_KEY
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, current_principal
from gpuscale.common.wire import optional_seconds, seconds, to_timestamp
from gpuscale.monitor.agent.collector import Sampler
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.work import Work
from gpuscale.monitor.model.readings import Snapshot
from gpuscale.monitor.wire import count_on, to_snapshot

# How old an encoding may be when it is sent: the ages in it are as of when it was made.
SHARED_SECONDS = 0.1


class _SharedSnapshot:
    """A snapshot as a message, with ages as of `made_at`."""

    def __init__(self, values: Snapshot, made_at: float) -> None:
        self.values = values
        self._made_at = made_at
        self._message = to_snapshot(values, made_at)
        self._encoded = api.WatchSnapshotsResponse(snapshot=self._message).SerializeToString()

    def encoded(self, now: float) -> bytes:
        """An encoded WatchSnapshotsResponse; the shared one unless it is too old."""
        if now - self._made_at <= SHARED_SECONDS:
            return self._encoded
        return api.WatchSnapshotsResponse(snapshot=self.answer(now).snapshot).SerializeToString()

    def answer(self, now: float) -> api.GetSnapshotResponse:
        """A GetSnapshotResponse with ages as of `now`: a copy, for a part of what a new message costs."""
        response = api.GetSnapshotResponse(snapshot=self._message)
        count_on(response.snapshot, now - self._made_at)
        return response


ALLOCATOR_SERVICE = "gpuscale.api.allocator.v1.AllocatorService"
DEFAULT_MAX_AGE_SECONDS = 5.0


class AgentServicer(api.AgentServiceServicer):
    """Answers from snapshots. No caller causes a driver call of its own."""

    def __init__(self, sampler: Sampler, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock
        self._newest: _SharedSnapshot | None = None

    async def GetSnapshot(self, request: api.GetSnapshotRequest, context: Context) -> api.GetSnapshotResponse:
        max_age = optional_seconds(request, "max_age")
        snapshot = await self._sampler.get(DEFAULT_MAX_AGE_SECONDS if max_age is None else max_age)
        now = self._clock.now()
        return self._shared(snapshot, now).answer(now)

    async def WatchSnapshots(
        self, request: api.WatchSnapshotsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        async with aclosing(self._sampler.snapshots.follow(seconds(request.min_interval))) as snapshots:
            async for snapshot, dropped in snapshots:
                now = self._clock.now()
                message = self._shared(snapshot, now).encoded(now)
                if dropped:
                    message += api.WatchSnapshotsResponse(dropped_count=dropped).SerializeToString()
                yield message

    def _shared(self, snapshot: Snapshot, now: float) -> _SharedSnapshot:
        """The message of a snapshot, for all who ask at `now` or later."""
        if self._newest is None or self._newest.values is not snapshot:
            self._newest = _SharedSnapshot(snapshot, now)
        return self._newest


class DriverServicer(api.DriverServiceServicer):
    """Releases the driver and takes it back."""

    def __init__(self, gpus: Gpus, clock: Clock) -> None:
        self._gpus = gpus
        self._clock = clock

    async def ReleaseDriver(
        self, request: api.ReleaseDriverRequest, context: Context
    ) -> api.ReleaseDriverResponse:
        duration = seconds(request.max_duration)
        resume = self._clock.wall() + timedelta(seconds=duration)
        problem = f"the driver is released until {resume:%H:%M:%S} UTC: {request.reason}"
        await self._gpus.release(duration, problem)
        return api.ReleaseDriverResponse(resume_time=to_timestamp(resume))

    async def ResumeDriver(
        self, request: api.ResumeDriverRequest, context: Context
    ) -> api.ResumeDriverResponse:
        return api.ResumeDriverResponse(was_released=self._gpus.resume())


class WorkServicer(api.WorkServiceServicer):
    """Admits work."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def AdmitWork(self, request: api.AdmitWorkRequest, context: Context) -> api.AdmitWorkResponse:
        await self._work.admit(request, current_principal())
        return api.AdmitWorkResponse()

    async def ResetFences(self, request: api.ResetFencesRequest, context: Context) -> api.ResetFencesResponse:
        await self._work.reset(request.gpu_uuids)
        return api.ResetFencesResponse()


class LeaseRelay(grpc.GenericRpcHandler):
    """Forwards calls with a lease token to the allocator, for local programs without a certificate."""

    def __init__(self, allocator: grpc.aio.Channel) -> None:
        self._methods: dict[str, grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]] = {
            path: allocator.unary_unary(path)
            for path in (f"/{ALLOCATOR_SERVICE}/RenewReservation", f"/{ALLOCATOR_SERVICE}/ReleaseReservation")
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        """The handler of a forwarded method; None for other methods."""
        method = self._methods.get(handler_call_details.method)
        if method is None:
            return None

        async def forward(request: bytes, _context: Context) -> bytes:
            token = current_principal().lease_token
            if not token:  # the call would be the agent's own
                raise PermissionDeniedError(
                    f"the agent forwards only calls with a lease token in metadata {LEASE_KEY}",
                    reason="LEASE_TOKEN_MISSING",
                )
            with rpc_errors():
                return await method(request, timeout=RPC_TIMEOUT, metadata=((LEASE_KEY, token),))

        return grpc.unary_unary_rpc_method_handler(forward)

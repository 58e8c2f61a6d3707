"""AgentService on the wire."""

from collections.abc import AsyncGenerator

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.clock import Clock
from gpuscale.common.wire import optional_seconds
from gpuscale.monitor.agent.sampler import Sampler
from gpuscale.monitor.agent.translate import to_snapshot

DEFAULT_MAX_AGE_SECONDS = 5.0


class AgentServicer(monitor_api.AgentServiceServicer):
    """Answers from the newest snapshot; no call of a driver is made on behalf of a caller."""

    def __init__(self, sampler: Sampler, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock

    async def GetSnapshot(
        self,
        request: monitor_api.GetSnapshotRequest,
        context: grpc.aio.ServicerContext[monitor_api.GetSnapshotRequest, monitor_api.GetSnapshotResponse],
    ) -> monitor_api.GetSnapshotResponse:
        """The newest snapshot that is young enough."""
        max_age = optional_seconds(request, "max_age")
        snapshot = await self._sampler.get(DEFAULT_MAX_AGE_SECONDS if max_age is None else max_age)
        return monitor_api.GetSnapshotResponse(snapshot=to_snapshot(snapshot, self._clock.now()))

    async def WatchSnapshots(
        self,
        request: monitor_api.WatchSnapshotsRequest,
        context: grpc.aio.ServicerContext[
            monitor_api.WatchSnapshotsRequest, monitor_api.WatchSnapshotsResponse
        ],
    ) -> AsyncGenerator[monitor_api.WatchSnapshotsResponse, None]:
        """The newest snapshot, then each as fast as the subscriber reads."""
        with self._sampler.snapshots.subscribe() as subscription:
            while True:
                snapshot, dropped = await subscription.get()
                yield monitor_api.WatchSnapshotsResponse(
                    snapshot=to_snapshot(snapshot, self._clock.now()), dropped_count=dropped
                )

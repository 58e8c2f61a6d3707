"""AgentService on the wire."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import optional_seconds
from gpuscale.monitor.agent.feed import SnapshotFeed
from gpuscale.monitor.agent.sampler import Sampler
from gpuscale.monitor.agent.translate import to_snapshot
from gpuscale.monitor.wire.encoded import encoded_stream

SERVICE = "gpuscale.api.monitor.v1.AgentService"
DEFAULT_MAX_AGE_SECONDS = 5.0


class AgentServicer(monitor_api.AgentServiceServicer):
    """Answers from the newest snapshot; no call of a driver is made on behalf of a caller."""

    def __init__(self, sampler: Sampler, feed: SnapshotFeed, clock: Clock) -> None:
        self._sampler = sampler
        self._clock = clock
        self.feed = feed

    async def GetSnapshot(
        self,
        request: monitor_api.GetSnapshotRequest,
        context: Context,
    ) -> monitor_api.GetSnapshotResponse:
        """The newest snapshot that is young enough."""
        max_age = optional_seconds(request, "max_age")
        snapshot = await self._sampler.get(DEFAULT_MAX_AGE_SECONDS if max_age is None else max_age)
        return monitor_api.GetSnapshotResponse(snapshot=to_snapshot(snapshot, self._clock.now()))

    async def WatchSnapshots(
        self,
        request: monitor_api.WatchSnapshotsRequest,
        context: Context,
    ) -> AsyncGenerator[monitor_api.WatchSnapshotsResponse, None]:
        """The newest snapshot, then each. On the wire `add_agent` puts the encoded stream in its place."""
        async with aclosing(self.feed.stream(request, context)) as encoded:
            async for message in encoded:
                yield monitor_api.WatchSnapshotsResponse.FromString(message)


def add_agent(servicer: AgentServicer, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    watch = encoded_stream(SERVICE, "WatchSnapshots", monitor_api.WatchSnapshotsRequest, servicer.feed.stream)
    server.add_generic_rpc_handlers((watch,))
    monitor_api.add_AgentServiceServicer_to_server(servicer, server)

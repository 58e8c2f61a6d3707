"""The stream of snapshots to those who watch them: what is sent to several is encoded once.

A subscriber holds one snapshot at most, the newest (`watch.Subscription`).
"""

import asyncio
from collections.abc import AsyncGenerator

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import seconds
from gpuscale.monitor.model.readings import Snapshot
from gpuscale.monitor.wire.merging import count_on
from gpuscale.monitor.wire.snapshots import to_snapshot
from gpuscale.monitor.wire.watch import Broadcast

# The ages in an encoding are counted to when it was made; this much they may lag behind.
SHARED_SECONDS = 0.1


class _SharedSnapshot:
    """A snapshot as a message, as of `made_at`; built when it is first needed."""

    def __init__(self, values: Snapshot, made_at: float) -> None:
        self.values = values
        self.made_at = made_at
        self._message: types_api.Snapshot | None = None
        self._encoded = b""

    @property
    def message(self) -> types_api.Snapshot:
        """The message; not to be changed."""
        if self._message is None:
            self._message = to_snapshot(self.values, self.made_at)
        return self._message

    def encoded(self, now: float) -> bytes:
        """An encoded WatchSnapshotsResponse; shared, unless it is too old for that."""
        if now - self.made_at > SHARED_SECONDS:
            response = api.WatchSnapshotsResponse(snapshot=self.message)
            count_on(response.snapshot, now - self.made_at)
            return response.SerializeToString()
        if not self._encoded:
            self._encoded = api.WatchSnapshotsResponse(snapshot=self.message).SerializeToString()
        return self._encoded


class SnapshotFeed:
    """Streams the snapshots of a broadcast."""

    def __init__(self, snapshots: Broadcast[Snapshot], clock: Clock) -> None:
        self._snapshots = snapshots
        self._clock = clock
        self._newest: _SharedSnapshot | None = None

    async def stream(self, request: api.WatchSnapshotsRequest) -> AsyncGenerator[bytes, None]:
        """The newest snapshot, then each as fast as the subscriber reads, as encoded WatchSnapshotsResponse."""
        interval = seconds(request.min_interval)
        with self._snapshots.subscribe() as subscription:
            while True:
                snapshot, dropped = await subscription.get()
                now = self._clock.now()
                whole = self._newest
                if whole is None or whole.values is not snapshot:
                    whole = self._newest = _SharedSnapshot(snapshot, now)
                message = whole.encoded(now)
                if dropped:
                    message += api.WatchSnapshotsResponse(dropped_count=dropped).SerializeToString()
                yield message
                if interval:
                    await asyncio.sleep(interval)
                    subscription.forgive()

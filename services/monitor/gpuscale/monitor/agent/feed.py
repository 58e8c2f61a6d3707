"""The stream of snapshots to those who watch them: what is sent to several is encoded once.

A subscriber holds one snapshot at most, the newest (`watch.Subscription`). Those who want changes follow one chain of
them; whoever begins, or missed a link, is given the whole snapshot that the chain has led to, and follows from there.
"""

import asyncio
from collections.abc import AsyncGenerator

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.wire import seconds
from gpuscale.monitor.agent.deltas import DeadBands, Deltas
from gpuscale.monitor.model.readings import Snapshot
from gpuscale.monitor.wire.merging import Change, Picture, count_on
from gpuscale.monitor.wire.snapshots import to_snapshot
from gpuscale.monitor.wire.watch import Broadcast

# The ages in an encoding are counted to when it was made; this much they may lag behind.
SHARED_SECONDS = 0.1


class _SharedSnapshot:
    """A snapshot as a message, as of `made_at`; built when it is first needed."""

    def __init__(self, values: Snapshot, made_at: float, message: types_api.Snapshot | None = None) -> None:
        self.values = values
        self.made_at = made_at
        self._message = message
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


class _Chain:
    """What changed from each snapshot to the next, for any number of followers that keep up."""

    def __init__(self, deltas: Deltas) -> None:
        self._deltas = deltas
        self._base_seq = -1
        self._delta = b""
        self._picture: Picture | None = None
        self._reached: _SharedSnapshot | None = None

    def link(self, whole: _SharedSnapshot, have: int, now: float) -> bytes:
        """An encoded WatchSnapshotsResponse that brings a follower at snapshot number `have` to this one."""
        reached = self._reached
        if reached is None or whole.values.seq != reached.values.seq:
            delta = self._deltas.next(whole.values, whole.made_at)
            if delta is None or self._picture is None:
                self._delta = b""
                message = types_api.Snapshot()
                message.CopyFrom(whole.message)
                self._picture = Picture(message)
            else:
                self._delta = api.WatchSnapshotsResponse(delta=delta).SerializeToString()
                self._picture.merge(Change.of(delta))
            self._base_seq = -1 if reached is None else reached.values.seq
            reached = self._reached = _SharedSnapshot(whole.values, whole.made_at, self._picture.snapshot)
        if self._delta and have == self._base_seq and now - reached.made_at <= SHARED_SECONDS:
            return self._delta
        return reached.encoded(now)


class SnapshotFeed:
    """Streams the snapshots of a broadcast; those who want changes get a whole one again after `full_every` seconds."""

    def __init__(
        self, snapshots: Broadcast[Snapshot], clock: Clock, bands: DeadBands, full_every: float
    ) -> None:
        self._snapshots = snapshots
        self._clock = clock
        self._bands = bands
        self._full_every = full_every
        self._every_snapshot = _Chain(Deltas(bands, full_every))
        self._newest: _SharedSnapshot | None = None

    async def stream(self, request: api.WatchSnapshotsRequest, _: object) -> AsyncGenerator[bytes, None]:
        """The newest snapshot, then each as fast as the subscriber reads, as encoded WatchSnapshotsResponse."""
        interval = seconds(request.min_interval)
        chain = _Chain(Deltas(self._bands, self._full_every)) if interval else self._every_snapshot
        have = -1
        with self._snapshots.subscribe() as subscription:
            while True:
                snapshot, dropped = await subscription.get()
                now = self._clock.now()
                whole = self._newest
                if whole is None or whole.values is not snapshot:
                    whole = self._newest = _SharedSnapshot(snapshot, now)
                if interval and request.deltas:
                    # Nobody else follows its chain: what leads from one to the next is as of now.
                    whole = _SharedSnapshot(snapshot, now)
                message = chain.link(whole, have, now) if request.deltas else whole.encoded(now)
                have = snapshot.seq
                if dropped:
                    message += api.WatchSnapshotsResponse(dropped_count=dropped).SerializeToString()
                yield message
                if interval:
                    await asyncio.sleep(interval)
                    subscription.forgive()

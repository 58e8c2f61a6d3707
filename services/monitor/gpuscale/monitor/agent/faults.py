"""Faults that the driver reported by an XID number, kept until the fleet need not be told of them any more.

A fault is told as soon as it is heard of, and again on each new stream: the fleet may have been started anew. It is let go
once the fleet was told and the GPU was away: then its state says what is wrong, or it came back from a reset.
"""

import asyncio
from collections import deque
from collections.abc import Iterable

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent.events import GpuEvents
from gpuscale.monitor.model.readings import GpuEventKind, GpuState, GpuView

MOST_KEPT = 64
_AWAY = frozenset({GpuState.LOST, GpuState.RESET_REQUIRED, GpuState.RELEASED})


class Faults:
    """The newest faults of this host, numbered from 0."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, str, int, float]] = deque(maxlen=MOST_KEPT)
        self._count = 0
        self._told = -1
        self._arrived = asyncio.Event()

    async def follow(self, events: GpuEvents) -> None:
        """Keep what happens, for ever."""
        with events.subscribe() as queue:
            while True:
                event = await queue.get()
                if event.kind is GpuEventKind.XID and event.xid is not None:
                    self.add(event.uuid, event.xid, event.seen_at)

    def add(self, uuid: str, xid: int, at: float) -> None:
        """Keep a fault that was heard of at `at`, in seconds of the clock."""
        self._kept.append((self._count, uuid, xid, at))
        self._count += 1
        self._arrived.set()

    async def after(self, last: int) -> None:
        """Wait until there is a fault with a number above `last`. One may wait at a time."""
        while not self._kept or self._kept[-1][0] <= last:
            self._arrived.clear()
            await self._arrived.wait()

    def message(self, last: int, now: float) -> monitor_api.ReportedFaults:
        """The faults that are kept with a number above `last`, oldest first."""
        return monitor_api.ReportedFaults(
            faults=[
                monitor_api.ReportedFault(uuid=uuid, xid=xid, seq=seq, age=to_duration(max(now - at, 0.0)))
                for seq, uuid, xid, at in self._kept
                if seq > last
            ]
        )

    def told(self, last: int) -> None:
        """The fleet was told of those up to that number."""
        self._told = max(self._told, last)

    def saw(self, gpus: Iterable[GpuView]) -> None:
        """A snapshot shows these GPUs: let go of faults that need not be told again."""
        away = {gpu.identity.uuid for gpu in gpus if gpu.state in _AWAY} if self._kept else None
        if away:
            kept = [one for one in self._kept if one[0] > self._told or one[1] not in away]
            self._kept = deque(kept, maxlen=MOST_KEPT)

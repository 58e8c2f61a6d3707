"""One autoscaler with endpoints that read one queue, for `bench.cliffs`: what its start costs, and then an evaluation.

python -m bench._scaling_site FOLDER ENDPOINTS TICK SECONDS [changing]

It prints seconds of CPU of this process until each endpoint was evaluated once, and those of an evaluation after that;
the part of the due evaluations that there were, and the bytes that were written in a second. With `changing` each evaluation comes to another
decision than the one before: the queue fills and empties, and the endpoints are in shadow mode, so that nothing is started.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import uvloop

from bench._reserve_site import pin
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState, noted
from gpuscale.autoscaler.loop import reconciler
from gpuscale.common.runtime.lifecycle import collecting_what_is_new
from gpuscale.common.runtime.tasks import SystemClock
from tests.support.autoscaler_app import FakeWatchers, running, scaling


class Queues(FakeWatchers):
    """A queue that is empty, or full in every other `period`."""

    period = 0.0

    def reading(self, watcher: str) -> QueueReading | None:
        """The one queue, by the time of day."""
        now = self._clock.now()
        full = bool(self.period) and int(now / self.period) % 2
        return QueueReading(QueueState.OK, 100 if full else 0, 0, 1, now)


def written() -> int:
    """Bytes that this process has had written to disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


async def _serve(folder: Path, endpoints: int, tick: float, seconds: float, *, changing: bool) -> None:
    clock = SystemClock()
    watchers = Queues(clock)
    watchers.period = tick if changing else 0.0
    count, evaluated = 0, asyncio.Event()

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        if count >= endpoints:
            evaluated.set()
        return noted(*arguments)

    with patch.object(reconciler, "noted", counted):
        async with running(folder, "127.0.0.1:1", watchers, clock) as autoscaler:
            stored = await autoscaler.endpoints.ListEndpoints(api.ListEndpointsRequest(page_size=1))
            for number in range(0 if stored.endpoints else endpoints):
                one = scaling(name=f"e{number}", tick=tick)
                if changing:
                    one.spec.mode = api.ScalingMode.SCALING_MODE_SHADOW
                await autoscaler.create(one)
            await evaluated.wait()
            start, count, bytes_before = time.process_time(), 0, written()
            await asyncio.sleep(seconds)
            cpu = (time.process_time() - start) / max(1, count)
            due = endpoints * seconds / tick
            print(start, cpu, count / due, (written() - bytes_before) / seconds, flush=True)


if __name__ == "__main__":
    pin(0)
    folder, endpoints, tick, seconds = sys.argv[1:5]
    changing = sys.argv[5:] == ["changing"]
    with collecting_what_is_new():  # as in every program of ours
        uvloop.run(_serve(Path(folder), int(endpoints), float(tick), float(seconds), changing=changing))

"""Schedules that show a planted bug in its first run: what a client does, what is killed when, and what it saw.

Each is harmless to a correct allocator. No schedule depends on how fast anything is.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

from gpuscale.api.allocator import v1 as api
from gpuscale.common.errors import FailedPreconditionError, ResourceExhaustedError, UnavailableError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import seconds
from tests.fault.allocator.planted_bugs import BETWEEN
from tests.fault.allocator.reservation_history import Grant, History, Sighting
from tests.fault.allocator.reservation_traffic import holds_of
from tests.support.allocator import Reservation
from tests.support.allocator_process import AllocatorProcess
from tests.support.allocator_site import Site

GPU = "nodes/n0/gpus/n0-0"
LONG = 600.0


class Scribe:
    """A client that writes down what it sees."""

    def __init__(self, place: Site) -> None:
        self.place = place
        self.history = History()

    async def reserve(self, request_id: str | None = None, **fields: object) -> Grant:
        """Reserve for long, and note the grant."""
        sent = _now()
        answer = await self.place.client.reserve(request_id=request_id, ttl=LONG, **fields)
        return self.note(answer, sent)

    def note(self, answer: Reservation, sent: float) -> Grant:
        """Note a grant."""
        until = sent + seconds(answer.remaining)
        grant = Grant(answer.request_id, answer.name, answer.fence, holds_of(answer), sent, _now(), until)
        self.history.grants.append(grant)
        return grant

    async def look(self) -> None:
        """List what is held, and note it."""
        sent = _now()
        found = await self.place.client.live()
        listed = {one.name: holds_of(one) for one in found}
        self.history.sightings.append(
            Sighting(sent, _now(), listed, frozenset(one.request_id for one in found))
        )

    async def give_back(self) -> None:
        """Release everything, so that another schedule can follow."""
        for one in await self.place.client.live():
            await self.place.client.release(one)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def killed(life: AllocatorProcess) -> None:
    """Kill a process now, without another turn of the event loop before it."""
    os.kill(life.pid, signal.SIGKILL)
    await life.ended()


async def reply_before_commit(scribe: Scribe) -> None:
    """Killed in the moment of the answer: what was answered is there afterwards."""
    life = await scribe.place.start()
    await scribe.reserve()
    await killed(life)
    life = await scribe.place.start()
    await scribe.look()
    await scribe.give_back()
    await life.kill()


async def two_transactions(scribe: Scribe) -> None:
    """Killed between two writes of one batch, if there are two: it is there wholly or not at all."""
    life = await scribe.place.start(f"{BETWEEN}=kill")
    ask = api.Ask(gpu_count=1, min_memory_bytes=0)
    wishes = [api.ReserveRequest(request_id=str(uuid4()), holder="test", ask=ask) for _ in range(2)]
    scribe.history.batches.append(tuple(one.request_id for one in wishes))
    try:
        with rpc_errors():
            await scribe.place.client.stub.BatchReserve(api.BatchReserveRequest(requests=wishes), timeout=20)
    except UnavailableError:
        await life.ended()
    await life.kill()
    life = await scribe.place.start()
    await scribe.look()
    await scribe.give_back()
    await life.kill()


async def fence_in_memory(scribe: Scribe) -> None:
    """Fences of two lives."""
    for _ in range(2):
        life = await scribe.place.start()
        await scribe.reserve()
        await killed(life)
    life = await scribe.place.start()
    await scribe.give_back()
    await life.kill()


async def wall_clock_expiry(scribe: Scribe) -> None:
    """The wall clock goes forward by an hour; a lease that the sweeper could see as over is not."""
    life = await scribe.place.start()
    await scribe.reserve()
    witness = await scribe.place.client.reserve(ttl=2)
    scribe.place.launcher.step_wall(3600)
    while any(one.name == witness.name for one in await scribe.place.client.live()):
        await asyncio.sleep(0.1)  # the sweeper has been at work since the step
    await scribe.look()
    scribe.place.launcher.step_wall(0)
    await scribe.give_back()
    await life.kill()


async def shares_unchecked(scribe: Scribe) -> None:
    """Two shares of a GPU that exceed it."""
    life = await scribe.place.start()
    for _ in range(2):
        try:
            await scribe.reserve(gpu_milli=600, gpus=[GPU], memory=0)
        except ResourceExhaustedError:
            continue
    await scribe.look()
    await scribe.give_back()
    await life.kill()


async def request_id_ignored(scribe: Scribe) -> None:
    """The same request again."""
    life = await scribe.place.start()
    first = await scribe.reserve()
    again = await scribe.place.client.reserve(request_id=first.request_id, ttl=LONG)
    scribe.history.repetitions.append((first, again.name, again.fence))
    await scribe.give_back()
    await life.kill()


async def stale_fence_accepted(scribe: Scribe) -> None:
    """A renewal with the fence of another reservation."""
    life = await scribe.place.start()
    first, second = await scribe.reserve(), await scribe.reserve()
    try:
        await scribe.place.client.renew(Reservation(name=second.name, fence=first.fence))
    except FailedPreconditionError:
        pass
    else:
        scribe.history.oddities.append(f"stale fence {first.fence} renewed {second.name}")
    await scribe.give_back()
    await life.kill()


SCHEDULES: Mapping[str, tuple[Callable[[Scribe], Awaitable[None]], str]] = {
    "reply_before_commit": (reply_before_commit, "acknowledged grant lost"),
    "two_transactions": (two_transactions, "batch torn"),
    "fence_in_memory": (fence_in_memory, "was given 2 times"),
    "wall_clock_expiry": (wall_clock_expiry, "acknowledged grant lost"),
    "shares_unchecked": (shares_unchecked, "double allocation"),
    "request_id_ignored": (request_id_ignored, "was answered with"),
    "stale_fence_accepted": (stale_fence_accepted, "stale fence"),
}
"""By the bug that it shows, with a part of what is found."""

"""Clients that reserve, renew, repeat, release and forget, and write down what they saw in a `History`.

They want whole GPUs, shares and gangs, one by one and in batches. They repeat requests on purpose, send stale fences on purpose, and leave some leases to run out: without that,
several kinds of broken allocators look healthy.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from uuid import UUID

from gpuscale.api.allocator import v1 as api
from gpuscale.common import errors
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import seconds
from tests.fault.allocator.reservation_history import Grant, History, Holds, Sighting
from tests.support.allocator import Client, Reservation
from tests.support.allocator_values import reserve_request

TTL = 5.0
"""Seconds, the shortest lease there is."""
BATCH_TTL = 60.0
"""Seconds; batches are released, never left to run out, so that a part of one is never seen."""
UNANSWERED = (errors.UnavailableError, errors.DeadlineExceededError)
"""The call may have happened or not; it is repeated."""


@dataclass(frozen=True)
class Wish:
    """What a client wants: members of so many GPUs each, or of a share of one."""

    count: int = 1
    milli: int = 1000
    members: int = 1

    def request(self, request_id: str, ttl: float) -> api.ReserveRequest:
        ask = {"gpu_milli": self.milli, "member_count": self.members, "max_utilization_percent": 100}
        return reserve_request(self.count, memory=0, request_id=request_id, ttl=ttl, **ask)


WISHES = (
    Wish(1),
    Wish(1),
    Wish(2),
    Wish(3),
    Wish(milli=500),
    Wish(milli=300),
    Wish(members=2),
    Wish(1, 600, 2),
)


def holds_of(one: Reservation) -> Holds:
    found: Holds = {}
    for gpu in one.gpus:
        found[gpu.uuid] = found.get(gpu.uuid, 0) + gpu.milli
    return found


class Traffic:
    """Callers of one allocator, until `stop`."""

    def __init__(self, client: Client, seed: int) -> None:
        self.history = History()
        self.stopped = asyncio.Event()
        self._client = client
        self._random = Random(seed)

    @asynccontextmanager
    async def of(self, callers: int) -> AsyncGenerator[None]:
        """So many who reserve, and one who lists, while the block runs; each finishes what it is at then."""
        async with asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(self.holder())
            group.create_task(self.lister())
            yield
            self.stop()

    def stop(self) -> None:
        """Let every caller finish what it is at."""
        self.stopped.set()

    async def holder(self) -> None:
        """Reserve, do something with the grant, and give it back or forget it, over and over."""
        while not self.stopped.is_set():
            if self._random.random() < 0.15:
                await self._batch()
                continue
            wish = self._random.choice(WISHES)
            grant = await self._reserve(wish)
            if grant is None:
                await self._pause(0.05)
                continue
            if self._random.random() < 0.3:
                await self._repeat(grant, wish)
            if self._random.random() < 0.3:
                await self._send_stale_fence(grant)
            while self._random.random() < 0.4:
                await self._pause(0.1)
                await self._renew(grant)
            if self._random.random() < 0.97:
                await self._release(grant)

    async def lister(self) -> None:
        """List everything that is held, over and over."""
        while not self.stopped.is_set():
            sent = self._now()
            try:
                found = await self._client.live()
            except UNANSWERED:
                await self._pause(0.05)
                continue
            listed = {one.name: holds_of(one) for one in found}
            requests = frozenset(one.request_id for one in found)
            self.history.sightings.append(Sighting(sent, self._now(), listed, requests))
            await self._pause(0.02)

    async def _reserve(self, wish: Wish) -> Grant | None:
        request_id = self._request_id()
        first_sent = self._now()
        while not self.stopped.is_set():
            sent = self._now()
            try:
                answer = await self._ask(request_id, wish)
            except errors.ResourceExhaustedError:
                return None
            except UNANSWERED:
                if self._random.random() < 0.1:
                    return None  # never asked again: the lease, if there is one, runs out
                await self._pause(0.05)
                continue
            except errors.GpuscaleError as error:
                self._odd("Reserve", error)
                return None
            if answer.state != Reservation.STATE_ACTIVE:
                return None  # it ran out while we could not reach the allocator
            return self._acknowledged(answer, wish, first_sent, sent)
        return None

    def _acknowledged(self, answer: Reservation, wish: Wish, first_sent: float, sent: float) -> Grant:
        grant = Grant(
            answer.request_id,
            answer.name,
            answer.fence,
            holds_of(answer),
            first_sent,
            self._now(),
            sent + seconds(answer.remaining),
        )
        if sum(grant.holds.values()) != wish.count * wish.members * wish.milli:
            self.history.oddities.append(f"{grant.name} holds {grant.holds} of {wish}")
        self.history.grants.append(grant)
        return grant

    async def _ask(self, request_id: str, wish: Wish) -> Reservation:
        request = wish.request(request_id, TTL)
        with rpc_errors():
            return (await self._client.stub.Reserve(request, timeout=self._client.timeout)).reservation

    async def _batch(self) -> None:
        """Reserve two in one call and release them in one, however often that has to be repeated."""
        wishes = [Wish(1), Wish(milli=500)]
        requests = [wish.request(self._request_id(), BATCH_TTL) for wish in wishes]
        self.history.batches.append(tuple(one.request_id for one in requests))
        first_sent = self._now()
        while True:
            sent = self._now()
            try:
                with rpc_errors():
                    answer = await self._client.stub.BatchReserve(
                        api.BatchReserveRequest(requests=requests), timeout=self._client.timeout
                    )
            except errors.ResourceExhaustedError:
                return
            except UNANSWERED:
                await self._pause(0.05)
                continue
            break
        grants = [
            self._acknowledged(one, wish, first_sent, sent)
            for one, wish in zip(answer.reservations, wishes, strict=True)
        ]
        await self._pause(0.1)
        await self._release_batch(grants)

    async def _release_batch(self, grants: list[Grant]) -> None:
        for grant in grants:
            grant.released = self._now()
        releases = [api.ReleaseReservationRequest(name=one.name, fence=one.fence) for one in grants]
        while True:
            try:
                with rpc_errors():
                    await self._client.stub.BatchRelease(
                        api.BatchReleaseRequest(requests=releases), timeout=self._client.timeout
                    )
            except UNANSWERED:
                await self._pause(0.05)
                continue
            except errors.GpuscaleError as error:
                self._odd("BatchRelease", error)
            return

    async def _repeat(self, grant: Grant, wish: Wish) -> None:
        try:
            answer = await self._ask(grant.request_id, wish)
        except UNANSWERED:
            return
        except errors.GpuscaleError as error:
            self._odd("repeated Reserve", error)
            return
        self.history.repetitions.append((grant, answer.name, answer.fence))

    async def _send_stale_fence(self, grant: Grant) -> None:
        handle = Reservation(name=grant.name, fence=max(1, grant.fence - 1))
        if handle.fence == grant.fence:
            return
        try:
            await self._client.renew(handle)
        except (*UNANSWERED, errors.FailedPreconditionError):
            return
        except errors.GpuscaleError as error:
            self._odd("stale Renew", error)
            return
        self.history.oddities.append(f"stale fence {handle.fence} renewed {grant.name}")

    async def _renew(self, grant: Grant) -> None:
        sent = self._now()
        try:
            answer = await self._client.renew(Reservation(name=grant.name, fence=grant.fence))
        except UNANSWERED:
            return
        except (errors.FailedPreconditionError, errors.NotFoundError) as error:
            if self._now() <= grant.until:
                self._odd(f"Renew of {grant.name}, which was held,", error)
            return
        grant.held_until = max(grant.held_until, sent + seconds(answer.remaining))

    async def _release(self, grant: Grant) -> None:
        grant.released = self._now()
        while not self.stopped.is_set():
            try:
                await self._client.release(Reservation(name=grant.name, fence=grant.fence))
            except UNANSWERED:
                await self._pause(0.05)
                continue
            except errors.GpuscaleError as error:
                self._odd("Release", error)
            return

    def _odd(self, what: str, error: errors.GpuscaleError) -> None:
        self.history.oddities.append(
            f"{what} was answered {type(error).__name__} {error.reason}: {error.message}"
        )

    async def _pause(self, longest: float) -> None:
        await asyncio.sleep(self._random.uniform(0, longest))

    def _request_id(self) -> str:
        return str(UUID(int=self._random.getrandbits(128), version=4))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

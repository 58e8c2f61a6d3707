"""Clients that reserve, renew, repeat, release and forget, and write down what they saw in a `History`.

They repeat requests on purpose, send stale fences on purpose, and leave some leases to run out: without that,
several kinds of broken allocators look healthy.
"""

import asyncio
from random import Random
from uuid import UUID

from gpuscale.common.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.wire import seconds
from tests.support.allocator import Client, Reservation
from tests.support.reservation_history import Grant, History, Sighting

TTL = 5.0
"""Seconds, the shortest lease there is."""
UNANSWERED = (UnavailableError, DeadlineExceededError)
"""The call may have happened or not; it is repeated."""


class Traffic:
    """Callers of one allocator, until `stop`."""

    def __init__(self, client: Client, seed: int) -> None:
        self.history = History()
        self.stopped = asyncio.Event()
        self._client = client
        self._random = Random(seed)

    def stop(self) -> None:
        """Let every caller finish what it is at."""
        self.stopped.set()

    async def holder(self) -> None:
        """Reserve, do something with the grant, and give it back or forget it, over and over."""
        while not self.stopped.is_set():
            grant = await self._reserve()
            if grant is None:
                await self._pause(0.05)
                continue
            if self._random.random() < 0.3:
                await self._repeat(grant)
            if self._random.random() < 0.3:
                await self._send_stale_fence(grant)
            while self._random.random() < 0.4:
                await self._pause(0.1)
                await self._renew(grant)
            if self._random.random() < 0.92:
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
            listed = {one.name: tuple(gpu.uuid for gpu in one.gpus) for one in found}
            self.history.sightings.append(Sighting(sent, self._now(), listed))
            await self._pause(0.02)

    async def _reserve(self) -> Grant | None:
        request_id = str(UUID(int=self._random.getrandbits(128), version=4))
        count = self._random.choice([1, 1, 2, 3])
        first_sent = self._now()
        while not self.stopped.is_set():
            sent = self._now()
            try:
                answer = await self._client.reserve(count, request_id=request_id, ttl=TTL)
            except ResourceExhaustedError:
                return None
            except UNANSWERED:
                if self._random.random() < 0.1:
                    return None  # never asked again: the lease, if there is one, runs out
                await self._pause(0.05)
                continue
            except GpuscaleError as error:
                self._odd("Reserve", error)
                return None
            if answer.state != Reservation.STATE_ACTIVE:
                return None  # it ran out while we could not reach the allocator
            grant = Grant(
                request_id,
                answer.name,
                answer.fence,
                tuple(gpu.uuid for gpu in answer.gpus),
                first_sent,
                self._now(),
                sent + seconds(answer.remaining),
            )
            if len(grant.uuids) != count:
                self.history.oddities.append(f"{grant.name} has {len(grant.uuids)} GPUs of {count}")
            self.history.grants.append(grant)
            return grant
        return None

    async def _repeat(self, grant: Grant) -> None:
        try:
            answer = await self._client.reserve(len(grant.uuids), request_id=grant.request_id, ttl=TTL)
        except UNANSWERED:
            return
        except GpuscaleError as error:
            self._odd("repeated Reserve", error)
            return
        self.history.repetitions.append((grant, answer.name, answer.fence))

    async def _send_stale_fence(self, grant: Grant) -> None:
        handle = Reservation(name=grant.name, fence=max(1, grant.fence - 1))
        if handle.fence == grant.fence:
            return
        try:
            await self._client.renew(handle)
        except (*UNANSWERED, FailedPreconditionError):
            return
        except GpuscaleError as error:
            self._odd("stale Renew", error)
            return
        self.history.oddities.append(f"stale fence {handle.fence} renewed {grant.name}")

    async def _renew(self, grant: Grant) -> None:
        sent = self._now()
        try:
            answer = await self._client.renew(Reservation(name=grant.name, fence=grant.fence))
        except UNANSWERED:
            return
        except (FailedPreconditionError, NotFoundError) as error:
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
            except GpuscaleError as error:
                self._odd("Release", error)
            return

    def _odd(self, what: str, error: GpuscaleError) -> None:
        self.history.oddities.append(
            f"{what} was answered {type(error).__name__} {error.reason}: {error.message}"
        )

    async def _pause(self, longest: float) -> None:
        await asyncio.sleep(self._random.uniform(0, longest))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

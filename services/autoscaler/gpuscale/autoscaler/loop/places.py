"""Places in the allocator's queue: GPUs freed for replicas of an endpoint with a priority go to nobody behind them.

Each place is a stream. A crash loses it, and repeating the request returns what it was granted.
"""

import asyncio
from dataclasses import dataclass, field

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.replicas import Replica
from gpuscale.autoscaler.loop.hub import Wakes
from gpuscale.common.errors import GpuscaleError, ResourceExhaustedError, UnavailableError
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import TaskScope
from gpuscale.common.wire import enum_word, to_duration

STAY = 60.0
"""Seconds after which a place is requested again, on the nodes of that time."""


class StandsInQueueError(ResourceExhaustedError):
    """A request waits in the queue; `message` has its place."""


@dataclass(eq=False)
class _Place:
    endpoint: str
    request: allocator_api.ReserveRequest
    heard: asyncio.Event = field(default_factory=asyncio.Event)
    waits: allocator_api.QueuePlace | None = None
    answer: allocator_api.ReserveAndWatchResponse | None = None
    error: GpuscaleError | None = None
    task: asyncio.Task[None] = field(init=False)

    @property
    def over(self) -> bool:
        return self.answer is not None or self.error is not None

    @property
    def refusal(self) -> ResourceExhaustedError:
        """The refusal for a request that does not stay."""
        text = "the allocator has not looked at it yet" if self.waits is None else self.waits.message
        reason = "NO_CAPACITY" if self.waits is None else enum_word(self.waits, "reason")
        return ResourceExhaustedError(
            text, reason="QUOTA_EXCEEDED" if reason == "QUOTA_EXCEEDED" else "NO_CAPACITY"
        )


class Places:
    """The places of replicas; `run` must run."""

    def __init__(self, stub: "allocator_api.AllocatorServiceAsyncStub", wakes: Wakes) -> None:
        self._stub = stub
        self._wakes = wakes
        self._scope = TaskScope()
        self._places: dict[str, _Place] = {}

    async def run(self) -> None:
        """Wait in the queue for them, for ever."""
        async with self._scope:
            await asyncio.Event().wait()

    async def ask(
        self, replica: Replica, request: allocator_api.ReserveRequest, *, stays: bool
    ) -> allocator_api.ReserveAndWatchResponse:
        """Returns what a replica is granted now, or was while it waited. Raises its place, which it keeps if it `stays`."""
        request.wait.CopyFrom(to_duration(STAY))
        place = self._places.get(replica.id)
        if place is not None and not place.over and (not stays or place.request != request):
            await self.leave(replica.id)  # once it has left, a repeated request shows whether it was granted
            place = None
        if place is None:
            place = self._places[replica.id] = _Place(replica.endpoint, request)
            place.task = self._scope.start(f"place of {replica.id}", self._stand(place))
        try:
            async with asyncio.timeout(RPC_TIMEOUT):
                await place.heard.wait()
        except TimeoutError:
            await self.leave(replica.id)
            raise UnavailableError("no answer to a request for GPUs") from None
        if not place.over and stays:
            before = place.waits.position if place.waits else 0
            raise StandsInQueueError(f"{before} before it in the allocator's queue; {place.refusal.message}")
        await self.leave(replica.id)
        if place.answer is not None:
            return place.answer
        error = place.error
        raise place.refusal if error is None or error.reason == "WAIT_TIMEOUT" else error

    async def leave(self, replica: str) -> None:
        """Leave the queue, if it waits there. A simultaneous grant is found by asking again, or runs out."""
        if (place := self._places.pop(replica, None)) is not None:
            place.task.cancel()
            await asyncio.wait([place.task])

    async def _stand(self, place: _Place) -> None:
        asked = allocator_api.ReserveAndWatchRequest(reserve=place.request)
        try:
            with rpc_errors():
                async for news in self._stub.ReserveAndWatch(asked, timeout=STAY + RPC_TIMEOUT):
                    if news.HasField("reservation"):
                        place.answer = news
                        break
                    place.waits = news.waiting
                    place.heard.set()
        except GpuscaleError as error:
            place.error = error
        if not place.over:
            place.error = UnavailableError("the allocator ended the stream")
        stood = place.heard.is_set()
        place.heard.set()
        if stood:
            self._wakes.call(place.endpoint, changed=False)

"""Reserved GPUs for a block of code of an event loop: kept in the background, given back at its end.

async with client.reserve(gpus=2, min_memory="8GiB") as lease:
    await train(lease.gpu_uuids)
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client.asks import as_seconds
from gpuscale.client.held import REFUSALS, Held, now
from gpuscale.client.lease_timer import LOOK, LeaseTimer
from gpuscale.common.errors import GpuscaleError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub

_log = logging.getLogger(__name__)


class AsyncLease(Held):
    """GPUs that were reserved. `AsyncReserving` keeps the lease in its block.

    Attributes:
        lost: set as soon as the GPUs are lost, before they can be another's.
    """

    def __init__(
        self,
        allocator: "AllocatorServiceAsyncStub",
        reservation: allocator_api.Reservation,
        timer: LeaseTimer,
        this_node: Callable[[], str | None],
        admit: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(reservation, timer, this_node)
        self.lost = asyncio.Event()
        self._admit = admit
        self._allocator = allocator

    async def renew(self, timeout: float | str | None = None) -> None:  # noqa: ASYNC109
        """Start the lease anew, within `timeout` (seconds, or a text such as `5s`). In a block that is done for you.

        Raises:
            FailedPreconditionError: it has ended (RESERVATION_ENDED).
            GpuscaleError: anything else that went wrong.
        """
        sent = now()
        response = await self._allocator.RenewReservation(
            self._renewal(), timeout=as_seconds("timeout", timeout)
        )
        self._heed(response.reservation, sent)

    async def release(self) -> None:
        """Give the GPUs back now; once more is harmless.

        Raises:
            GpuscaleError: that failed, and the lease runs out by itself.
        """
        self._timer.give_back(now())
        self._given_back((await self._allocator.ReleaseReservation(self._release())).reservation)

    async def admit(self) -> None:
        """Have this host's agent know this process as the holder's; the GPUs are lost where the lease is over."""
        try:
            await self._admit()
        except REFUSALS as error:
            self._timer.refused(error.message)
        except asyncio.CancelledError:
            with suppress(GpuscaleError):  # the lease runs out by itself
                await self.release()
            raise

    async def keep(self) -> None:
        """Renew until the GPUs are lost; cancel it to end it."""
        timer = self._timer
        while not (timer.lost or timer.given_back):
            await asyncio.sleep(min(LOOK, timer.wait(now())))
            if not timer.is_over(now()) and timer.wait(now()) <= 0:
                await self._try_to_renew()
        if timer.lost:
            self.lost.set()

    async def leave(self, keeper: asyncio.Task[None], error: BaseException | None) -> None:
        """End `keep`, and give the GPUs back.

        Raises:
            LostReservationError: they were lost before; where there is another error, it gets a note instead.
        """
        self._timer.give_back(now())
        keeper.cancel()
        await asyncio.wait((keeper,))
        try:
            await self.release()
        except GpuscaleError as problem:
            if not self._timer.lost:
                _log.warning("%s was not given back, its lease runs out: %s", self.name, problem.message)
        if self._timer.lost:
            self.lost.set()
        self._left(error)

    async def _try_to_renew(self) -> None:
        try:
            await self.renew(self._timer.patience(now()))
        except REFUSALS as error:
            self._timer.refused(error.message)
        except GpuscaleError as error:
            _log.info("%s was not renewed, trying again: %s", self.name, error.message)
            self._timer.unanswered(now())


class AsyncReserving:
    """A reservation to be made: awaited, it is a lease that nobody keeps; as a block, one that is kept and given back."""

    def __init__(self, reserve: Callable[[], Awaitable[AsyncLease]]) -> None:
        self._reserve = reserve
        self._kept: tuple[AsyncLease, asyncio.Task[None]] | None = None

    def __await__(self) -> Generator[object, None, AsyncLease]:
        return self._reserve().__await__()

    async def __aenter__(self) -> AsyncLease:
        lease = await self._reserve()
        await lease.admit()  # before the block touches a GPU
        self._kept = lease, asyncio.create_task(lease.keep(), name=f"keep {lease.name}")
        return lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._kept is None:
            return
        lease, keeper = self._kept
        await lease.leave(keeper, error)

"""Reserved GPUs for a block of code: kept in the background, given back at its end.

Without an event loop it is a `Lease`, with one an `AsyncLease`:

    with client.reserve(gpus=2, min_memory="8GiB") as lease:
        subprocess.run(["python", "train.py"], env=lease.env(), check=True)

    async with client.reserve(gpus=2, min_memory="8GiB") as lease:
        await train(lease.gpu_uuids)

What `reserve` was granted when somebody gave up in the middle of it is given back too: `abandon`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Self

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client.asks import as_seconds
from gpuscale.client.lease_timer import LOOK, LeaseTimer
from gpuscale.client.listing import pages, pages_async
from gpuscale.client.states import revoked_early
from gpuscale.client.this_host import expect_here
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from gpuscale.common.names import node_of
from gpuscale.common.wire import optional_seconds, seconds

_log = logging.getLogger(__name__)

REFUSALS = (FailedPreconditionError, NotFoundError, PermissionDeniedError, UnauthenticatedError)
"""Errors of a renewal after which no further one can succeed."""
_STATE = allocator_api.Reservation.State
_OVER = (_STATE.STATE_EXPIRED, _STATE.STATE_CANCELLED, _STATE.STATE_LOST)
"""How a reservation ends that its holder did not give back."""
_ELSEWHERE = (
    'start its work there; lease.env(node="{node}") is the environment for it, lease.gpu_uuids has all UUIDs'
)
# macOS has it under the other name.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds that pass while the host sleeps as well, as the allocator counts leases (`gpuscale.common.runtime.tasks`)."""
    return time.clock_gettime(_CLOCK)


class LostReservationError(FailedPreconditionError):
    """The holder has lost the GPUs, or is about to: stop using them."""

    default_reason = "LEASE_LOST"


class Held:
    """GPUs that are held under a lease.

    Args:
        reservation: what was granted.
        timer: when it is to be renewed, and whether it is lost.
        this_node: tells which node this host is; None where it is none.
        tell_lost: tells whoever waits for it that the GPUs are lost.
        told_revoked: set while it is known that the GPUs will be taken away.
    """

    def __init__(
        self,
        reservation: allocator_api.Reservation,
        timer: LeaseTimer,
        this_node: Callable[[], str | None],
        tell_lost: Callable[[], None],
        told_revoked: threading.Event | asyncio.Event,
    ) -> None:
        self._reservation = reservation
        self._timer = timer
        self._this_node = this_node
        self._tell_lost = tell_lost
        self._told_revoked = told_revoked

    @property
    def reservation(self) -> allocator_api.Reservation:
        """The reservation as it was granted, or renewed last."""
        return self._reservation

    @property
    def name(self) -> str:
        """`reservations/{reservation}`."""
        return self._reservation.name

    @property
    def fence(self) -> int:
        """Fence of the grant: the holder with the highest fence has the GPU."""
        return self._reservation.fence

    @property
    def gpus(self) -> Sequence[allocator_api.ReservedGpu]:
        """The GPUs, in the order they were chosen."""
        return self._reservation.gpus

    @property
    def gpu_uuids(self) -> list[str]:
        """UUIDs of the GPUs, on whichever hosts they are."""
        return [gpu.uuid for gpu in self._reservation.gpus]

    @property
    def cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES on this host: UUIDs, never an index.

        Raises:
            FailedPreconditionError: GPUs are on another host (GPUS_ELSEWHERE), or which node this host is cannot be
                told (NODE_AMBIGUOUS).
            GpuscaleError: that could not be asked.
        """
        return self.env({})["CUDA_VISIBLE_DEVICES"]

    @property
    def lost_reason(self) -> str:
        """Why the GPUs are lost; empty while they are held. Goes by the clock, even if nothing could renew."""
        self._timer.is_over(now())
        return self._timer.lost

    @property
    def revoke_reason(self) -> str:
        """Why the GPUs will be taken away (`reservation.revoke_time`); empty if they will not."""
        told = self._reservation
        return told.end_reason or "revoked" if told.HasField("revoke_time") else ""

    def env(self, base: Mapping[str, str] | None = None, *, node: str | None = None) -> dict[str, str]:
        """An environment for what uses the GPUs on this host; `gpuscale.client.worker` reads what it says.

        Args:
            base: further variables; those of this process when absent.
            node: id of a node: the environment for work that is started there, with the GPUs of that node.

        Raises:
            FailedPreconditionError: without `node`: GPUs are on another host (GPUS_ELSEWHERE), or which node this host
                is cannot be told (NODE_AMBIGUOUS).
            ValueError: none of the GPUs is on `node`.
            GpuscaleError: which node this host is could not be asked.
        """
        if node is None:
            expect_here(self._reservation, self._this_node(), _ELSEWHERE)
        found = [gpu.uuid for gpu in self.gpus if node is None or node_of(gpu) == node.removeprefix("nodes/")]
        if not found:
            raise ValueError(f"{self.name} holds no GPU of {node}")
        uuids = ",".join(found)
        return {
            **(os.environ if base is None else base),
            "CUDA_VISIBLE_DEVICES": uuids,
            "GPUSCALE_GPU_UUIDS": uuids,
            "GPUSCALE_RESERVATION": self.name,
            "GPUSCALE_FENCE": str(self.fence),
        }

    def check(self) -> None:
        """Raise unless the GPUs are still held.

        Raises:
            LostReservationError: they are not.
        """
        if self.lost_reason:
            raise self._loss()

    @property
    def _due(self) -> bool:
        """Whether it is to be renewed now."""
        return not self._timer.is_over(now()) and self._timer.wait(now()) <= 0

    @contextmanager
    def _renewing(self) -> Generator[None]:
        """Around a renewal in the background: one that was refused means that the GPUs are lost."""
        try:
            yield
        except REFUSALS as error:
            self._timer.refused(error.message)
        except GpuscaleError as error:
            _log.info("%s was not renewed, retrying: %s", self.name, error.message)
            self._timer.unanswered(now())

    @contextmanager
    def _leaving(self, error: BaseException | None) -> Generator[None]:
        """Around the release at the end of a block, which ended with `error`.

        Raises:
            LostReservationError: the GPUs were lost while it ran; where there is another error, it gets a note instead.
        """
        try:
            yield
        except GpuscaleError as problem:
            if not self._timer.lost:
                _log.warning("%s was not released; its lease will run out: %s", self.name, problem.message)
        if not self._timer.lost:
            return
        self._tell_lost()
        if error is None:
            raise self._loss()
        error.add_note(f"{self.name} was lost: {self._timer.lost}")

    def _loss(self) -> LostReservationError:
        return LostReservationError(f"{self.name} is lost: {self._timer.lost}", metadata={"name": self.name})

    def _given_back(self, released: allocator_api.Reservation) -> None:
        """Take note of its end, which may have come unnoticed."""
        if released.state in _OVER:
            self._timer.had_ended(released.end_reason or "it had ended")

    def _heed(self, renewed: allocator_api.Reservation, sent: float) -> None:
        """Restart the count of the lease from when its renewal was sent."""
        self._reservation = renewed
        early = revoked_early(renewed)
        self._timer.renewed(sent, max(0.0, early or 0.0), self.revoke_reason)
        self._told_revoked.clear() if early is None else self._told_revoked.set()

    def _renewal(self) -> allocator_api.RenewReservationRequest:
        return allocator_api.RenewReservationRequest(name=self.name, fence=self.fence)

    def _release(self) -> allocator_api.ReleaseReservationRequest:
        return allocator_api.ReleaseReservationRequest(name=self.name, fence=self.fence)


def timer_of(
    request: allocator_api.ReserveRequest, granted: allocator_api.Reservation, sent: float
) -> LeaseTimer:
    """The timer of a grant that came now. One that waited in the queue may have been granted at any moment since.

    Raises:
        FailedPreconditionError: it was granted to an earlier call, and has ended (RESERVATION_ENDED).
    """
    expect_held(granted)
    waited, ttl = request.HasField("wait"), seconds(granted.ttl)
    left = optional_seconds(granted, "remaining")
    passed = 0.0 if left is None else max(0.0, ttl - left)
    return LeaseTimer(ttl, (now() if waited else sent) - passed, renew_at_once=waited)


def expect_held(granted: allocator_api.Reservation) -> None:
    """Raise if a repeated request id was answered with an old grant that has ended.

    Raises:
        FailedPreconditionError: the reservation has ended (RESERVATION_ENDED).
    """
    if granted.state in (*_OVER, _STATE.STATE_RELEASED):
        raise FailedPreconditionError(
            f"what this request id was granted, {granted.name}, has ended: its GPUs may be another's;"
            " choose a new UUID for each grant that is wanted",
            reason="RESERVATION_ENDED",
            metadata={"name": granted.name},
        )


class Lease(Held):
    """Reserved GPUs. Its block renews the lease, and releases the GPUs at the end.

    Without a block, call `renew` in time, and `release` at the end.

    Attributes:
        lost: set as soon as the GPUs are lost, before they can be another's.
        revoked: set while it is known that they will be taken away, as by a drain; `revoke_reason` says why.
    """

    def __init__(
        self,
        allocator: allocator_api.AllocatorServiceStub,
        reservation: allocator_api.Reservation,
        timer: LeaseTimer,
        this_node: Callable[[], str | None],
        admit: Callable[[], None],
    ) -> None:
        self.lost: threading.Event = threading.Event()
        self.revoked: threading.Event = threading.Event()
        super().__init__(reservation, timer, this_node, self.lost.set, self.revoked)
        self._admit = admit
        self._allocator = allocator
        self._done = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"keep {self.name}", daemon=True)

    def renew(self, timeout: float | str | None = None) -> None:
        """Renew the lease, within `timeout` (seconds, or a text such as `5s`). A block does so for you.

        Raises:
            FailedPreconditionError: it has ended (RESERVATION_ENDED).
            GpuscaleError: anything else that went wrong.
        """
        sent = now()
        self._heed(
            self._allocator.RenewReservation(
                self._renewal(), timeout=as_seconds("timeout", timeout)
            ).reservation,
            sent,
        )

    def release(self) -> None:
        """Release the GPUs now; a second call is harmless.

        Raises:
            GpuscaleError: that failed, and the lease runs out by itself.
        """
        self._done.set()
        self._timer.give_back(now())
        self._given_back(self._allocator.ReleaseReservation(self._release()).reservation)

    def __enter__(self) -> Self:
        self._admit()
        self._keeper.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._timer.give_back(now())
        self._done.set()
        self._keeper.join()
        with self._leaving(error):
            self.release()

    def _keep(self) -> None:
        """Renew until the block ends or the GPUs are lost."""
        timer = self._timer
        while not (timer.lost or self._done.wait(min(LOOK, timer.wait(now())))):
            if self._due:
                with self._renewing():
                    self.renew(timer.patience(now()))
        if timer.lost:
            self.lost.set()


class AsyncLease(Held):
    """Reserved GPUs. `AsyncReserving` renews the lease in its block.

    Attributes:
        lost: set as soon as the GPUs are lost, before they can be another's.
        revoked: set while it is known that they will be taken away, as by a drain; `revoke_reason` says why.
    """

    def __init__(
        self,
        allocator: allocator_api.AllocatorServiceAsyncStub,
        reservation: allocator_api.Reservation,
        timer: LeaseTimer,
        this_node: Callable[[], str | None],
        admit: Callable[[], Awaitable[None]],
    ) -> None:
        self.lost: asyncio.Event = asyncio.Event()
        self.revoked: asyncio.Event = asyncio.Event()
        super().__init__(reservation, timer, this_node, self.lost.set, self.revoked)
        self._admit = admit
        self._allocator = allocator

    async def renew(self, timeout: float | str | None = None) -> None:  # noqa: ASYNC109
        """Renew the lease, within `timeout` (seconds, or a text such as `5s`). A block does so for you.

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
        """Release the GPUs now; a second call is harmless.

        Raises:
            GpuscaleError: that failed, and the lease runs out by itself.
        """
        self._timer.give_back(now())
        self._given_back((await self._allocator.ReleaseReservation(self._release())).reservation)

    async def admit(self) -> None:
        """Admit this process as the holder's at this host's agent; if the lease is over, the GPUs are lost."""
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
            if self._due:
                with self._renewing():
                    await self.renew(timer.patience(now()))
        if timer.lost:
            self.lost.set()

    async def leave(self, keeper: asyncio.Task[None], error: BaseException | None) -> None:
        """End `keep`, and release the GPUs.

        Raises:
            LostReservationError: they were lost before; where there is another error, it gets a note instead.
        """
        self._timer.give_back(now())
        keeper.cancel()
        await asyncio.wait((keeper,))
        with self._leaving(error):
            await self.release()


class AsyncReserving:
    """A reservation to be made: awaited, it is a lease that you renew; as a block, it is renewed and released."""

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

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._kept is None:
            return
        lease, keeper = self._kept
        await lease.leave(keeper, error)


PATIENCE = 2.0
"""Seconds that all of it may take: somebody pressed Ctrl-C, or a time-out ran."""
LOOKS = (0.0, 0.25)
"""Seconds before each look: what is being written to disk at the first is there at the second."""
_PAGE = 1000


def abandon(allocator: allocator_api.AllocatorServiceStub, request: allocator_api.ReserveRequest) -> None:
    """Release what a request was granted, if anything."""
    with suppress(GpuscaleError):
        for pause in LOOKS:
            time.sleep(pause)
            for page in pages(
                lambda asked: allocator.ListReservations(asked, timeout=PATIENCE / 2), _listed(request)
            ):
                for release in _releases(page, request):
                    allocator.ReleaseReservation(release, timeout=PATIENCE / 2)
                    return


async def abandon_async(
    allocator: allocator_api.AllocatorServiceAsyncStub, request: allocator_api.ReserveRequest
) -> None:
    """`abandon`, for the running event loop."""
    with suppress(GpuscaleError, TimeoutError):
        async with asyncio.timeout(PATIENCE):
            for pause in LOOKS:
                await asyncio.sleep(pause)
                async for page in pages_async(allocator.ListReservations, _listed(request)):
                    for release in _releases(page, request):
                        await allocator.ReleaseReservation(release)
                        return


def _listed(request: allocator_api.ReserveRequest) -> allocator_api.ListReservationsRequest:
    return allocator_api.ListReservationsRequest(holder=request.holder, page_size=_PAGE)


def _releases(
    page: allocator_api.ListReservationsResponse, request: allocator_api.ReserveRequest
) -> list[allocator_api.ReleaseReservationRequest]:
    """The request that gives back what this one was granted; none where it is not on the page."""
    return [
        allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        for one in page.reservations
        if one.request_id == request.request_id
    ]

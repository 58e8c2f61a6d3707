"""Reserved GPUs for a block of code: the lease is renewed in the background and released at the end.

Sync code gets a `Lease`, async code an `AsyncLease`:

    with client.reserve(gpus=2, min_memory="8GiB") as lease:
        subprocess.run(["python", "train.py"], env=lease.env(), check=True)

    async with client.reserve(gpus=2, min_memory="8GiB") as lease:
        await train(lease.gpu_uuids)

When a call of `reserve` is interrupted, `abandon` releases what it was granted.
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
from gpuscale.common.errors import REFUSALS, FailedPreconditionError, GpuscaleError
from gpuscale.common.names import node_of
from gpuscale.common.wire import optional_seconds, seconds

_log = logging.getLogger(__name__)

_STATE = allocator_api.Reservation.State
_OVER = (_STATE.STATE_EXPIRED, _STATE.STATE_CANCELLED, _STATE.STATE_LOST)
"""Ends of a reservation other than its release."""
# macOS names it differently.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Seconds, including time asleep, like the clock of the allocator's leases (`gpuscale.common.runtime.tasks`)."""
    return time.clock_gettime(_CLOCK)


class LostReservationError(FailedPreconditionError):
    """The holder has lost the GPUs or is about to lose them, and must stop using them."""

    default_reason = "LEASE_LOST"


class Held:
    """GPUs held under a lease; `timer` says when to renew, and whether it is lost.

    `this_node` returns this host's node, or None. `tell_lost` is called when the GPUs are lost; `told_revoked` is set while
    they are known to be revoked soon.
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
        """The reservation as of its grant or latest renewal."""
        return self._reservation

    @property
    def name(self) -> str:
        """`reservations/{reservation}`."""
        return self._reservation.name

    @property
    def fence(self) -> int:
        """The grant's fence: of several holders, the one with the highest fence owns the GPU."""
        return self._reservation.fence

    @property
    def gpus(self) -> Sequence[allocator_api.ReservedGpu]:
        """The GPUs, in the order chosen."""
        return self._reservation.gpus

    @property
    def gpu_uuids(self) -> list[str]:
        """The UUIDs of the GPUs, on all hosts."""
        return [gpu.uuid for gpu in self._reservation.gpus]

    @property
    def cuda_visible_devices(self) -> str:
        """The value of CUDA_VISIBLE_DEVICES on this host: UUIDs, never an index.

        Raises:
            FailedPreconditionError: GPUs are on another host (GPUS_ELSEWHERE), or several nodes match this host
                (NODE_AMBIGUOUS).
            GpuscaleError: the fleet cannot be queried.
        """
        return self.env({})["CUDA_VISIBLE_DEVICES"]

    @property
    def lost_reason(self) -> str:
        """Why the GPUs are lost; empty while they are held. Depends on the clock alone, even without contact."""
        self._timer.is_over(now())
        return self._timer.lost

    @property
    def revoke_reason(self) -> str:
        """Why the GPUs will be revoked at `reservation.revoke_time`; empty if they will not."""
        told = self._reservation
        return told.end_reason or "revoked" if told.HasField("revoke_time") else ""

    def env(self, base: Mapping[str, str] | None = None, *, node: str | None = None) -> dict[str, str]:
        """Environment variables for a process that uses the GPUs on this host; `gpuscale.client.worker` reads them.

        Args:
            base: further variables; this process's own by default.
            node: id of the node where the process will run, if not this one.

        Raises:
            FailedPreconditionError: without `node`: GPUs are on another host (GPUS_ELSEWHERE), or several nodes match
                this host (NODE_AMBIGUOUS).
            ValueError: none of the GPUs is on `node`.
            GpuscaleError: the fleet cannot be queried.
        """
        if node is None:
            here = self._this_node()
            if elsewhere := sorted({node_of(gpu) for gpu in self.gpus} - {here}):
                this = f"this host is {here}" if here else "no agent of the fleet runs on this host"
                raise FailedPreconditionError(
                    f"{self.name} holds GPUs of {' and '.join(elsewhere)}, and {this}: start its work there;"
                    f' lease.env(node="{elsewhere[0]}") is the environment for it, lease.gpu_uuids has all UUIDs',
                    reason="GPUS_ELSEWHERE",
                    metadata={"name": self.name, "nodes": ",".join(elsewhere)},
                )
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
        """Raise unless the GPUs are still held. Raises LostReservationError: they are lost."""
        if self.lost_reason:
            raise self._loss()

    @property
    def _due(self) -> bool:
        return not self._timer.is_over(now()) and self._timer.wait(now()) <= 0

    @contextmanager
    def _renewing(self) -> Generator[None]:
        """Handle the errors of a background renewal: a refusal means that the GPUs are lost."""
        try:
            yield
        except REFUSALS as error:
            self._timer.refused(error.message)
        except GpuscaleError as error:
            _log.info("%s was not renewed, retrying: %s", self.name, error.message)
            self._timer.unanswered(now())

    @contextmanager
    def _leaving(self, error: BaseException | None) -> Generator[None]:
        """Handle the errors of the release at the end of a block, which ended with `error`.

        Raises LostReservationError: the GPUs were lost while it ran; another error gets a note instead.
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
        if released.state in _OVER:
            self._timer.had_ended(released.end_reason or "it had ended")

    def _heed(self, renewed: allocator_api.Reservation, sent: float) -> None:
        """Restart the lease from when its renewal was sent."""
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
    """The timer of a grant received now. After a wait in the queue, the grant may be older.

    Raises FailedPreconditionError: it is the grant of an earlier call, and has ended (RESERVATION_ENDED).
    """
    expect_held(granted)
    waited, ttl = request.HasField("wait"), seconds(granted.ttl)
    left = optional_seconds(granted, "remaining")
    passed = 0.0 if left is None else max(0.0, ttl - left)
    return LeaseTimer(ttl, (now() if waited else sent) - passed, renew_at_once=waited)


def expect_held(granted: allocator_api.Reservation) -> None:
    """Check that a repeated request id did not return an ended grant.

    Raises FailedPreconditionError: the reservation has ended (RESERVATION_ENDED).
    """
    if granted.state in (*_OVER, _STATE.STATE_RELEASED):
        raise FailedPreconditionError(
            f"this request id's grant, {granted.name}, has ended and its GPUs may be another's:"
            " use a new UUID for each new grant",
            reason="RESERVATION_ENDED",
            metadata={"name": granted.name},
        )


class Lease(Held):
    """Reserved GPUs. Its block renews the lease and releases the GPUs at the end.

    Without a block, call `renew` in time and `release` at the end.

    Attributes:
        lost: set once the GPUs are lost, before anyone else can get them.
        revoked: set while they are known to be revoked soon, as by a drain; `revoke_reason` says why.
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
        """Renew the lease, within `timeout` (seconds, or a text such as `5s`). A block does this for you.

        Raises:
            FailedPreconditionError: it has ended (RESERVATION_ENDED).
            GpuscaleError: any other error.
        """
        sent = now()
        self._heed(
            self._allocator.RenewReservation(
                self._renewal(), timeout=as_seconds("timeout", timeout)
            ).reservation,
            sent,
        )

    def release(self) -> None:
        """Release the GPUs now. Can be repeated. Raises GpuscaleError: the call failed; the lease will expire by itself."""
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
        timer = self._timer
        while not (timer.lost or self._done.wait(min(LOOK, timer.wait(now())))):
            if self._due:
                with self._renewing():
                    self.renew(timer.patience(now()))
        if timer.lost:
            self.lost.set()


class AsyncLease(Held):
    """Reserved GPUs, for async code. The block of `AsyncReserving` renews the lease.

    Attributes:
        lost: set once the GPUs are lost, before anyone else can get them.
        revoked: set while they are known to be revoked soon, as by a drain; `revoke_reason` says why.
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
        """Renew the lease, like `Lease.renew`, with the same errors."""
        sent = now()
        told = await self._allocator.RenewReservation(self._renewal(), timeout=as_seconds("timeout", timeout))
        self._heed(told.reservation, sent)

    async def release(self) -> None:
        """Release the GPUs now, like `Lease.release`, with the same errors."""
        self._timer.give_back(now())
        self._given_back((await self._allocator.ReleaseReservation(self._release())).reservation)

    async def admit(self) -> None:
        """Admit this process with this host's agent; if the lease is over, the GPUs are lost."""
        try:
            await self._admit()
        except REFUSALS as error:
            self._timer.refused(error.message)
        except asyncio.CancelledError:
            with suppress(GpuscaleError):  # the lease expires by itself
                await self.release()
            raise

    async def keep(self) -> None:
        """Renew until the GPUs are lost or the task is cancelled."""
        timer = self._timer
        while not (timer.lost or timer.given_back):
            await asyncio.sleep(min(LOOK, timer.wait(now())))
            if self._due:
                with self._renewing():
                    await self.renew(timer.patience(now()))
        if timer.lost:
            self.lost.set()

    async def leave(self, keeper: asyncio.Task[None], error: BaseException | None) -> None:
        """Stop `keep` and release the GPUs. Raises LostReservationError: they were lost before; another error gets a note instead."""
        self._timer.give_back(now())
        keeper.cancel()
        await asyncio.wait((keeper,))
        with self._leaving(error):
            await self.release()


class AsyncReserving:
    """A pending reservation. `await` returns a lease for you to renew; `async with` renews and releases it."""

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
"""Most seconds for it: it runs after Ctrl-C or a timeout."""
LOOKS = (0.0, 0.25)
"""Seconds before each attempt: a grant being written during the first is visible at the second."""
_PAGE = 1000


def abandon(allocator: allocator_api.AllocatorServiceStub, request: allocator_api.ReserveRequest) -> None:
    """Release the grant of an interrupted request, if there is one."""
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
    """`abandon` for async code."""
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
    """Requests that release the grant of this one, if the page has it."""
    return [
        allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        for one in page.reservations
        if one.request_id == request.request_id
    ]

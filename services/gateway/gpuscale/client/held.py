"""What the holder of GPUs knows and passes on, and the error that says that they are not its own any more."""

import os
import time
from collections.abc import Callable, Mapping, Sequence

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client.lease_timer import LeaseTimer
from gpuscale.client.this_host import expect_here
from gpuscale.common.errors import (
    FailedPreconditionError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from gpuscale.common.wire import optional_seconds, seconds, to_datetime

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
    """Seconds that pass while the host sleeps as well, as the allocator counts leases (`gpuscale.common.runtime.clock`)."""
    return time.clock_gettime(_CLOCK)


class LostReservationError(FailedPreconditionError):
    """The GPUs are not the holder's any more, or will not be in a moment: stop using them."""

    default_reason = "LEASE_LOST"


class Held:
    """GPUs that are held under a lease."""

    def __init__(
        self, reservation: allocator_api.Reservation, timer: LeaseTimer, this_node: Callable[[], str | None]
    ) -> None:
        """`this_node`: tells which node this host is; None where it is none."""
        self._reservation = reservation
        self._timer = timer
        self._this_node = this_node

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
        """Fence of the grant: whoever shows the higher one holds the GPU."""
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
        """Why the GPUs are lost; empty while they are held. By the clock, also where nothing could renew meanwhile."""
        self._timer.is_over(now())
        return self._timer.lost

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
        found = [gpu.uuid for gpu in self.gpus if node is None or gpu.node == node.removeprefix("nodes/")]
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
        """Go on if the GPUs are still held.

        Raises:
            LostReservationError: they are not.
        """
        if self.lost_reason:
            raise self._loss()

    def _left(self, error: BaseException | None) -> None:
        """At the end of a block: say that the GPUs were lost while it ran, if they were."""
        if not self._timer.lost:
            return
        if error is None:
            raise self._loss()
        error.add_note(f"{self.name} was lost: {self._timer.lost}")

    def _loss(self) -> LostReservationError:
        return LostReservationError(f"{self.name} is lost: {self._timer.lost}", metadata={"name": self.name})

    def _given_back(self, released: allocator_api.Reservation) -> None:
        """Heed what became of it: it may have been over for a while, unnoticed."""
        if released.state in _OVER:
            self._timer.had_ended(released.end_reason or "it had ended")

    def _heed(self, renewed: allocator_api.Reservation, sent: float) -> None:
        """Count the lease anew from when its renewal was sent."""
        self._reservation = renewed
        early = 0.0
        if renewed.HasField("revoke_time"):
            # Both times are of the server's clock, so their distance is right whatever this host's says.
            left = to_datetime(renewed.expire_time) - to_datetime(renewed.revoke_time)
            early = max(0.0, left.total_seconds())
        self._timer.renewed(sent, early)

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
    """Go on unless a repeated request id was answered with what it was granted long ago.

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

"""Keeps a reservation for a command that runs: renews it in the background, and stops the command before the lease is lost.

The lease is counted from before the call that renewed it, by this host's own clock: whatever the answer took, the server
holds the GPUs for longer than is assumed here. SIGTERM comes early enough for SIGKILL to come no later than the end of the
lease, after which the GPUs may be another's.
"""

import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuscale.cli.commands.child import PAUSE, Offspring, named
from gpuscale.cli.console.session import note
from gpuscale.cli.grammar.quantities import format_duration
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client import Client

RENEWALS = 3
"""Renewals in the time of one lease, at least."""
LONGEST_PAUSE = 10.0
"""Most seconds between two renewals: a drain, or a lost GPU, is noticed no later."""
STOP_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL; a quarter of the lease where that is less."""
SETTLE = 1.0
"""Seconds within which what a command leaves behind may end by itself, such as the `tee` that it wrote to."""
RETRY = 1.0
"""Seconds after which a renewal that had no answer is tried again."""

_LOST = (FailedPreconditionError, NotFoundError, PermissionDeniedError, UnauthenticatedError)


class Keeper:
    """Keeps the lease of a reservation while its block runs. `lost` says why it could not be kept; empty while it is.

    Args:
        offspring: the command and all that it started.
        granted_at: `time.monotonic()` from before the reservation was answered.
    """

    def __init__(
        self,
        client: "Client",
        reservation: "Reservation",
        offspring: Offspring,
        granted_at: float,
    ) -> None:
        from gpuscale.common.wire import seconds

        self.lost = ""
        self._client = client
        self._reservation = reservation
        self._offspring = offspring
        self._ttl = seconds(reservation.ttl)
        self._pause = min(LONGEST_PAUSE, self._ttl / RENEWALS)
        self._grace = min(STOP_GRACE, self._ttl / 4)
        self._ends = granted_at + seconds(reservation.remaining)
        self._told = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="keep the lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        pause = self._pause
        while not self._done.wait(max(0.0, min(pause, self._ends - self._grace - time.monotonic()))):
            pause = self._pause if self._renewed() else RETRY
            if self.lost or time.monotonic() >= self._ends - self._grace:
                self._stop()
                return

    def _renewed(self) -> bool:
        """Start the lease anew; whether there was an answer."""
        from gpuscale.api.allocator import v1 as api

        request = api.RenewReservationRequest(name=self._reservation.name, fence=self._reservation.fence)
        sent = time.monotonic()
        try:
            renewed = self._client.allocator.RenewReservation(
                request, timeout=max(RETRY, min(self._pause, self._ends - self._grace - sent))
            )
        except _LOST as error:
            self.lost = error.message
            return True
        except GpuscaleError as error:
            self._tell(f"the lease was not renewed, trying again: {error.message}")
            return False
        self._ends = sent + self._ttl
        self._heed(renewed.reservation)
        return True

    def _heed(self, renewed: "Reservation") -> None:
        """Say that the reservation will be taken away, if it will, and count with it."""
        from gpuscale.common.wire import to_datetime

        if not renewed.HasField("revoke_time"):
            return
        # The answer has both times by the server's clock, so their distance is right whatever this host's says.
        until_expiry = to_datetime(renewed.expire_time) - to_datetime(renewed.revoke_time)
        left = self._ends - time.monotonic() - until_expiry.total_seconds()
        self._ends = min(self._ends, time.monotonic() + left)
        self._tell(f"{renewed.end_reason}: the GPUs are taken away in {format_duration(left)}")

    def end(self) -> None:
        """The command has ended: stop what it left running, before its GPUs are given back."""
        settled = time.monotonic() + SETTLE
        while (left := [] if self.lost else self._offspring.alive()) and time.monotonic() < settled:
            time.sleep(PAUSE)
        if left:
            note(f"gpuscalectl run: stopping what the command left running: {named(left)}")
            self._stop_by(time.monotonic() + self._grace)

    def _tell(self, text: str) -> None:
        if text.partition(":")[0] != self._told:
            note(f"gpuscalectl run: {text}")
        self._told = text.partition(":")[0]

    def _stop(self) -> None:
        """End the command and what it started: ask, and kill what does not go."""
        self.lost = self.lost or "it could not be renewed in time, or is taken away"
        note(f"gpuscalectl run: the reservation is lost, stopping the command: {self.lost}")
        until = time.monotonic() + max(RETRY, min(self._grace, self._ends - time.monotonic()))
        self._stop_by(until)

    def _stop_by(self, until: float) -> None:
        left = self._offspring.stop(until)
        if left:
            note(f"gpuscalectl run: these could not be stopped, and may use GPUs of another: {named(left)}")

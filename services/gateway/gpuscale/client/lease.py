"""Reserved GPUs for a block of code, without an event loop: kept in the background, given back at its end.

with client.reserve(gpus=2, min_memory="8GiB") as lease:
    subprocess.run(["python", "train.py"], env=lease.env(), check=True)
"""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client.asks import as_seconds
from gpuscale.client.held import REFUSALS, Held, now
from gpuscale.client.lease_timer import LOOK, LeaseTimer
from gpuscale.common.errors import GpuscaleError

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import AllocatorServiceStub

_log = logging.getLogger(__name__)


class Lease(Held):
    """GPUs that were reserved. Inside its block the lease is kept alive; at the end the GPUs are given back.

    Without a block the lease runs out unless `renew` is called, and `release` gives the GPUs back.

    Attributes:
        lost: set as soon as the GPUs are lost, before they can be another's.
    """

    def __init__(
        self,
        allocator: "AllocatorServiceStub",
        reservation: allocator_api.Reservation,
        timer: LeaseTimer,
        this_node: Callable[[], str | None],
        admit: Callable[[], None],
    ) -> None:
        super().__init__(reservation, timer, this_node)
        self.lost = threading.Event()
        self._admit = admit
        self._allocator = allocator
        self._done = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name=f"keep {self.name}", daemon=True)

    def renew(self, timeout: float | str | None = None) -> None:
        """Start the lease anew, within `timeout` (seconds, or a text such as `5s`). In a block that is done for you.

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
        """Give the GPUs back now; once more is harmless.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.give_back(now())
        self._done.set()
        self._keeper.join()
        try:
            self.release()
        except GpuscaleError as problem:
            if not self._timer.lost:
                _log.warning("%s was not given back, its lease runs out: %s", self.name, problem.message)
        if self._timer.lost:
            self.lost.set()
        self._left(error)

    def _keep(self) -> None:
        """Renew until the block ends or the GPUs are lost."""
        timer = self._timer
        while not (timer.lost or self._done.wait(min(LOOK, timer.wait(now())))):
            if not timer.is_over(now()) and timer.wait(now()) <= 0:
                self._try_to_renew()
        if timer.lost:
            self.lost.set()

    def _try_to_renew(self) -> None:
        try:
            self.renew(self._timer.patience(now()))
        except REFUSALS as error:
            self._timer.refused(error.message)
        except GpuscaleError as error:
            _log.info("%s was not renewed, trying again: %s", self.name, error.message)
            self._timer.unanswered(now())

"""Holding: turns a pick into a reservation that holds it, PENDING until `Commits.grant` has brought it to disk."""

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Order, Reservation
from gpuscale.allocator.domain.placement import Pick
from gpuscale.common.runtime.clock import Clock


class Holding:
    """Holds what was picked."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    def __call__(self, order: Order, pick: Pick) -> Reservation:
        """Hold the GPUs of a pick that was made in this turn of the event loop.

        Raises:
            ValueError: they are not free; placement offers no such GPU.
        """
        now, wall = self._clock.now(), self._clock.wall()
        return self._ledger.grant(order, pick.gpus, now=now, wall=wall)

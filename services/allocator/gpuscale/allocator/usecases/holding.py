"""Holding: turns a pick into a reservation that holds it, PENDING until `Commits.grant` has brought it to disk."""

import secrets

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Order, Reservation
from gpuscale.allocator.domain.placement import Pick
from gpuscale.common.runtime.clock import Clock

_SUFFIX_BYTES = 2


class Holding:
    """Holds what was picked; the ids of one run of the program end alike."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        self._suffix = secrets.token_hex(_SUFFIX_BYTES)

    def __call__(self, order: Order, pick: Pick) -> Reservation:
        """Hold the GPUs of a pick that was made in this turn of the event loop.

        Raises:
            ValueError: they are not free; placement offers no such GPU.
        """
        now, wall = self._clock.now(), self._clock.wall()
        return self._ledger.grant(order, pick.gpus, suffix=self._suffix, now=now, wall=wall)

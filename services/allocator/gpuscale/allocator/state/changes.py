"""Changes: who wants to know that reservations changed, or that room may have come.

Everything that may make room is announced here and nowhere else: the end of a reservation once it is on disk, news of a
node, a cordon that is lifted.
"""

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager

from gpuscale.allocator.domain.model import Reservation


class Subscription:
    """What one watcher has not seen yet: of each reservation the newest state, however many there were."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._unseen: dict[str, Reservation] = {}
        self._some = asyncio.Event()

    def wants(self, reservation: Reservation) -> bool:
        """Whether it is one of the holder that is watched, if any is named."""
        return not self._holder or reservation.holder == self._holder

    def put(self, reservation: Reservation) -> None:
        """Note the state of a reservation, in place of an earlier one that was not seen."""
        self._unseen[reservation.id] = reservation
        self._some.set()

    async def next(self, most: int) -> list[Reservation]:
        """Wait for changes; at most so many of them, those that have waited longest first."""
        await self._some.wait()
        taken = [self._unseen.pop(key) for key in list(self._unseen)[:most]]
        if not self._unseen:
            self._some.clear()
        return taken


class Changes:
    """Tells watchers of reservations that changed, and listeners that room may have come."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription] = set()
        self._listeners: list[Callable[[Collection[str] | None], None]] = []

    @contextmanager
    def subscribe(self, holder: str = "") -> Generator[Subscription]:
        """Watch the reservations of a holder, or all."""
        subscription = Subscription(holder)
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    def on_room(self, listener: Callable[[Collection[str] | None], None]) -> None:
        """Call a listener whenever room may have come, with the nodes it may be on; it must be quick and not raise."""
        self._listeners.append(listener)

    def publish(self, reservations: Iterable[Reservation]) -> None:
        """Reservations have changed, and that is on disk."""
        if not self._subscriptions:
            return
        for reservation in reservations:
            for subscription in self._subscriptions:
                if subscription.wants(reservation):
                    subscription.put(reservation)

    def room(self, nodes: Collection[str] | None = None) -> None:
        """Something may fit now that did not: on these nodes, or anywhere; on none of them, if a quota may admit more."""
        for listener in self._listeners:
            listener(nodes)

"""Reserving for the commands that do: at once, or in the queue with news of how it stands on standard error."""

import time
from typing import TYPE_CHECKING

from gpuscale.cli.quantities import format_duration
from gpuscale.cli.session import note

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import QueuePlace, Reservation, ReserveRequest
    from gpuscale.client import Client

REPEAT = 10.0
"""Seconds after which news that have not changed are said again."""
_SLACK = 10.0
"""Seconds for which an answer may be late once the wait is over."""


def grant(client: "Client", request: "ReserveRequest") -> "Reservation":
    """The reservation; a request with a wait says on standard error how it stands.

    Raises:
        GpuscaleError: it was refused, or the wait was over first.
    """
    from gpuscale.api.allocator import v1 as api
    from gpuscale.common.errors import UnavailableError
    from gpuscale.common.wire import seconds

    if not request.HasField("wait"):
        return client.allocator.Reserve(request).reservation
    told = _Told()
    news = client.allocator.ReserveAndWatch(
        api.ReserveAndWatchRequest(reserve=request), timeout=seconds(request.wait) + _SLACK
    )
    try:
        for message in news:
            if message.HasField("reservation"):
                return message.reservation
            told.tell(message.waiting)
    finally:
        news.cancel()
    raise UnavailableError("the allocator ended the wait without an answer", reason="STREAM_ENDED")


class _Told:
    """Says how a request stands: each change once, and now and then that nothing changed."""

    def __init__(self) -> None:
        self._last = ""
        self._at = float("-inf")

    def tell(self, place: "QueuePlace") -> None:
        text = f"{_before(place.position)}: {place.message}"
        if text == self._last and time.monotonic() - self._at < REPEAT:
            return
        self._last, self._at = text, time.monotonic()
        note(f"waiting {_waited(place)}, {text}{_estimated(place)}")


def _before(position: int) -> str:
    return f"{position} before it" if position else "next to be served"


def _waited(place: "QueuePlace") -> str:
    from gpuscale.common.wire import seconds

    return format_duration(seconds(place.waited))


def _estimated(place: "QueuePlace") -> str:
    from gpuscale.common.wire import optional_seconds

    left = optional_seconds(place, "estimated_wait")
    return "" if left is None else f" (served in {format_duration(left)} if nobody renews)"

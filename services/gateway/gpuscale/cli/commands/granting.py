"""Reserving for the commands that do: at once, or in the queue with news of how it stands on standard error."""

from typing import TYPE_CHECKING

from gpuscale.cli.console.progress import Progress
from gpuscale.cli.grammar.quantities import format_duration

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import QueuePlace, ReserveRequest, ReserveResponse
    from gpuscale.client import Client

_SLACK = 10.0
"""Seconds for which an answer may be late once the wait is over."""


def grant(client: "Client", request: "ReserveRequest") -> "ReserveResponse":
    """The reservation and its lease token; a request with a wait says on standard error how it stands.

    Raises:
        GpuscaleError: it was refused, the wait was over first, or what the request id was granted has ended.
    """
    from gpuscale.api.allocator import v1 as api
    from gpuscale.common.errors import UnavailableError
    from gpuscale.common.wire import seconds

    if not request.HasField("wait"):
        return _held(client.allocator.Reserve(request))
    progress = Progress()
    news = client.allocator.ReserveAndWatch(
        api.ReserveAndWatchRequest(reserve=request), timeout=seconds(request.wait) + _SLACK
    )
    try:
        for message in news:
            if message.HasField("reservation"):
                return _held(
                    api.ReserveResponse(reservation=message.reservation, lease_token=message.lease_token)
                )
            place = message.waiting
            reason = f"{_before(place.position)}: {place.message}"
            progress.tell(reason, _estimated(place), seconds(place.waited))
    finally:
        progress.end()
        news.cancel()
    raise UnavailableError("the allocator ended the wait without an answer", reason="STREAM_ENDED")


def _held(granted: "ReserveResponse") -> "ReserveResponse":
    from gpuscale.client.lease import expect_held

    expect_held(granted.reservation)
    return granted


def _before(position: int) -> str:
    return f"{position} before it" if position else "next to be served"


def _estimated(place: "QueuePlace") -> str:
    from gpuscale.common.wire import optional_seconds

    left = optional_seconds(place, "estimated_wait")
    return "" if left is None else f" (served in {format_duration(left)} if nobody renews)"

"""Pages of List methods, and Watch streams that reconnect.

Every Watch stream begins with the full state, whose last message is marked `full`. At each `full`, drop what that round did not name.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.tasks import Backoff, pause_before_retry


class PagedRequest(Protocol):
    """A request of any List method."""

    page_token: str


class Page(Protocol):
    """A response of any List method."""

    next_page_token: str


Request = TypeVar("Request", bound=PagedRequest)
Response = TypeVar("Response", bound=Page)


def pages(method: Callable[[Request], Response], request: Request) -> Iterator[Response]:
    """Every page of a List method; modifies `request`.

    for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
        for node in page.nodes:
            print(node.name)
    """
    while True:
        page = method(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def pages_async(
    method: Callable[[Request], Awaitable[Response]], request: Request
) -> AsyncIterator[Response]:
    """`pages` for an async client, with the same errors."""
    while True:
        page = await method(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


WatchRequest = TypeVar("WatchRequest")
Message = TypeVar("Message")
Message_co = TypeVar("Message_co", covariant=True)

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 10.0


class Stream(Protocol[Message_co]):
    """What a Watch method of a sync stub returns."""

    def __iter__(self) -> Iterator[Message_co]: ...

    def cancel(self) -> object:
        """End the stream."""


class AsyncStream(Protocol[Message_co]):
    """What a Watch method of an async stub returns."""

    def __aiter__(self) -> AsyncIterator[Message_co]: ...

    def cancel(self) -> object:
        """End the stream."""


def watch(
    method: Callable[[WatchRequest], Stream[Message]], request: WatchRequest, *, resume: bool = False
) -> Iterator[Message]:
    """Every message of a Watch method; reconnects when the server restarts, which sends the full state again.

    With `resume`, a lost stream continues where it stopped if the server supports that; only a round that begins with a message
    with `reset` is a full state. `request` keeps the token.

        for update in watch(client.fleet.WatchNodes, monitor_api.WatchNodesRequest()):
            for node in update.nodes:
                print(node.name)

    Raises GpuscaleError: the stream failed with an error other than a lost connection.
    """
    waits = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
    while True:
        stream = method(request)
        try:
            for message in stream:
                waits.reset()
                if resume:
                    _note(request, message)
                yield message
        except UnavailableError:
            pass
        finally:
            stream.cancel()
        time.sleep(waits.next())


def _note(request: Any, message: Any) -> None:
    """Keep the token to resume a stream by; servers of the previous release send none."""
    if token := getattr(message, "resume_token", ""):
        request.resume_token = token


async def watch_async(
    method: Callable[[WatchRequest], AsyncStream[Message]], request: WatchRequest, *, resume: bool = False
) -> AsyncIterator[Message]:
    """`watch` for an async client, with the same errors."""
    waits = Backoff(_FIRST_WAIT, _LONGEST_WAIT)
    while True:
        stream = method(request)
        try:
            async for message in stream:
                waits.reset()
                if resume:
                    _note(request, message)
                yield message
        except UnavailableError:
            pass
        finally:
            stream.cancel()
        await pause_before_retry(waits.next())


class Mirror:
    """The state of a Watch stream by resource name. Pass every message to `take`.

    Attributes:
        items: the live resources, after the first round.
        complete: whether the first round is over.
    """

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.complete: bool = False
        self._round: dict[str, Any] | None = {}

    def take(self, update: Any) -> bool:
        """Apply a message; returns whether `items` changed."""
        field = update.DESCRIPTOR.fields[0].name  # the repeated field with the resources
        told, end = getattr(update, field), _END.get(field)
        if update.reset:
            self._round = {}
        known = self.items if self._round is None else self._round
        for one in told:
            known[one.name] = one
        over = [one.name for one in told if end and one.HasField(end)]
        for name in (*over, *update.removed):
            known.pop(name, None)
        if self._round is None:
            return bool(told or update.removed)
        if update.full:
            self.items, self._round = self._round, None
            self.complete = True
        return bool(update.full)


_END = {"reservations": "end_time", "replicas": "end_time", "health_events": "resolved_time"}
"""The field that marks a resource as ended in its last message."""

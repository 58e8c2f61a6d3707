"""Lists of any length, page by page, and Watch streams, which are reopened when their server comes back.

Every Watch method begins with all there is, the last message of that round marked `full`, so that nothing is missed: a
reader that drops, at each `full`, what that round did not name is never wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, Protocol, TypeVar

from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime.tasks import Backoff


class PagedRequest(Protocol):
    """A request of any List method."""

    page_token: str


class Page(Protocol):
    """A response of any List method."""

    next_page_token: str


Request = TypeVar("Request", bound=PagedRequest)
Response = TypeVar("Response", bound=Page)


def pages(method: Callable[[Request], Response], request: Request) -> Iterator[Response]:
    """Every page of a List method; `request` is used up.

        for page in pages(client.fleet.ListNodes, monitor_api.ListNodesRequest()):
            for node in page.nodes:
                print(node.name)

    Raises:
        GpuscaleError: a page could not be had.
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
    """`pages` for an async client.

    Raises:
        GpuscaleError: a page could not be had.
    """
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
        """End it."""


class AsyncStream(Protocol[Message_co]):
    """What a Watch method of an async stub returns."""

    def __aiter__(self) -> AsyncIterator[Message_co]: ...

    def cancel(self) -> object:
        """End it."""


def watch(
    method: Callable[[WatchRequest], Stream[Message]], request: WatchRequest, *, resume: bool = False
) -> Iterator[Message]:
    """Every message of a Watch method, over restarts of its server; the round with all there is comes again then.

    With `resume` a lost stream goes on where it was left off, if the server can: `request` keeps the token, and only a round
    that begins with a message with `reset` names all there is.

        for update in watch(client.fleet.WatchNodes, monitor_api.WatchNodesRequest()):
            for node in update.nodes:
                print(node.name)

    Raises:
        GpuscaleError: the stream failed for another reason than that nothing answers.
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
    """Keep the token of where a stream was left off; a server of the release before gives none."""
    if token := getattr(message, "resume_token", ""):
        request.resume_token = token


async def watch_async(
    method: Callable[[WatchRequest], AsyncStream[Message]], request: WatchRequest, *, resume: bool = False
) -> AsyncIterator[Message]:
    """`watch` for an async client.

    Raises:
        GpuscaleError: the stream failed for another reason than that nothing answers.
    """
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
        await asyncio.sleep(waits.next())


class Mirror:
    """The state that a Watch method streams, by name: pass every message of its stream to `take`.

    Attributes:
        items: what there is, once a first round is over; what has ended is left out.
        complete: whether it is.
    """

    def __init__(self) -> None:
        self.items: dict[str, Any] = {}
        self.complete: bool = False
        self._round: dict[str, Any] | None = {}

    def take(self, update: Any) -> bool:
        """Take note of a message; whether `items` are others now."""
        field = update.DESCRIPTOR.fields[0].name  # of every Watch: the list of resources
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
"""Where it stands that one is over, of what a watch tells once more then."""

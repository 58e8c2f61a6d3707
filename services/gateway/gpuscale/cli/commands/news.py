"""News for `get --watch`: a stream of the API that says that something changed, so that it need not be asked for.

What is written is read with List as ever; the stream is only the bell. Where there is none, or it cannot be had, there are
no news.
"""

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.console.session import Session
from gpuscale.client import Client, GpuscaleError, watch
from gpuscale.common.wire import to_duration

LEAST = 0.2
"""Seconds between two readings, at least: changes that come together are read together."""
_NODES = monitor_api.WatchNodesRequest(min_interval=to_duration(0.5))
# Each stub has another type of request and of message; here only that a message comes counts.
_STREAMS: Mapping[str, Callable[[Client], tuple[Any, Any]]] = {
    "nodes": lambda client: (client.fleet.WatchNodes, _NODES),
    "gpus": lambda client: (client.fleet.WatchNodes, _NODES),
    "health": lambda client: (client.health.WatchHealth, monitor_api.WatchHealthRequest()),
    "reservations": lambda client: (
        client.allocator.WatchReservations,
        allocator_api.WatchReservationsRequest(),
    ),
}


class News:
    """Rings when a stream has a message."""

    def __init__(self) -> None:
        self._rang = threading.Event()

    def wait(self, seconds: float) -> None:
        """Return when there are news, or after so many seconds."""
        time.sleep(LEAST)
        self._rang.wait(max(0.0, seconds - LEAST))
        self._rang.clear()

    def follow(self, method: Any, request: Any) -> None:
        """Ring at each message, until the client is closed."""
        try:
            for _ in watch(method, request):
                self._rang.set()
        except GpuscaleError:
            return  # what is wrong, the next reading says


@contextmanager
def news_of(kind: str, session: Session) -> Generator[News | None]:
    """News of what a `get` shows; None where the API has no stream of it, or the stream does not begin."""
    if kind not in _STREAMS:
        yield None
        return
    with session.connect() as client:
        method, request = _STREAMS[kind](client)
        try:
            stream = method(request)
            next(iter(stream), None)
            stream.cancel()
        except GpuscaleError:
            yield None
            return
        news = News()
        threading.Thread(target=news.follow, args=(method, request), name="news", daemon=True).start()
        yield news

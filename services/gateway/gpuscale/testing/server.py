"""The fake server: fleet, allocator and autoscaler on a free port, in a thread, with nothing left behind."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Self, TypeVar

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.client import AsyncClient, Client, connect, connect_async
from gpuscale.common.errors import GpuscaleError, NotFoundError
from gpuscale.common.names import ENDPOINT, RESERVATION, parse
from gpuscale.common.sizes import parse_size
from gpuscale.testing.doubles import FakeHost, FakeWorkers

if TYPE_CHECKING:
    from gpuscale.testing.site import Site

T = TypeVar("T")

ANSWER = 30.0
"""Seconds that anything a test does to the server may take."""


class FakeServer:
    """Serves on a free port of 127.0.0.1 while its block runs.

    It is the real fleet, allocator and autoscaler; what they know is gone with the block. Hosts are simulated: idle GPUs whose
    readings stay fresh, and workers of any template, which are ready at once. Leases last 4 s where nothing is said, so that
    holders soon learn what a test does to them.

    Args:
        gpus: GPUs of each node.
        nodes: how many nodes, one at least: `node-0`, which is this host, `node-1` and so on.
        memory: memory of each GPU, such as `80GiB`.
        model: product name of each GPU.

    Attributes:
        address: where it listens; empty before its block.
    """

    def __init__(self, gpus: int = 4, nodes: int = 1, memory: str = "80GiB", model: str = "Fake GPU") -> None:
        self.address: str = ""
        self._hosts = [FakeHost(number, gpus, parse_size(memory), model) for number in range(nodes)]
        self._workers = FakeWorkers(self._hosts[0].node)
        self._faults: defaultdict[str, deque[GpuscaleError]] = defaultdict(deque)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fake server")
        self._started: Future[tuple[asyncio.AbstractEventLoop, Site, asyncio.Event]] = Future()
        self._ended: Future[None] = Future()
        self._last: list[allocator_api.Reservation] = []

    def connect(self) -> Client:
        """A sync client of it."""
        return connect(self.address)

    def connect_async(self) -> AsyncClient:
        """An async client of it."""
        return connect_async(self.address)

    @property
    def reservations(self) -> list[allocator_api.Reservation]:
        """Every reservation there was, oldest first; after the block as they were at its end."""
        return self._last if self._ended.done() else self._do(self._site.reservations())

    def expire(self, name: str) -> None:
        """A lease runs out now, as if nobody had renewed it.

        Raises:
            NotFoundError: there is no such reservation.
        """
        self._do(self._site.expire(_reservation(name)))

    def cancel(self, name: str, reason: str = "taken away by an admin") -> None:
        """A reservation is taken away. Raises NotFoundError: there is no such reservation."""
        self._do(self._site.cancel(_reservation(name), reason))

    def lose(self, name: str) -> None:
        """The first GPU of a reservation vanishes from its node, and the reservation with it.

        Raises:
            NotFoundError: there is no such reservation.
        """
        self._do(self._site.lose(_reservation(name)))

    def fail(self, method: str, error: GpuscaleError, times: int = 1) -> None:
        """The next calls of a method, such as `Reserve`, are answered with an error."""
        self._faults[method].extend([error] * times)

    def hold_back_replicas(self) -> None:
        """From now on replicas that start are not ready until `set_ready` says so."""
        self._workers.ready_by_default = 0

    def set_ready(self, endpoint: str, replicas: int) -> None:
        """So many replicas of an endpoint become READY, as far as it has so many.

        Raises:
            NotFoundError: there is no such endpoint.
        """
        parse(ENDPOINT, endpoint, "endpoint")
        self._do(self._site.set_ready(endpoint, replicas))

    def __enter__(self) -> Self:
        async def serve() -> None:
            from gpuscale.testing.site import (
                open_site,  # heavy, and its cost is the server's, not the import's
            )

            stop = asyncio.Event()
            async with open_site(self._hosts, self._workers, self._faults) as site:
                self._started.set_result((asyncio.get_running_loop(), site, stop))
                await stop.wait()

        self._ended = self._thread.submit(asyncio.run, serve())
        either: tuple[Future[Any], Future[Any]] = (self._started, self._ended)
        wait(either, return_when=FIRST_COMPLETED)
        if self._ended.done():
            self._ended.result()
        self.address = self._site.address
        return self

    def __exit__(self, *_: object) -> None:
        self._last = self.reservations
        loop, _site, stop = self._started.result()
        loop.call_soon_threadsafe(stop.set)
        self._thread.shutdown()
        self._ended.result()

    @property
    def _site(self) -> "Site":
        return self._started.result(ANSWER)[1]

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Have the server's own loop do it."""
        return asyncio.run_coroutine_threadsafe(work, self._started.result()[0]).result(ANSWER)


def _reservation(name: str) -> str:
    """The id of a reservation."""
    try:
        return parse(RESERVATION, name)["reservation"]
    except GpuscaleError as error:
        raise NotFoundError(f"there is no {name}") from error

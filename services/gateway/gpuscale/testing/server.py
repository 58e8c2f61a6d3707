"""The fake server: fleet, allocator and autoscaler on a free port, in a thread, with all state in memory."""

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
"""Most seconds for anything a test does to the server."""


class FakeServer:
    """A server on a free port of 127.0.0.1, for the duration of its block.

    It runs the real fleet, allocator and autoscaler; their state ends with the block. Hosts are simulated: GPUs are idle with fresh
    readings, and workers of any template are ready at once. Leases last 4 s by default, so that holders soon notice what a test
    does to them.

    Args:
        gpus: GPUs of each node.
        nodes: number of nodes, at least one: `node-0`, which is this host, `node-1` and so on.
        memory: memory of each GPU, such as `80GiB`.
        model: product name of each GPU.

    Attributes:
        address: where it listens; empty before the block.
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
        """A sync client of this server."""
        return connect(self.address)

    def connect_async(self) -> AsyncClient:
        """An async client of this server."""
        return connect_async(self.address)

    @property
    def reservations(self) -> list[allocator_api.Reservation]:
        """Every reservation so far, oldest first; after the block, as of its end."""
        return self._last if self._ended.done() else self._do(self._site.reservations())

    def expire(self, name: str) -> None:
        """Expire a lease now, as if it had not been renewed. Raises NotFoundError: there is no such reservation."""
        self._do(self._site.expire(_reservation(name)))

    def cancel(self, name: str, reason: str = "taken away by an admin") -> None:
        """Cancel a reservation. Raises NotFoundError: no such reservation."""
        self._do(self._site.cancel(_reservation(name), reason))

    def lose(self, name: str) -> None:
        """Remove the first GPU of a reservation from its node, which ends the reservation.

        Raises NotFoundError: there is no such reservation.
        """
        self._do(self._site.lose(_reservation(name)))

    def fail(self, method: str, error: GpuscaleError, times: int = 1) -> None:
        """Answer the next calls of a method, such as `Reserve`, with an error."""
        self._faults[method].extend([error] * times)

    def hold_back_replicas(self) -> None:
        """Keep new replicas from becoming ready until `set_ready`."""
        self._workers.ready_by_default = 0

    def set_ready(self, endpoint: str, replicas: int) -> None:
        """Make up to so many replicas of an endpoint READY. Raises NotFoundError: no such endpoint."""
        parse(ENDPOINT, endpoint, "endpoint")
        self._do(self._site.set_ready(endpoint, replicas))

    def __enter__(self) -> Self:
        async def serve() -> None:
            from gpuscale.testing.site import open_site  # heavy: loaded on start, not on import

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
        return asyncio.run_coroutine_threadsafe(work, self._started.result()[0]).result(ANSWER)


def _reservation(name: str) -> str:
    try:
        return parse(RESERVATION, name)["reservation"]
    except GpuscaleError as error:
        raise NotFoundError(f"there is no {name}") from error

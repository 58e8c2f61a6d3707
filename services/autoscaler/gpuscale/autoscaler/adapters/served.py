"""Reads /metrics of replicas' servers, on their own host, so that they can listen on loopback only.

Each read is limited in time and size; redirects and proxies are not followed. Missing values are named with the reason, and
never zero.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import NoReturn

from gpuscale.autoscaler.adapters.engine import ReplicaOrder
from gpuscale.autoscaler.adapters.templates import parse_argument, placeholders
from gpuscale.autoscaler.domain.serving import NoServerError, ServerReading, read_server
from gpuscale.common.runtime.tasks import Clock

PERIOD = 5.0
"""Seconds between two readings of a replica."""
TIMEOUT = 2.0
"""Seconds to wait for one."""
MAX_PAGE_BYTES = 2 * 1024 * 1024
AT_ONCE = 8
"""Replicas that are read at a time."""
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Loads no certificates: pages are http:// only."""
FREE_PORT = "free_port"
"""A placeholder for a free port of the host, one per replica."""


def with_free_port(order: ReplicaOrder, arguments: Iterable[str]) -> ReplicaOrder:
    """The order, with a currently free port if arguments ask for one and the order has none."""
    if FREE_PORT not in placeholders(map(parse_argument, arguments)) or FREE_PORT in order.parameters:
        return order
    with socket.socket() as listener:
        listener.bind(("", 0))
        port = listener.getsockname()[1]
    return replace(order, parameters={**order.parameters, FREE_PORT: str(port)})


@dataclass(frozen=True, slots=True)
class ServedPage:
    """The result of reading a replica at a time, in seconds since boot: a reading, or why there is none."""

    at: float
    reading: ServerReading | None = None
    problem: str = ""


class ServedPages:
    """Reads replicas repeatedly, at the URLs that `urls` returns by name; `changed` is called after each round."""

    def __init__(
        self, urls: Callable[[], Mapping[str, str]], clock: Clock, changed: Callable[[], None]
    ) -> None:
        self._urls = urls
        self._clock = clock
        self._changed = changed
        self._pages: dict[str, ServedPage] = {}

    def taken(self) -> list[tuple[str, float, ServedPage]]:
        """The results since the last call, by name, and their ages in seconds."""
        pages, self._pages = self._pages, {}
        now = self._clock.now()
        return [(name, now - page.at, page) for name, page in pages.items()]

    async def run(self) -> NoReturn:
        """Read for ever."""
        some = asyncio.Semaphore(AT_ONCE)
        while True:
            began = self._clock.now()
            if urls := self._urls():
                async with asyncio.TaskGroup() as group:
                    for replica, url in urls.items():
                        group.create_task(self._ask(some, replica, url))
                self._changed()
            await asyncio.sleep(max(1.0, began + PERIOD - self._clock.now()))

    async def _ask(self, some: asyncio.Semaphore, replica: str, url: str) -> None:
        async with some:
            at = self._clock.now()
            try:
                async with asyncio.timeout(TIMEOUT):
                    page = ServedPage(at, read_server(await _page(url)))
            except TimeoutError:
                page = ServedPage(at, problem=f"does not answer within {TIMEOUT:g} s")
            except NoServerError as error:
                page = ServedPage(at, problem=str(error))
            self._pages[replica] = page


async def _page(url: str) -> str:
    """The text of a page. Raises NoServerError if there is none, or it is unusable."""
    import httpx  # 100 ms and 10 MB that most adapters do not need (docs/adr/0034)

    body = bytearray()
    try:
        # Not compressed: a few bytes could expand to gigabytes before anybody could count them.
        async with (
            httpx.AsyncClient(
                verify=_NO_TLS, timeout=2 * TIMEOUT, follow_redirects=False, trust_env=False
            ) as client,
            client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
        ):
            if response.status_code != HTTPStatus.OK:
                raise NoServerError(f"answers with HTTP status {response.status_code}")
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_PAGE_BYTES:
                    raise NoServerError(f"returns more than {MAX_PAGE_BYTES} bytes")
        return body.decode()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoServerError(f"cannot be reached: {type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise NoServerError("returns something that is not text") from error

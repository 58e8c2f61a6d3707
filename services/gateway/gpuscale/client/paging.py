"""Lists of any length: pages are asked for as they are needed."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol, TypeVar


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

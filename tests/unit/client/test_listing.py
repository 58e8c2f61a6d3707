"""Lists of any length, page by page, and no page more than is read."""

import itertools

import pytest

from gpuscale.api.monitor.v1 import ListNodesRequest, ListNodesResponse, Node
from gpuscale.client import pages, pages_async

PAGES = {"": ("a", "b"), "2": ("c",), "3": ()}
NEXT = {"": "2", "2": "3", "3": ""}


class Lister:
    """Three pages, the last one empty."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, request: ListNodesRequest) -> ListNodesResponse:
        self.calls.append(request.page_token)
        token = request.page_token
        return ListNodesResponse(
            nodes=[Node(name=name) for name in PAGES[token]], next_page_token=NEXT[token]
        )


def test_all_pages_are_read_in_order() -> None:
    lister = Lister()
    found = [node.name for page in pages(lister, ListNodesRequest()) for node in page.nodes]
    assert found == ["a", "b", "c"]
    assert lister.calls == ["", "2", "3"]


def test_pages_are_asked_for_as_they_are_needed() -> None:
    lister = Lister()
    list(itertools.islice(pages(lister, ListNodesRequest()), 1))
    assert lister.calls == [""]


async def test_the_async_one_does_the_same() -> None:
    lister = Lister()

    async def method(request: ListNodesRequest) -> ListNodesResponse:
        return lister(request)

    found = [node.name async for page in pages_async(method, ListNodesRequest()) for node in page.nodes]
    assert found == ["a", "b", "c"]


@pytest.mark.parametrize("page_size", [0, 7])
def test_the_size_of_a_page_is_the_callers(page_size: int) -> None:
    seen: list[int] = []

    def method(request: ListNodesRequest) -> ListNodesResponse:
        seen.append(request.page_size)
        return ListNodesResponse()

    assert len(list(pages(method, ListNodesRequest(page_size=page_size)))) == 1
    assert seen == [page_size]

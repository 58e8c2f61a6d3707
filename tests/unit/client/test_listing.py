"""Lists of any length, page by page, and no page more than is read; watches that go on where they were left off."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.api.monitor.v1 import ListNodesRequest, ListNodesResponse, Node
from gpuscale.client import Mirror, UnavailableError, listing, pages, pages_async, watch

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


@pytest.mark.parametrize(("resume", "tokens"), [(True, ["", "a", "a"]), (False, ["", "", ""])])
def test_a_lost_watch_goes_on_where_it_was_left_off(
    monkeypatch: pytest.MonkeyPatch, resume: bool, tokens: list[str]
) -> None:
    monkeypatch.setattr(listing, "_FIRST_WAIT", 0.001)
    asked: list[str] = []

    def lost(token: str) -> Iterator[api.WatchNodesResponse]:
        yield api.WatchNodesResponse(resume_token=token)
        raise UnavailableError("away")

    def method(request: api.WatchNodesRequest) -> Any:
        asked.append(request.resume_token)
        stream = MagicMock()
        stream.__iter__.return_value = lost("" if len(asked) > 1 else "a")  # an older server has none
        return stream

    list(itertools.islice(watch(method, api.WatchNodesRequest(), resume=resume), 3))
    assert asked == tokens


def test_a_mirror_has_what_there_is_and_is_no_other_by_a_heartbeat() -> None:
    mirror = Mirror()
    a, b, over = (api.HealthEvent(name=name) for name in ("a", "b", "b"))
    over.resolved_time.GetCurrentTime()
    steps: list[tuple[dict[str, Any], bool, list[str]]] = [
        ({"health_events": [a]}, False, []),  # of a round that goes on
        ({"health_events": [b], "full": True}, True, ["a", "b"]),
        ({"resume_token": "1"}, False, ["a", "b"]),
        ({"health_events": [over]}, True, ["a"]),
        ({"removed": ["a"], "full": True}, True, []),  # resumed
        ({"health_events": [b], "reset": True}, False, []),
        ({"full": True}, True, ["b"]),
    ]
    for told, changed, known in steps:
        assert mirror.take(api.WatchHealthResponse(**told)) is changed
        assert [*mirror.items] == known, told

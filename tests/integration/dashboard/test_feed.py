"""What the dashboard asks of the services: streams while somebody looks, and a question to each now and then."""

import asyncio
from collections import Counter
from collections.abc import Generator
from typing import Any
from unittest.mock import Mock

import pytest

from gpuscale.client import UnauthenticatedError
from gpuscale.common.errors import CancelledCallError, DeadlineExceededError
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.dashboard import feed as feeding
from gpuscale.dashboard.facts import Facts
from gpuscale.dashboard.feed import Feed
from gpuscale.testing import FakeServer
from tests.support.waiting import eventually

KINDS = "Nodes Reservations Health Bookings Cordons Endpoints Replicas Recordings"
SHOWN = {f"Watch{kind}" for kind in KINDS.split()} | {"ListNodes", "ListReservations", "ListEndpoints"}
QUIET = 1.0
"""Seconds in which a feed that asks would ask."""


class Counting:
    """A client, or one of its services, that counts the calls by method."""

    def __init__(self, of: Any, calls: Counter[str]) -> None:
        self._of, self._calls = of, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name.islower():
            return Counting(found, self._calls)

        def call(request: Any, **more: Any) -> Any:
            self._calls[name] += 1
            return found(request, **more)

        return call


async def test_it_streams_and_asks_while_somebody_looks_and_nothing_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a feed calls before somebody looks, meanwhile and after."""
    calls, facts = Counter[str](), Facts()

    async def only(methods: set[str]) -> None:
        """Each of these is called once, and then nothing."""
        await eventually(lambda: calls.keys() >= methods)
        await asyncio.sleep(QUIET)
        assert calls == dict.fromkeys(methods, 1)
        calls.clear()

    monkeypatch.setattr(feeding, "LINGER", 60.0)
    monkeypatch.setattr(feeding, "ASK", 60.0)
    with FakeServer(gpus=2) as server:
        async with server.connect_async() as client:
            counting: Any = Counting(client, calls)
            feed = Feed(counting, facts)
            assert {why for _, why in feed.errors} == {
                "UNAVAILABLE",
                "UPSTREAM_UNAVAILABLE",
                "DEADLINE_EXCEEDED",
            }
            async with feed.running():
                await only(set())
                feed.look()
                await eventually(lambda: len(facts.gpus()) == 2)
                await only(SHOWN)
                monkeypatch.setattr(feeding, "LINGER", 0.0)
                feed.look()
                await only(set())
                assert facts.problems == dict.fromkeys(feeding.SOURCES, "connecting"), "they are old"
                monkeypatch.setattr(feeding, "LINGER", 60.0)
                feed.look()
                await eventually(lambda: not facts.problems)


async def test_what_an_operator_has_to_do_is_told_where_the_dashboard_has_no_token() -> None:
    """Visitors read only that a token is required once, who had just shown theirs."""
    facts, refused = Facts(), UnauthenticatedError("a bearer token is required", reason="TOKEN_MISSING")
    with FakeServer() as server:
        server.fail("WatchNodes", refused, times=1000)
        async with server.connect_async() as client, (feed := Feed(client, facts)).running():
            feed.look()
            await eventually(lambda: "nodes" in facts.problems)
    assert "--token-file" in facts.problems["nodes"]


async def test_a_service_that_hangs_or_cannot_write_is_told_while_its_streams_stay_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page said `live` until gRPC's keepalive found a frozen gateway, for up to 30 s."""
    hangs, trouble = DeadlineExceededError("no answer in 4 s"), "the fleet cannot write its state"
    refused, closed = UnauthenticatedError("no"), CancelledCallError("the client was closed")
    answers = iter(
        [closed, hangs, hangs, *[worse := ((PROBLEM_KEY, trouble),)] * 2, hangs, (), worse, refused]
    )
    facts, seen = Facts(), list[tuple[dict[str, str], list[str]]]()

    class Call:
        def __init__(self) -> None:
            self.answer = next(answers, ())
            if self.answer is closed:
                raise closed

        def __await__(self) -> Generator[None]:
            seen.append((dict(facts.problems), facts.wrong))
            yield
            if isinstance(self.answer, Exception):
                raise self.answer

        async def trailing_metadata(self) -> Any:
            return self.answer

    monkeypatch.setattr(feeding, "ASK", 0.0)
    client: Any = Mock(fleet=Mock(ListNodes=lambda *_, **__: Call()))
    feed = Feed(client, facts)
    asking = asyncio.create_task(feed._ask("fleet"))
    await eventually(lambda: len(seen) > 9)
    asking.cancel()
    lost = {"fleet": hangs.message}, ["fleet: no answer in 4 s"]
    assert seen[:4] == [({}, []), lost, lost, ({}, [trouble])]
    assert seen[5][1] == ["fleet: no answer in 4 s", trouble]
    assert seen[6:9] == [({}, []), ({}, [trouble]), ({}, [])], "what was said before it was refused is old"
    assert feed.errors["fleet", "DEADLINE_EXCEEDED"] == 3, "GpuscaleDashboardFails tells of it"

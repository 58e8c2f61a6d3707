"""What the dashboard asks of the services: streams while somebody looks, and no call beside them."""

import asyncio
from collections import Counter
from typing import Any

import pytest

from gpuscale.client import AsyncClient
from gpuscale.dashboard import feed as feeding
from gpuscale.dashboard.facts import Facts, FleetTally
from gpuscale.dashboard.feed import Feed
from gpuscale.testing import FakeServer
from tests.support.waiting import eventually

COUNTED = {"WatchNodes", "WatchReservations"}
SHOWN = COUNTED | {
    "WatchHealth",
    "WatchBookings",
    "WatchCordons",
    "WatchEndpoints",
    "WatchReplicas",
    "WatchRecordings",
}
QUIET = 2.5
"""Seconds in which a feed that asks would ask."""


class Counting:
    """A client, or one of its services, that counts the calls by method."""

    def __init__(self, of: Any, calls: Counter[str]) -> None:
        self._of, self._calls = of, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        if name.islower():
            return Counting(found, self._calls)

        def call(request: Any) -> Any:
            self._calls[name] += 1
            return found(request)

        return call


async def streams(client: AsyncClient, tally: FleetTally | None, unseen: set[str]) -> None:
    """Look at a feed for a while: what it calls before, meanwhile and after; `unseen` is what it does for its tally."""
    calls, facts = Counter[str](), Facts()
    counting: Any = Counting(client, calls)
    feed = Feed(counting, facts, tally)
    async with feed.running():
        await asyncio.sleep(QUIET)
        assert calls == dict.fromkeys(unseen, 1), "nobody looks"
        calls.clear()
        feed.look()
        await eventually(lambda: len(facts.gpus()) == 2, timeout=30)
        await asyncio.sleep(QUIET)
        assert calls == dict.fromkeys(SHOWN, 1), "somebody looks at a fleet that does not change"
        calls.clear()
        await asyncio.sleep(2 * QUIET)
        assert calls == dict.fromkeys(unseen, 1), "nobody looks any more"


async def test_it_streams_while_somebody_looks_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeding, "LINGER", 2 * QUIET)
    with FakeServer(gpus=2) as server:
        async with server.connect_async() as client:
            await asyncio.gather(streams(client, FleetTally(), COUNTED), streams(client, None, set()))

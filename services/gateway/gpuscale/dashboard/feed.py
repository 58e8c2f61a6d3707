"""Fills the facts: watches what can be watched, asks each second for the rest. Without an answer it goes on trying."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from google.protobuf.message import Message

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import AsyncClient, GpuscaleError, pages_async
from gpuscale.common.runtime.tasks import Backoff, TaskScope
from gpuscale.common.wire import to_duration
from gpuscale.dashboard.facts import PERIOD, Facts, FleetTally, count

INTERVAL = 1.0
"""Least seconds between two updates of the nodes: agents read once a second, but not all at the same moment."""
ASK_INTERVAL = 1.0
"""Seconds between two questions for what is not watched."""
SOURCES = ("nodes", "health events", "reservations", "cordons", "endpoints", "recordings")
_PAGE = 1000


class Feed:
    """The tasks that keep `facts` up to date.

    Args:
        client: of the gateway.
        facts: what is written.
        tally: what is counted from them, where somebody wants that.

    Attributes:
        errors: calls that failed, by source and reason.
    """

    def __init__(self, client: AsyncClient, facts: Facts, tally: FleetTally | None = None) -> None:
        self.errors = Counter(dict.fromkeys(((source, "UNAVAILABLE") for source in SOURCES), 0))
        self._client = client
        self._facts = facts
        self._tally = tally
        self._answered: set[str] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run until the end of the block."""
        async with TaskScope() as scope:
            client = self._client
            nodes = monitor_api.WatchNodesRequest(min_interval=to_duration(INTERVAL))
            health = monitor_api.WatchHealthRequest()
            for watched in (
                ("nodes", "nodes", "nodes", client.fleet.WatchNodes, nodes),
                ("health events", "events", "health_events", client.health.WatchHealth, health),
            ):
                scope.spawn(watched[0], self._again(watched[0], partial(self._watch, *watched)))
            replicas = ("replicas", client.endpoints.ListReplicas, autoscaler_api.ListReplicasRequest)
            for lists in (
                [("reservations", client.allocator.ListReservations, allocator_api.ListReservationsRequest)],
                [("cordons", client.nodes.ListCordons, allocator_api.ListCordonsRequest)],
                [
                    ("endpoints", client.endpoints.ListEndpoints, autoscaler_api.ListEndpointsRequest),
                    replicas,
                ],
                [("recordings", client.recordings.ListRecordings, monitor_api.ListRecordingsRequest)],
            ):
                source = lists[0][0]
                scope.spawn(source, self._again(source, partial(self._ask, lists)))
            if self._tally is not None:
                scope.spawn("tally", self._count(self._tally))
            yield

    async def _count(self, tally: FleetTally) -> None:
        """Count what is reserved and used, while what is known of it is fresh."""
        needed = {"nodes", "reservations"}
        while True:
            fresh = needed <= self._answered and not needed & self._facts.problems.keys()
            if fresh:
                tally.add(count(self._facts.gpus(), time.time()))
            await asyncio.sleep(PERIOD if fresh else ASK_INTERVAL)

    async def _again(self, source: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do it again and again, whatever the services answer."""
        backoff = Backoff(initial=0.5, cap=5.0)
        while True:
            try:
                await work()
            except GpuscaleError as error:
                self._facts.lost(source, error.message)
                self.errors[source, error.reason] += 1
                await asyncio.sleep(backoff.next())
            else:
                self._answered.add(source)
                self._facts.heard(source)
                backoff.reset()
                await asyncio.sleep(ASK_INTERVAL)

    async def _watch(self, source: str, attribute: str, field: str, method: Any, request: Any) -> None:
        """Until the stream ends; its first round is everything there is, which the facts keep by name."""
        first: dict[str, Any] | None = {}
        async for update in method(request):
            known: dict[str, Any] = getattr(self._facts, attribute) if first is None else first
            known.update((one.name, one) for one in getattr(update, field))
            if first is not None and update.full:
                setattr(self._facts, attribute, first)
                first = None
                self._answered.add(source)
            for name in getattr(update, "removed", ()):
                known.pop(name, None)
            self._facts.heard(source)
            self._facts.changed()

    async def _ask(self, lists: Iterable[tuple[str, Any, Any]]) -> None:
        """Read lists whole: (the attribute of the facts, which is the field of the answer, the method, its request)."""
        found: dict[str, list[Message]] = {}
        for attribute, method, request in lists:
            pages = pages_async(method, request(page_size=_PAGE))
            found[attribute] = [one async for page in pages for one in getattr(page, attribute)]
        self._facts.put(**found)

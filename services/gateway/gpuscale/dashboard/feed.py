"""Fills the facts from watches while someone is looking. Retries for ever."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from gpuscale.api.allocator import v1 as allocator
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client import AsyncClient, GpuscaleError, Mirror
from gpuscale.common.errors import DeadlineExceededError
from gpuscale.common.rpc.status import PROBLEM_KEY
from gpuscale.common.runtime.tasks import Backoff, TaskScope, pause_before_retry
from gpuscale.common.wire import to_duration
from gpuscale.dashboard.facts import Facts

INTERVAL = 1.0
"""Least seconds between updates of the nodes: agents read once a second, at different moments."""
ADVICE = "; the operator starts the dashboard with --token-file and a viewer's token"
"""What to do where the gateway wants a token of the dashboard itself."""
CONNECTING = "connecting"
"""The problem of what nobody has looked at for a while."""
LINGER = 10.0
"""Seconds for which watches outlast the last look, so that moving between pages restarts none."""
SOURCES: dict[str, tuple[str, str, str, type[Any]]] = {
    "nodes": ("nodes", "fleet", "WatchNodes", monitor_api.WatchNodesRequest),
    "reservations": ("reservations", "allocator", "WatchReservations", allocator.WatchReservationsRequest),
    "health events": ("events", "health", "WatchHealth", monitor_api.WatchHealthRequest),
    "bookings": ("bookings", "bookings", "WatchBookings", allocator.WatchBookingsRequest),
    "cordons": ("cordons", "nodes", "WatchCordons", allocator.WatchCordonsRequest),
    "endpoints": ("endpoints", "endpoints", "WatchEndpoints", autoscaler_api.WatchEndpointsRequest),
    "replicas": ("replicas", "endpoints", "WatchReplicas", autoscaler_api.WatchReplicasRequest),
    "recordings": ("recordings", "recordings", "WatchRecordings", monitor_api.WatchRecordingsRequest),
}
"""The attribute of the facts by source, and the service, method and request that watch it."""
ASK = 4.0
"""Seconds between two questions to a service, and for its answer."""
SERVICES: dict[str, tuple[str, str, type[Any]]] = {
    "fleet": ("fleet", "ListNodes", monitor_api.ListNodesRequest),
    "allocator": ("allocator", "ListReservations", allocator.ListReservationsRequest),
    "autoscaler": ("endpoints", "ListEndpoints", autoscaler_api.ListEndpointsRequest),
}
"""The client's service, method and request by which a service is asked: its answer tells of its trouble, and a stream of one that
hangs, or of whose gateway does, ends after 30 s only."""


class Feed:
    """The tasks that keep `facts` up to date; `errors` counts failed calls, by source and reason."""

    def __init__(self, client: AsyncClient, facts: Facts) -> None:
        unavailable = ("UNAVAILABLE", "UPSTREAM_UNAVAILABLE")  # from 0, so that rates see the first
        self.errors = Counter({(source, why): 0 for source in SOURCES for why in unavailable})
        self.errors.update({(service, DeadlineExceededError.default_reason): 0 for service in SERVICES})
        self._client = client
        self._facts = facts
        self._looked = asyncio.Event()

    def look(self) -> None:
        """Say that someone is looking; to be repeated within LINGER."""
        self._looked.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run until the end of the block."""
        async with TaskScope() as scope:
            scope.spawn("watches", self._follow())
            yield

    async def _follow(self) -> None:
        """Watch everything while someone is looking, and nothing otherwise."""
        while True:
            await self._looked.wait()
            async with TaskScope() as scope:
                for source in SOURCES:
                    scope.spawn(source, self._again(source))
                for service in SERVICES:
                    scope.spawn(service, self._ask(service))
                with suppress(TimeoutError):
                    while True:
                        self._looked.clear()
                        await asyncio.wait_for(self._looked.wait(), LINGER)
            for source in SOURCES:
                self._facts.lost(source, CONNECTING)  # until it is heard again, its facts are old
            for service in SERVICES:
                self._facts.told(service, "")

    async def _ask(self, service: str) -> None:
        """Ask a service now and then whether it answers, and what it says is wrong with it."""
        name, method, kind = SERVICES[service]
        while True:
            try:
                call = getattr(getattr(self._client, name), method)(kind(page_size=1), timeout=ASK)
                await call
                told: dict[str, object] = dict(await call.trailing_metadata() or ())
                self._facts.told(service, str(told.get(PROBLEM_KEY, "")))
            except DeadlineExceededError as error:
                self._facts.lost(service, error.message)
                self.errors[service, error.reason] += 1
            except GpuscaleError:
                self._facts.told(service, "")  # that its streams end too, they tell
            await asyncio.sleep(ASK)

    async def _again(self, source: str) -> None:
        """Watch, and reopen the stream whenever it ends: each stream begins with the full state."""
        attribute, service, method, kind = SOURCES[source]
        request = kind(min_interval=to_duration(INTERVAL)) if source == "nodes" else kind()
        backoff = Backoff(initial=0.5, cap=5.0)
        while True:
            mirror = Mirror()
            try:
                async for update in getattr(getattr(self._client, service), method)(request):
                    backoff.reset()
                    if source == "reservations":
                        for one in update.reservations:  # whose clock may differ
                            one.expire_time.FromNanoseconds(time.time_ns() + one.remaining.ToNanoseconds())
                    if mirror.take(update):
                        items = (
                            mirror.items if source == "reservations" else dict(sorted(mirror.items.items()))
                        )
                        setattr(self._facts, attribute, items if source == "nodes" else [*items.values()])
                        self._facts.heard(source)
                        self._facts.changed()
            except GpuscaleError as error:
                advice = ADVICE if error.reason == "TOKEN_MISSING" else ""
                self._facts.lost(source, error.message + advice)
                self.errors[source, error.reason] += 1
            await pause_before_retry(backoff.next())

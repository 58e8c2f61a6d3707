"""What the queues of each endpoint were like, as its evaluations saw them: for backtests on an endpoint's own history."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial

from gpuscale.autoscaler.backtest import history
from gpuscale.autoscaler.backtest.history import UNKNOWN, NoWorkloadError, RecordedReading, workload
from gpuscale.autoscaler.domain.queues import QueueReading
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.spec import EndpointSpec
from gpuscale.autoscaler.state import watcher_store
from gpuscale.client.traces import Request
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.names import endpoint_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.store.store import Store

_log = get_logger(__name__)


class Histories:
    """The history of every endpoint that reads queues.

    Args:
        reading: what a queue watcher (by id) read last.
        store: where it is kept.
    """

    def __init__(self, reading: Callable[[str], QueueReading | None], store: Store) -> None:
        self._reading = reading
        self._store = store
        self._noted: dict[str, float] = {}
        self._written: dict[str, RecordedReading] = {}
        self._held: dict[str, RecordedReading] = {}

    async def note(self, endpoint: str, spec: EndpointSpec, at: Moment) -> None:
        """Keep what its queues are like now, if it is time; nothing where one of them cannot be had.

        While they stay as they are nothing is written, for an hour at most. Where it cannot be written, that is a gap in
        the history, and no reason to hold up what scales.
        """
        if at.now - self._noted.get(endpoint, float("-inf")) < history.SPACING:
            return
        found = [self._reading(watcher) for watcher in sorted(spec.watchers)]
        seen = [one for one in found if one is not None and one.total is not None]
        if not seen or len(seen) != len(found):
            return
        self._noted[endpoint] = at.now
        reading = _reading(seen, at.wall)
        written = self._written.get(endpoint)
        if written is not None and reading.goes_on_from(self._held.get(endpoint, written)):
            held = replace(reading, since=written.at)
            self._held[endpoint] = held
            if held.at - written.at < history.LONGEST_HELD:
                return
            reading = self._held.pop(endpoint)
        ended = self._held.pop(endpoint, None)
        await self._keep([(endpoint, one) for one in (ended, reading) if one is not None])

    async def _keep(self, readings: Sequence[tuple[str, RecordedReading]]) -> None:
        self._written.update(readings)
        try:
            await self._store.write(partial(watcher_store.keep, readings=readings))
        except GpuscaleError as error:
            for endpoint, _ in readings:
                self._written.pop(endpoint, None)
            names = sorted({endpoint for endpoint, _ in readings})
            _log.warning("readings of queues were not kept", endpoints=names, error=error.message)

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Write what they are held at when the context is left."""
        try:
            yield
        finally:
            if self._held:
                await self._keep([*self._held.items()])

    def forget(self, endpoint: str) -> None:
        """An endpoint is gone, and its readings with it."""
        for known in (self._noted, self._written, self._held):
            known.pop(endpoint, None)

    async def workload(self, endpoint: str, service: float | None, wall: datetime) -> list[Request]:
        """The workload that an endpoint had in the last day; `service`: seconds of a request, learnt where it is None.

        Raises:
            FailedPreconditionError: none follows from what was seen of it.
        """
        until = wall.timestamp()  # what is later was read while the clock was wrong
        since = until - history.SPACING * history.KEPT
        readings = await self._store.read(
            partial(watcher_store.readings, endpoint=endpoint, since=since, until=until)
        )
        if endpoint in self._held and since <= self._held[endpoint].at <= until:
            readings.append(self._held[endpoint])
        try:
            return await asyncio.to_thread(workload, readings, service)  # there may be many requests
        except NoWorkloadError as error:
            text = f"{endpoint_name(endpoint)} has no history to run: {error}"
            raise FailedPreconditionError(text, reason="NO_HISTORY") from error


def _reading(seen: list[QueueReading], wall: datetime) -> RecordedReading:
    rates = [one.rates for one in seen if one.rates is not None]
    told = len(rates) == len(seen)
    return RecordedReading(
        wall.timestamp(),
        sum(one.ready or 0 for one in seen),
        sum(one.unacked or 0 for one in seen),
        sum(one.published for one in rates) if told else UNKNOWN,
        sum(one.delivered for one in rates) if told else UNKNOWN,
    )

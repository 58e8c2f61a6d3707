"""Feeds of the Watch methods. They are kept up to date while somebody reads, and cost nothing otherwise."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.replicas import Replica
from gpuscale.autoscaler.domain.spec import Endpoint
from gpuscale.autoscaler.loop.reconciler import Dependencies
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.autoscaler.state.decision_log import StoredDecision
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.wire.decisions import EndpointView, endpoint_to_wire, replica_to_wire
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.filters import compile_filter
from gpuscale.common.names import endpoint_name
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import wait_at_most

PERIOD: Final = 1.0
"""Seconds between polls of what does not report changes: adapters and readings of queues."""
_MOST_DECISIONS: Final = 100
"""Most decisions of one endpoint between two looks that are sent individually."""
_log = get_logger(__name__)


class _Read(NamedTuple):
    """An endpoint on disk: all its replicas, and its decisions since the last known one, newest first."""

    endpoint: Endpoint | None
    replicas: Sequence[Replica]
    decisions: Sequence[StoredDecision]


class _Known(NamedTuple):
    """What was sent of an endpoint: its last decision, by number and name, the ended replicas, and all others by name."""

    latest: int
    decision: str
    over: frozenset[str]
    replicas: Sequence[str]


class Feeds:
    """Feeds of endpoints, replicas, decisions, and of the messages that `adapters` and `watchers` return."""

    def __init__(
        self,
        deps: Dependencies,
        adapters: Callable[[], Iterable[api.Adapter]],
        watchers: Callable[[], Iterable[api.QueueWatcher]],
    ) -> None:
        self.endpoints = _feed(api.WatchEndpointsResponse)
        self.replicas = _feed(api.WatchReplicasResponse)
        self.decisions = _feed(api.WatchDecisionsResponse)
        self.adapters = _feed(api.WatchAdaptersResponse)
        self.queue_watchers = _feed(api.WatchQueueWatchersResponse)
        self._deps = deps
        self._adapters = adapters
        self._watchers = watchers
        self._begun = asyncio.Event()
        self._looking = asyncio.Lock()
        self._known: dict[str, _Known] = {}
        self._all = True

    async def stream(self, feed: ResourceFeed[Any], request: Any, of: type[Message]) -> AsyncGenerator[bytes]:
        """The responses of a Watch method, for ever, of one parent if the request has one; UnavailableError."""
        parent = f"{getattr(request, 'parent', '')}/"
        view: FeedView[Any] = FeedView(
            of=(lambda one: one.name.startswith(parent)) if parent != "/" else None,
            matches=compile_filter(request.filter, of) if request.filter else None,
        )
        await self._look()
        self._begun.set()
        async for message in feed.stream(request, view):
            yield message

    async def run(self) -> None:
        """Update the feeds while they are read; never ends."""
        feeds = (self.endpoints, self.replicas, self.decisions, self.adapters, self.queue_watchers)
        while True:
            await self._begun.wait()
            self._begun.clear()
            while any(feed.watched for feed in feeds):
                await wait_at_most(self._deps.followers.some, PERIOD)
                try:
                    await self._look()
                except GpuscaleError as error:
                    _log.warning("cannot update watch streams", error=error.message)
                    await asyncio.sleep(PERIOD)

    async def _look(self) -> None:
        followers = self._deps.followers
        async with self._looking:
            _sync(self.adapters, self._adapters(), self.adapters.names, "last_seen_time")
            _sync(self.queue_watchers, self._watchers(), self.queue_watchers.names, "status.age")
            followers.some.clear()
            changed, followers.looked_at = followers.looked_at, set()

            def read(connection: Connection) -> dict[str, _Read]:
                found: dict[str, _Read] = {}
                every = store.endpoints(connection) if self._all else ()  # at the first look
                for one in changed.union(each.id for each in every):
                    known = self._known.get(one)
                    ids = decision_log.decision_ids(connection, one, None, _MOST_DECISIONS)
                    ids = [id_ for id_ in ids if known and id_ >= known.latest] or ids[:1]
                    replicas = store.replicas(connection, one, show_ended=True)
                    decided = decision_log.decisions(connection, ids)
                    found[one] = _Read(store.endpoint(connection, one), replicas, decided)
                return found

            try:
                every_found = await self._deps.store.read(read)
            except GpuscaleError:
                followers.looked_at |= changed
                raise
            self._all = False
            for endpoint_id, found in every_found.items():
                self._note(endpoint_id, found)

    def _note(self, endpoint_id: str, found: _Read) -> None:
        """Put an endpoint, its replicas and its decisions into their feeds."""
        known = self._known.pop(endpoint_id, None)
        silent = self._deps.hub.silent(found.replicas)
        wires = {one.id: replica_to_wire(one, silent=one.adapter in silent) for one in found.replicas}
        over = frozenset(one.id for one in found.replicas if one.ended)
        for one in over - known.over if known else ():
            self.replicas.remove(wires[one].name, wires[one])
        live = [one for one in found.replicas if not one.ended]
        _sync(self.replicas, [wires[one.id] for one in live], known.replicas if known else ())
        decisions = [decision_log.to_wire(self._deps.repetitions.shown(one)) for one in found.decisions]
        if known and known.decision not in {one.name for one in decisions}:
            self.decisions.remove(known.decision)
        # The previous last decision was current before: its count is now final.
        for past in reversed(decisions[1:]):
            self.decisions.remove(past.name, past)
        _sync(self.decisions, decisions[:1], (), "count", "last_time")
        if found.endpoint is None:
            self.endpoints.remove(endpoint_name(endpoint_id))
            return
        latest = decisions[0] if decisions else api.Decision()
        names = [wires[one.id].name for one in live]
        number = found.decisions[0].id if found.decisions else 0
        self._known[endpoint_id] = _Known(number, latest.name, over, names)
        view = EndpointView(found.endpoint, live, silent, latest.name, latest.summary)
        _sync(self.endpoints, [endpoint_to_wire(view)], ())


def _feed(response: Callable[..., Message]) -> ResourceFeed[Any]:
    return ResourceFeed(response, lambda message, _: message)


def _sync(feed: ResourceFeed[Any], messages: Iterable[Any], known: Iterable[str], *quiet: str) -> None:
    """Set the messages of a feed and remove known others; a change of `quiet` fields alone is not sent."""
    now = {one.name: one for one in messages}
    for name in set(known) - now.keys():
        feed.remove(name)
    for name, message in now.items():
        before = feed.get(name)
        if before != message:
            feed.put(name, message, wakes=before is None or _told(before, quiet) != _told(message, quiet))


def _told(message: Any, quiet: Sequence[str]) -> Any:
    """A message without the fields that carry no news."""
    rest = type(message)()
    rest.CopyFrom(message)
    for path in quiet:
        *parents, field = path.split(".")
        part = rest
        for parent in parents:
            part = getattr(part, parent)
        part.ClearField(field)
    return rest

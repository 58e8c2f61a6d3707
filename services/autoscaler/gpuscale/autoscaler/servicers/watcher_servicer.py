"""QueueWatcherService on the wire."""

from collections.abc import AsyncGenerator
from typing import Any

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.queues import (
    DEFAULT_INTERVAL,
    DEFAULT_VIRTUAL_HOST,
    PENDING,
    QueueReading,
    QueueState,
    Watcher,
    WatchSpec,
)
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.signals.watchers import QueueWatchers
from gpuscale.autoscaler.wire.specs import merged
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.filters import listed
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context

_Status = api.QueueWatcherStatus
_STATES = {state: _Status.State.Value(f"STATE_{state.name}") for state in QueueState}


class QueueWatcherServicer(api.QueueWatcherServiceServicer):
    """Translates between the wire and `QueueWatchers`."""

    def __init__(self, watchers: QueueWatchers, clock: Clock, feeds: Feeds) -> None:
        self._watchers = watchers
        self._clock = clock
        self._feeds = feeds

    def _to_wire(self, watcher: Watcher) -> api.QueueWatcher:
        return _with_status(self._watchers, watcher, self._clock.now())

    async def CreateQueueWatcher(
        self, request: api.CreateQueueWatcherRequest, context: Context
    ) -> api.CreateQueueWatcherResponse:
        watcher = await self._watchers.create(
            _id(request.queue_watcher.name, "queue_watcher.name"),
            _to_spec(request.queue_watcher.spec),
            request_id=request.request_id,
            validate_only=request.validate_only,
        )
        return api.CreateQueueWatcherResponse(queue_watcher=self._to_wire(watcher))

    async def GetQueueWatcher(
        self, request: api.GetQueueWatcherRequest, context: Context
    ) -> api.GetQueueWatcherResponse:
        watcher = self._watchers.get(_id(request.name, "name"))
        return api.GetQueueWatcherResponse(queue_watcher=self._to_wire(watcher))

    async def ListQueueWatchers(
        self, request: api.ListQueueWatchersRequest, context: Context
    ) -> api.ListQueueWatchersResponse:
        found, token = listed(
            self._watchers.every(),
            request,
            api.QueueWatcher,
            key=lambda watcher: watcher.id,
            encode=self._to_wire,
        )
        return api.ListQueueWatchersResponse(queue_watchers=found, next_page_token=token)

    async def WatchQueueWatchers(
        self, request: api.WatchQueueWatchersRequest, context: Context
    ) -> AsyncGenerator[Any]:
        async for message in self._feeds.stream(self._feeds.queue_watchers, request, api.QueueWatcher):
            yield message

    async def UpdateQueueWatcher(
        self, request: api.UpdateQueueWatcherRequest, context: Context
    ) -> api.UpdateQueueWatcherResponse:
        mask = request.update_mask if request.HasField("update_mask") else None

        def changed(before: Watcher) -> WatchSpec:
            return _to_spec(merged(watcher_to_wire(before), request.queue_watcher, mask).spec)

        watcher = await self._watchers.update(
            _id(request.queue_watcher.name, "queue_watcher.name"),
            changed,
            etag=request.queue_watcher.etag,
            validate_only=request.validate_only,
        )
        return api.UpdateQueueWatcherResponse(queue_watcher=self._to_wire(watcher))

    async def DeleteQueueWatcher(
        self, request: api.DeleteQueueWatcherRequest, context: Context
    ) -> api.DeleteQueueWatcherResponse:
        with wire.absence_allowed(request):
            await self._watchers.delete(_id(request.name, "name"), etag=request.etag)
        return api.DeleteQueueWatcherResponse()


def watchers_to_wire(watchers: QueueWatchers, clock: Clock) -> list[api.QueueWatcher]:
    """The messages of all watchers."""
    now = clock.now()
    return [_with_status(watchers, one, now) for one in watchers.every()]


def _with_status(watchers: QueueWatchers, watcher: Watcher, now: float) -> api.QueueWatcher:
    message = watcher_to_wire(watcher)
    message.status.CopyFrom(to_status(watchers.reading(watcher.id) or PENDING, now))
    return message


def watcher_to_wire(watcher: Watcher) -> api.QueueWatcher:
    """The message of a watcher, without its status."""
    watched = watcher.spec
    interval = wire.to_duration(watched.interval)
    spec = api.QueueWatcherSpec(
        broker=watched.broker, virtual_host=watched.virtual_host, interval=interval, rates=watched.rates
    )
    if watched.pattern:
        spec.queue_pattern = watched.queues[0]
    elif len(watched.queues) == 1:
        spec.queue = watched.queues[0]
    else:
        spec.queues.extend(watched.queues)
    return api.QueueWatcher(
        name=names.watcher_name(watcher.id),
        spec=spec,
        etag=watcher.etag,
        create_time=wire.to_timestamp(watcher.create_time),
    )


def to_status(reading: QueueReading, now: float) -> api.QueueWatcherStatus:
    """The status of a reading; `now` is seconds since boot. Unknown counts stay unset."""
    age = None if reading.observed_at is None else wire.to_duration(max(0.0, now - reading.observed_at))
    oldest = reading.rates.oldest_age if reading.rates else None
    return api.QueueWatcherStatus(
        state=_STATES[reading.state],
        ready_count=reading.ready,
        unacked_count=reading.unacked,
        consumer_count=reading.consumers,
        publish_rate=reading.rates.published if reading.rates else None,
        deliver_rate=reading.rates.delivered if reading.rates else None,
        queue_count=None if reading.observed_at is None else reading.queue_count,
        age=age,
        oldest_message_age=None if oldest is None else wire.to_duration(oldest),
        message=reading.message,
    )


def _id(name: str, field: str) -> str:
    return names.parse(names.WATCHER, name, field)["watcher"]


def _to_spec(spec: api.QueueWatcherSpec) -> WatchSpec:
    """The spec of a message."""
    ways = [queues for queues in ((spec.queue,), tuple(spec.queues), (spec.queue_pattern,)) if any(queues)]
    if len(ways) != 1:
        raise InvalidArgumentError(
            "queue_watcher.spec must set one of queue, queues and queue_pattern",
            field="queue_watcher.spec.queue",
        )
    if not all(ways[0]):  # over AMQP this is the queue that was configured before
        raise InvalidArgumentError("must not be empty", field="queue_watcher.spec.queues")
    interval = wire.optional_seconds(spec, "interval")
    return WatchSpec(
        spec.broker,
        spec.virtual_host or DEFAULT_VIRTUAL_HOST,
        ways[0],
        bool(spec.queue_pattern),
        spec.rates,
        DEFAULT_INTERVAL if interval is None else interval,
    )

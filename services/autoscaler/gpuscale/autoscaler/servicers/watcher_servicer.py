"""QueueWatcherService and MetricService on the wire: what rules read that the autoscaler does not measure itself."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain import signals
from gpuscale.autoscaler.domain.inputs import TaskReport
from gpuscale.autoscaler.servicers.feeds import Feeds
from gpuscale.autoscaler.signals.sources import ReportedMetrics, Subject, Value
from gpuscale.autoscaler.signals.watchers import QueueWatchers
from gpuscale.autoscaler.state import store
from gpuscale.autoscaler.wire.specs import from_wire
from gpuscale.common import names, wire
from gpuscale.common.errors import InvalidArgumentError, NotFoundError, PermissionDeniedError
from gpuscale.common.filters import listed, listed_in_turns
from gpuscale.common.names import ENDPOINT, REPLICA, endpoint_name, match, replica_name
from gpuscale.common.rpc.validation import merged
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context, Principal, Role, current_principal
from gpuscale.common.store.store import Store
from gpuscale.common.wire import optional_seconds, seconds, to_duration

_Status = api.QueueWatcherStatus
_STATES = {state: _Status.State.Value(f"STATE_{state.name}") for state in signals.QueueState}


class QueueWatcherServicer(api.QueueWatcherServiceServicer):
    """Translates between the wire and `QueueWatchers`."""

    def __init__(self, watchers: QueueWatchers, clock: Clock, feeds: Feeds) -> None:
        self._watchers = watchers
        self._clock = clock
        self._feeds = feeds

    def _to_wire(self, watcher: signals.Watcher) -> api.QueueWatcher:
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

        def changed(before: signals.Watcher) -> signals.WatchSpec:
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


def _with_status(watchers: QueueWatchers, watcher: signals.Watcher, now: float) -> api.QueueWatcher:
    message = watcher_to_wire(watcher)
    message.status.CopyFrom(to_status(watchers.reading(watcher.id) or signals.PENDING, now))
    return message


def watcher_to_wire(watcher: signals.Watcher) -> api.QueueWatcher:
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


def to_status(reading: signals.QueueReading, now: float) -> api.QueueWatcherStatus:
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


def _to_spec(spec: api.QueueWatcherSpec) -> signals.WatchSpec:
    ways = [queues for queues in ((spec.queue,), tuple(spec.queues), (spec.queue_pattern,)) if any(queues)]
    if len(ways) != 1:
        raise InvalidArgumentError(
            "queue_watcher.spec must set one of queue, queues and queue_pattern",
            field="queue_watcher.spec.queue",
        )
    if not all(ways[0]):  # over AMQP this is the queue that was configured before
        raise InvalidArgumentError("must not be empty", field="queue_watcher.spec.queues")
    interval = wire.optional_seconds(spec, "interval")
    return signals.WatchSpec(
        spec.broker,
        spec.virtual_host or signals.DEFAULT_VIRTUAL_HOST,
        ways[0],
        bool(spec.queue_pattern),
        spec.rates,
        signals.DEFAULT_INTERVAL if interval is None else interval,
    )


class MetricServicer(api.MetricServiceServicer):
    """Takes and lists reported metrics; `state` has the endpoints and replicas."""

    def __init__(self, metrics: ReportedMetrics, state: Store, clock: Clock) -> None:
        self._metrics = metrics
        self._state = state
        self._clock = clock

    async def ReportMetrics(
        self, request: api.ReportMetricsRequest, context: Context
    ) -> api.ReportMetricsResponse:
        subject = _subject(request.name, "name")
        now = self._clock.now()
        if not request.values and not request.HasField("tasks"):
            raise InvalidArgumentError("values must be set, or tasks", field="values")
        values: dict[str, Value] = {}
        for index, one in enumerate(request.values):
            if one.metric in values:
                field = f"values[{index}].metric"
                raise InvalidArgumentError(f"{field} is reported twice", field=field)
            values[one.metric] = Value(one.value, now - (optional_seconds(one, "age") or 0.0))
        if request.HasField("tasks") and subject[1]:
            raise InvalidArgumentError("tasks are those of an endpoint, not of a replica", field="tasks")
        tasks = from_wire(TaskReport, request.tasks, "tasks")
        await self._check(subject, request.name, current_principal())
        self._metrics.report(subject, values, now)
        if request.HasField("tasks"):
            self._metrics.report_tasks(subject[0], tasks, now - seconds(request.tasks.age))
        return api.ReportMetricsResponse()

    async def ListMetrics(self, request: api.ListMetricsRequest, context: Context) -> api.ListMetricsResponse:
        subject = _subject(request.parent, "parent") if request.parent else ("", "")
        now = self._clock.now()
        metrics, token = await listed_in_turns(
            lambda last: self._metrics.list(*subject, after=last.split(" ", 2)),
            request,
            api.ReportedMetric,
            key=lambda one: " ".join((*one[0], one[1])),
            encode=lambda one: _metric(*one, now),
        )
        return api.ListMetricsResponse(metrics=metrics, next_page_token=token)

    async def GetMetric(self, request: api.GetMetricRequest, context: Context) -> api.GetMetricResponse:
        subject = _subject(request.name, "name")
        for one in self._metrics.list(*subject):
            if one[:2] == (subject, request.metric):
                return api.GetMetricResponse(metric=_metric(*one, self._clock.now()))
        raise NotFoundError(
            f"{request.name} has no metric {request.metric}",
            metadata={"name": request.name, "metric": request.metric},
        )

    async def _check(self, subject: Subject, name: str, caller: Principal) -> None:
        """Reject unknown subjects, and those that are not the caller's."""
        endpoint_id, replica_id = subject
        if not replica_id:
            if caller.role < Role.OPERATOR:
                raise _not_yours(caller, name)
            if await self._state.read(partial(store.endpoint, endpoint_id=endpoint_id)) is None:
                raise NotFoundError.of(name)
            return
        replica = await self._state.read(partial(store.replica, replica_id=replica_id))
        if replica is None or replica.ended or replica.endpoint != endpoint_id:
            raise NotFoundError(f"there is no {name}, or it has ended", metadata={"name": name})
        # An agent has the name of the replica's adapter or node.
        if caller.role < Role.OPERATOR and caller.name not in {replica.adapter, replica.node} - {""}:
            raise _not_yours(caller, name)


def _metric(subject: Subject, metric: str, value: Value, now: float) -> api.ReportedMetric:
    endpoint, replica = subject
    return api.ReportedMetric(
        name=replica_name(endpoint, replica) if replica else endpoint_name(endpoint),
        value=api.MetricValue(metric=metric, value=value.value, age=to_duration(max(0.0, now - value.at))),
    )


def _not_yours(caller: Principal, name: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{caller.name} may only report for replicas that it runs, not for {name}", reason="NOT_YOUR_REPLICA"
    )


def _subject(name: str, field: str) -> Subject:
    if (ids := match(REPLICA, name)) is not None:
        return ids["endpoint"], ids["replica"]
    if (ids := match(ENDPOINT, name)) is not None:
        return ids["endpoint"], ""
    raise InvalidArgumentError(f"{field} must look like {ENDPOINT} or {REPLICA}", field=field)

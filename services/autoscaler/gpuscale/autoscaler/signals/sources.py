"""Where signals get their values from: what programs reported, and what watchers and followers last read; never a call of its own.

Reported counters and histograms are the reporter's to reduce: a value here is one number with an age. What is known of a
replica counts only while that replica is ready, so that nothing is left of one that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.backtest import history
from gpuscale.autoscaler.backtest.history import UNKNOWN, NoWorkloadError, RecordedReading, workload
from gpuscale.autoscaler.domain.inputs import TaskReport
from gpuscale.autoscaler.domain.planning import AdapterFacts, gpus_elsewhere, nodes_of
from gpuscale.autoscaler.domain.queues import QueueReading, combined
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState
from gpuscale.autoscaler.domain.serving import PREFIX
from gpuscale.autoscaler.domain.signals import Sample, queue_sample
from gpuscale.autoscaler.domain.spec import (
    ASKS_FOR_ROOM,
    DEFAULT_MAX_AGE,
    Endpoint,
    EndpointSignal,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    PrometheusSignal,
    PushedSignal,
    QueueSignal,
    ReplicaSignal,
    Signal,
    TaskSignal,
    WaitingSignal,
)
from gpuscale.autoscaler.signals.fleet import FleetMetrics
from gpuscale.autoscaler.signals.polling import (
    AnswerShape,
    Counts,
    Poller,
    room_for,
    room_of,
    shape_of,
    waiting_requests,
    waiting_sample,
)
from gpuscale.autoscaler.signals.prometheus import (
    InstantQuery,
    InstantVector,
    PrometheusServer,
    PrometheusSettings,
    prometheus_sample,
)
from gpuscale.autoscaler.signals.served import ReplicaServers
from gpuscale.autoscaler.state import watcher_store
from gpuscale.client.traces import Request
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, ResourceExhaustedError
from gpuscale.common.names import endpoint_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, TaskScope
from gpuscale.common.store.store import Store

MAX_METRICS_OF_ONE = 100
"""Metrics that are kept of one endpoint or replica."""
MAX_SOURCES = 20_000
"""Endpoints and replicas whose metrics are kept."""
KEPT_SECONDS = 24 * 3600.0
"""A value that is older is forgotten; no signal may count one."""


@dataclass(frozen=True, slots=True)
class Value:
    """A reported value, and when it was measured, in seconds since boot."""

    value: float
    at: float


Subject = tuple[str, str]
"""Ids of an endpoint and of one of its replicas; the latter is empty for the endpoint as a whole."""


class ReportedMetrics:
    """The newest value of each metric of each endpoint and replica."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, Value]]] = {}
        self._tasks: dict[str, tuple[TaskReport, float]] = {}

    def report(self, subject: Subject, values: Mapping[str, Value], now: float) -> None:
        """Take in values newer than those known; ResourceExhaustedError, and none taken in, if too many are kept."""
        endpoint, replica = subject
        known = self._values.get(endpoint, {}).get(replica, {})
        kept = {metric: one for metric, one in known.items() if now - one.at <= KEPT_SECONDS}
        newer = {name: one for name, one in values.items() if name not in kept or one.at > kept[name].at}
        if len(kept | newer) > MAX_METRICS_OF_ONE:
            raise _full(f"more than {MAX_METRICS_OF_ONE} metrics of one endpoint or replica are not kept")
        if not known and self._subjects() >= MAX_SOURCES:
            self._forget_old(now)
            if self._subjects() >= MAX_SOURCES:
                raise _full(f"metrics of more than {MAX_SOURCES} endpoints and replicas are not kept")
        self._values.setdefault(endpoint, {})[replica] = kept | newer

    def report_tasks(self, endpoint: str, tasks: TaskReport, at: float) -> None:
        """Take in all tasks of an endpoint, counted at `at`, unless something newer is known."""
        known = self._tasks.get(endpoint)
        if known is None and len(self._tasks) >= MAX_SOURCES:
            raise _full(f"tasks of more than {MAX_SOURCES} endpoints are not kept")
        if known is None or known[1] < at:
            self._tasks[endpoint] = tasks, at

    def tasks_of(self, endpoint: str) -> Sample:
        """What was reported of the tasks of an endpoint."""
        if endpoint not in self._tasks:
            return Sample(problem="nobody has reported tasks")
        tasks, at = self._tasks[endpoint]
        return Sample((float(tasks.total),), at, proven_empty=not tasks.total, tasks=tasks)

    def keep(self, endpoint: str, replicas: Collection[str]) -> None:
        """Forget the replicas of an endpoint but for these."""
        known = self._values.get(endpoint, {})
        for gone in [one for one in known if one and one not in replicas]:
            del known[gone]

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint and its replicas."""
        self._values.pop(endpoint, None)
        self._tasks.pop(endpoint, None)

    def of_endpoint(self, endpoint: str, metric: str) -> Sample:
        """What was reported for the endpoint as a whole."""
        found = self._values.get(endpoint, {}).get("", {}).get(metric)
        if found is None:
            return Sample(problem=f"nobody has reported {metric}")
        return Sample((found.value,), found.at, proven_empty=found.value == 0)

    def of_replicas(
        self, endpoint: str, metric: str, replicas: Sequence[str], now: float, oldest: float
    ) -> Sample:
        """What these replicas reported; those whose last value is older than `oldest` seconds are silent."""
        if not replicas:
            return Sample(problem="no replica is ready")
        known = self._values.get(endpoint, {})
        found = [known[one][metric] for one in replicas if metric in known.get(one, {})]
        fresh = [one for one in found if now - one.at <= oldest]
        told = fresh or found  # where all are too old, their age says so
        silent = len(replicas) - len(fresh)
        if not told:
            return Sample(
                problem=f"none of {len(replicas)} replicas has reported {metric}", silent_count=silent
            )
        values = tuple(one.value for one in told)
        empty = not silent and not any(values)
        return Sample(values, min(one.at for one in told), silent_count=silent, proven_empty=empty)

    def by_replica(self, endpoint: str, metric: str, now: float, oldest: float) -> dict[str, float]:
        """What each replica of an endpoint reported in the last `oldest` seconds, by its id."""
        known = self._values.get(endpoint, {}).items()
        found = {replica: values[metric] for replica, values in known if replica and metric in values}
        return {replica: one.value for replica, one in found.items() if now - one.at <= oldest}

    def list(self, endpoint: str = "", replica: str = "") -> Iterator[tuple[Subject, str, Value]]:
        """What is known, by endpoint, replica and metric; of one of them where it is named."""
        for owner in sorted(self._values.keys() & {endpoint} if endpoint else self._values):
            subjects = self._values[owner]
            for one in sorted(subjects.keys() & {replica} if replica else subjects):
                for metric, value in sorted(subjects[one].items()):
                    yield (owner, one), metric, value

    def _forget_old(self, now: float) -> None:
        for endpoint, subjects in list(self._values.items()):
            for replica, values in list(subjects.items()):
                if all(now - one.at > KEPT_SECONDS for one in values.values()):
                    del subjects[replica]
            if not subjects:
                del self._values[endpoint]

    def _subjects(self) -> int:
        return sum(len(one) for one in self._values.values())


def _full(message: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(message, reason="TOO_MANY_METRICS")


@dataclass(frozen=True, slots=True)
class SignalSources:
    """Samples the signals of endpoints."""

    # what a queue watcher (by id) read last; None where there is no such watcher
    reading: Callable[[str], QueueReading | None]
    reported: ReportedMetrics  # metrics that programs report
    servers: ReplicaServers  # what the servers of replicas show of themselves
    fleet: FleetMetrics  # readings of GPUs and hosts
    # what asks each Prometheus server, by its name in the settings
    prometheus: Mapping[str, Poller[InstantQuery, InstantVector]]
    waiting: Poller[None, Counts]  # what asks the allocator for the requests that wait
    room: Poller[AnswerShape, int]  # what asks the allocator how many more replicas there are GPUs for
    clock: Clock  # what ages are counted on
    # how many replicas each endpoint aims at, by id, since its last look
    aims: dict[str, int] = field(default_factory=dict[str, int])

    def sample(self, endpoint: Endpoint, replicas: Sequence[Replica]) -> dict[str, Sample]:
        """What the sources of an endpoint's signals last said, by signal id; `replicas`: those that have not ended."""
        ready = [one for one in replicas if one.state is ReplicaState.READY]
        ids = [one.id for one in ready]
        gpus = [uuid for one in ready if one.lease is not None for uuid in one.lease.gpu_uuids]
        return {signal.id: self._sample(endpoint, signal, ids, gpus) for signal in endpoint.spec.measured}

    def more(
        self, spec: EndpointSpec, facts: Callable[[], Sequence[AdapterFacts]], since: float = 0.0
    ) -> int | None:
        """How many more replicas the adapters have GPUs for; None where nobody wants to know, or knows.

        An engine that gives out GPUs itself has as many as the endpoint may ask for: it alone knows, and lets them wait.
        What was asked before `since` does not count: GPUs that were granted after that would count twice.
        """
        if spec.gpu_gate not in ASKS_FOR_ROOM or not spec.template.gpu_count:
            return None
        adapters = facts()
        if gpus_elsewhere(spec.template, adapters):
            return spec.max_replicas
        nodes = nodes_of(spec.template, adapters)
        if not nodes:
            return 0
        period = min(spec.period, DEFAULT_MAX_AGE) / 2
        return room_of(self.room.ask(shape_of(spec.template, nodes), period), self.clock.now(), since)

    def busy(self, endpoint: Endpoint) -> dict[str, float]:
        """How busy each replica of an endpoint says that it is, by id; nobody where the spec does not ask."""
        metric = endpoint.spec.busy_metric
        if not metric:
            return {}
        if metric.startswith(PREFIX):
            return self.servers.by_replica(endpoint.id, metric.removeprefix(PREFIX), DEFAULT_MAX_AGE)
        return self.reported.by_replica(endpoint.id, metric, self.clock.now(), DEFAULT_MAX_AGE)

    def keep(self, endpoint_id: str, replicas: Sequence[Replica]) -> None:
        """Forget what replicas of an endpoint reported, but for these, which have not ended."""
        ids = {one.id for one in replicas}
        self.reported.keep(endpoint_id, ids)
        self.servers.keep(endpoint_id, ids)

    def forget(self, endpoint_id: str) -> None:
        """Forget what was reported of an endpoint that is gone."""
        self.reported.forget(endpoint_id)
        self.servers.keep(endpoint_id, ())

    def _sample(
        self, endpoint: Endpoint, signal: Signal, ready: Sequence[str], gpus: Sequence[str]
    ) -> Sample:
        """What one source last said; `ready` and `gpus`: ids of the ready replicas, and of the GPUs that they hold."""
        # So often that a tick finds an answer that is younger than the signal's max_age, and a new one.
        often = min(endpoint.spec.period, signal.oldest) / 2
        match signal.source:
            case QueueSignal() as source:
                return queue_sample(source, self.reading(source.watcher))
            case GpuSignal() as source:
                return self.fleet.gpus(source, gpus, signal.oldest)
            case HostSignal() as source:
                return self.fleet.hosts(source, signal.oldest)
            case PushedSignal(metric):
                return self.reported.of_endpoint(endpoint.id, metric)
            case ReplicaSignal(metric) if metric.startswith(PREFIX):
                return self.servers.sample(endpoint.id, metric.removeprefix(PREFIX), ready, signal.oldest)
            case ReplicaSignal(metric):
                return self.reported.of_replicas(endpoint.id, metric, ready, self.clock.now(), signal.oldest)
            case PrometheusSignal(server, query):
                if server not in self.prometheus:
                    return Sample(problem=f"the settings name no prometheus {server!r}")
                asked = InstantQuery(query, signal.oldest)
                return prometheus_sample(self.prometheus[server].ask(asked, often))
            case EndpointSignal(other):
                return self._aimed(other)
            case TaskSignal():
                return self.reported.tasks_of(endpoint.id)
            case WaitingSignal() as source:
                return waiting_sample(source, self.waiting.ask(None, often))

    def _aimed(self, endpoint: str) -> Sample:
        """How many replicas another endpoint aims at."""
        count = self.aims.get(endpoint)
        if count is None:
            return Sample(problem=f"there is no {endpoint_name(endpoint)}")
        return Sample((float(count),), self.clock.now(), proven_empty=not count)


@asynccontextmanager
async def open_sources(
    reading: Callable[[str], QueueReading | None],
    prometheus: Mapping[str, PrometheusSettings],
    *,
    fleet: grpc.aio.Channel,
    allocator: grpc.aio.Channel,
    clock: Clock,
) -> AsyncGenerator[SignalSources]:
    """Every source, kept current until the context is left; `reading` tells what a queue watcher, by id, read last.

    FailedPreconditionError if a table [prometheus.NAME] of the configuration is wrong.
    """
    async with AsyncExitStack() as stack:
        servers = {name: PrometheusServer(name, settings) for name, settings in prometheus.items()}
        for server in servers.values():
            stack.push_async_callback(server.close)
        sources = SignalSources(
            reading=reading,
            reported=ReportedMetrics(),
            servers=ReplicaServers(clock),
            fleet=FleetMetrics(fleet, clock),
            prometheus={name: Poller(server.fetch, clock) for name, server in servers.items()},
            waiting=Poller(partial(waiting_requests, allocator_api.QuotaServiceStub(allocator)), clock),
            room=Poller(partial(room_for, allocator_api.CapacityServiceStub(allocator)), clock),
            clock=clock,
        )
        scope = await stack.enter_async_context(TaskScope())
        scope.spawn("follow the fleet", sources.fleet.run())
        scope.spawn("count waiting requests", sources.waiting.run())
        scope.spawn("ask for room", sources.room.run())
        for name, poller in sources.prometheus.items():
            scope.spawn(f"queries of prometheus {name}", poller.run())
        yield sources


_log = get_logger(__name__)


class Histories:
    """The history of every endpoint that reads queues, as the `reading` of watchers, by id, tells it."""

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
        reading = _reading([self._reading(watcher) for watcher in spec.watchers], at.wall)
        if reading is None:
            return
        self._noted[endpoint] = at.now
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
        """What an endpoint had in the last day, `service` seconds a request or as learnt; FailedPreconditionError."""
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


def _reading(queues: Sequence[QueueReading | None], wall: datetime) -> RecordedReading | None:
    """What queues are like together; None where one of them cannot be had, or there are none."""
    known = [one for one in queues if one is not None]
    if not known or len(known) != len(queues):
        return None
    whole = combined(known)
    if whole.ready is None or whole.unacked is None:
        return None
    rates = (whole.rates.published, whole.rates.delivered) if whole.rates else (UNKNOWN, UNKNOWN)
    return RecordedReading(wall.timestamp(), whole.ready, whole.unacked, *rates)


class WatcherUses:
    """Kept beside the stored specs: a watcher is entered before a spec that names it is stored."""

    def __init__(self) -> None:
        self._watchers: dict[str, AbstractSet[str]] = {}

    def of(self, watcher: str) -> list[str]:
        """Names of the endpoints that read a watcher."""
        return [endpoint_name(one) for one, watchers in sorted(self._watchers.items()) if watcher in watchers]

    def reads(self, endpoint: str) -> AbstractSet[str]:
        """Ids of the watchers that an endpoint reads."""
        return self._watchers.get(endpoint, frozenset())

    def set(self, endpoint: str, watchers: AbstractSet[str]) -> None:
        """What an endpoint reads from now on; nothing for one that is gone."""
        if watchers:
            self._watchers[endpoint] = watchers
        else:
            self._watchers.pop(endpoint, None)

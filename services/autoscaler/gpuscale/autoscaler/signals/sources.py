"""The sources of signals: reported values, and what watchers and followers last read; without calls of their own.

Reporters reduce counters and histograms themselves: a value here is one number with an age. A replica's values only count while
it is ready, so that nothing is left of one that has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.backtest import world
from gpuscale.autoscaler.backtest.world import UNKNOWN, NoWorkloadError, RecordedReading, workload
from gpuscale.autoscaler.domain import serving
from gpuscale.autoscaler.domain.inputs import TaskReport
from gpuscale.autoscaler.domain.planning import AdapterFacts, gpus_elsewhere, nodes_of
from gpuscale.autoscaler.domain.replicas import Moment, Replica, ReplicaState
from gpuscale.autoscaler.domain.signals import QueueReading, Sample, combined, queue_sample
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
from gpuscale.autoscaler.signals.polling import Counts, Poller, room_for, waiting_requests, waiting_sample
from gpuscale.autoscaler.signals.prometheus import (
    InstantQuery,
    InstantVector,
    PrometheusServer,
    PrometheusSettings,
    prometheus_sample,
)
from gpuscale.autoscaler.state import watcher_store
from gpuscale.autoscaler.wire.specs import ask_to_wire
from gpuscale.client.traces import Request
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, ResourceExhaustedError
from gpuscale.common.names import endpoint_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, TaskScope
from gpuscale.common.sizes import counted
from gpuscale.common.store.store import Store

MAX_METRICS_OF_ONE = 100
"""Most metrics kept of one endpoint or replica."""
MAX_SOURCES = 20_000
"""Most endpoints and replicas whose metrics are kept."""
KEPT_SECONDS = 24 * 3600.0
"""Older values are forgotten; no signal may use one."""
MAX_READINGS = 64
"""Most readings kept per replica; more than the window has at one per second."""
NAMED = 3
"""Most silent replicas that are named."""


@dataclass(frozen=True, slots=True)
class Value:
    """A reported value, and when it was measured, in seconds since boot."""

    value: float
    at: float


Subject = tuple[str, str]
"""Ids of an endpoint and one of its replicas; the latter is empty for the endpoint as a whole."""


class ReportedMetrics:
    """The newest value of each metric of each endpoint and replica."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, Value]]] = {}
        self._tasks: dict[str, tuple[TaskReport, float]] = {}

    def report(self, subject: Subject, values: Mapping[str, Value], now: float) -> None:
        """Take values newer than the known ones; ResourceExhaustedError, and none is taken, if too many are kept."""
        endpoint, replica = subject
        known = self._values.get(endpoint, {}).get(replica, {})
        kept = {metric: one for metric, one in known.items() if now - one.at <= KEPT_SECONDS}
        newer = {name: one for name, one in values.items() if name not in kept or one.at > kept[name].at}
        if len(kept | newer) > MAX_METRICS_OF_ONE:
            raise _full(f"more than {MAX_METRICS_OF_ONE} metrics of one endpoint or replica are not kept")
        if not known and self._subjects() >= MAX_SOURCES:
            for one, subjects in list(self._values.items()):
                for name, old in list(subjects.items()):
                    if all(now - value.at > KEPT_SECONDS for value in old.values()):
                        del subjects[name]
                if not subjects:
                    del self._values[one]
            if self._subjects() >= MAX_SOURCES:
                raise _full(f"metrics of more than {MAX_SOURCES} endpoints and replicas are not kept")
        self._values.setdefault(endpoint, {})[replica] = kept | newer

    def report_tasks(self, endpoint: str, tasks: TaskReport, at: float) -> None:
        """Take all tasks of an endpoint, counted at `at`, unless something newer is known."""
        known = self._tasks.get(endpoint)
        if known is None and len(self._tasks) >= MAX_SOURCES:
            raise _full(f"tasks of more than {MAX_SOURCES} endpoints are not kept")
        if known is None or known[1] < at:
            self._tasks[endpoint] = tasks, at

    def tasks_of(self, endpoint: str) -> Sample:
        """The reported tasks of an endpoint."""
        if endpoint not in self._tasks:
            return Sample(problem="nobody has reported tasks")
        tasks, at = self._tasks[endpoint]
        return Sample((float(tasks.total),), at, proven_empty=not tasks.total, tasks=tasks)

    def keep(self, endpoint: str, replicas: Collection[str]) -> None:
        """Forget all replicas of an endpoint except these."""
        known = self._values.get(endpoint, {})
        for gone in [one for one in known if one and one not in replicas]:
            del known[gone]

    def forget(self, endpoint: str) -> None:
        """Forget an endpoint and its replicas."""
        self._values.pop(endpoint, None)
        self._tasks.pop(endpoint, None)

    def of_endpoint(self, endpoint: str, metric: str) -> Sample:
        """A metric reported for the endpoint as a whole."""
        found = self._values.get(endpoint, {}).get("", {}).get(metric)
        if found is None:
            return Sample(problem=f"nobody has reported {metric}")
        return Sample((found.value,), found.at, proven_empty=found.value == 0)

    def of_replicas(
        self, endpoint: str, metric: str, replicas: Sequence[str], now: float, oldest: float
    ) -> Sample:
        """A metric reported by these replicas; those whose last value is older than `oldest` seconds are silent."""
        if not replicas:
            return Sample(problem="no replica is ready")
        known = self._values.get(endpoint, {})
        found = [known[one][metric] for one in replicas if metric in known.get(one, {})]
        fresh = [one for one in found if now - one.at <= oldest]
        told = fresh or found  # if all are too old, their age shows it
        silent = len(replicas) - len(fresh)
        if not told:
            return Sample(
                problem=f"none of {counted(len(replicas), 'replica')} has reported {metric}",
                silent_count=silent,
            )
        values = tuple(one.value for one in told)
        empty = not silent and not any(values)
        return Sample(values, min(one.at for one in told), silent_count=silent, proven_empty=empty)

    def by_replica(self, endpoint: str, metric: str, now: float, oldest: float) -> dict[str, float]:
        """The values reported by replicas of an endpoint in the last `oldest` seconds, by id."""
        known = self._values.get(endpoint, {}).items()
        found = {replica: values[metric] for replica, values in known if replica and metric in values}
        return {replica: one.value for replica, one in found.items() if now - one.at <= oldest}

    def list(
        self, endpoint: str = "", replica: str = "", after: Sequence[str] = ()
    ) -> Iterator[tuple[Subject, str, Value]]:
        """All known values, by endpoint, replica and metric; of one endpoint or replica, and `after` those three, if given.

        They may come, go and change between two of them.
        """
        last = (*after,)
        for owner in sorted(self._values.keys() & {endpoint} if endpoint else self._values):
            subjects = self._values.get(owner, {}) if (owner,) >= last[:1] else {}
            for one in sorted(subjects.keys() & {replica} if replica else subjects):
                values = subjects.get(one, {}) if (owner, one) >= last[:2] else {}
                for metric, value in sorted(values.items()):
                    if (owner, one, metric) > last:
                        yield (owner, one), metric, value

    def _subjects(self) -> int:
        return sum(len(one) for one in self._values.values())


def _full(message: str) -> ResourceExhaustedError:
    return ResourceExhaustedError(message, reason="TOO_MANY_METRICS")


@dataclass(slots=True)
class _Server:
    readings: deque[serving.Reading] = field(
        default_factory=lambda: deque[serving.Reading](maxlen=MAX_READINGS)
    )
    problem: str = "has not reported yet"  # of its last read; empty if it succeeded


class ReplicaServers:
    """The recent readings of each replica of each endpoint; `keep` sets which replicas there are."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._servers: dict[str, dict[str, _Server]] = {}

    def heard(
        self, endpoint: str, replica: str, age: float, reading: serving.ServerReading | None, problem: str
    ) -> None:
        """Take a replica's reading of `age` seconds ago, or why there is none."""
        server = self._servers.setdefault(endpoint, {}).setdefault(replica, _Server())
        server.problem = problem
        if reading is None:
            return
        at, readings = self._clock.now() - age, server.readings
        if readings and readings[-1][0] >= at:
            return
        if readings and serving.restarted(readings[-1][1], reading):
            readings.clear()
        readings.append((at, reading))
        while len(readings) > 2 and readings[1][0] <= at - serving.WINDOW:
            readings.popleft()

    def keep(self, endpoint: str, replicas: Collection[str]) -> None:
        """Forget all replicas of an endpoint except these."""
        known = self._servers.get(endpoint, {})
        for gone in known.keys() - set(replicas):
            del known[gone]
        if not known:
            self._servers.pop(endpoint, None)

    def by_replica(self, endpoint: str, metric: str, oldest: float) -> dict[str, float]:
        """The value of each replica in the last `oldest` seconds, by its id."""
        known = self._servers.get(endpoint, {})
        found = ((replica, self._value(server, metric, oldest)) for replica, server in known.items())
        return {replica: value for replica, value in found if value is not None}

    def sample(self, endpoint: str, metric: str, replicas: Sequence[str], oldest: float) -> Sample:
        """One value per replica; for a percentile, one for all of them together."""
        if not replicas:
            return Sample(problem="no replica is ready")
        known = self._servers.get(endpoint, {})
        servers = {replica: known.get(replica, _Server()) for replica in replicas}
        joint = serving.percentile_of(metric)
        values: list[float] = []
        told: dict[str, _Server] = {}
        if joint is not None:
            # at the beginning and at the end of the window
            spans: list[tuple[serving.Latencies, serving.Latencies]] = []
            for replica, server in servers.items():
                if self._fresh(server, oldest) and len(server.readings) >= 2:
                    begin, end = (getattr(server.readings[at][1], joint[0]) for at in (0, -1))
                    if begin is not None and end is not None:
                        told[replica] = server
                        spans.append((begin, end))
            one = serving.percentile(spans, joint[1])
            values = [] if one is None else [one]
        else:
            for replica, server in servers.items():
                value = self._value(server, metric, oldest)
                if value is not None:
                    told[replica] = server
                    values.append(value)
        silent = {
            replica: server.problem or self._why_not(server, metric, oldest)
            for replica, server in servers.items()
            if replica not in told
        }
        words = [f"replica {one} {why}" for one, why in sorted(silent.items())]
        more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
        silence = "; ".join(words[:NAMED]) + more
        at = min((server.readings[-1][0] for server in told.values()), default=None)
        if not values:
            problem = silence if silent else f"nothing was served in the last {serving.WINDOW:g} s"
            return Sample(at=at, problem=problem, silent_count=len(silent))
        empty = not silent and not any(values)
        return Sample(tuple(values), at, silent_count=len(silent), silence=silence, proven_empty=empty)

    def _value(self, server: _Server, metric: str, oldest: float) -> float | None:
        """A metric of one replica; None if it is absent or too old."""
        if not self._fresh(server, oldest) or (len(server.readings) < 2 and metric not in serving.LEVELS):
            return None
        last = server.readings[-1]
        lately = (one for one in reversed(server.readings) if one[0] <= last[0] - serving.RATE_WINDOW)
        read = serving.METRICS.get(metric)
        return None if read is None else read(next(lately, server.readings[0]), last)

    def _why_not(self, server: _Server, metric: str, oldest: float) -> str:
        """Why a replica whose last read succeeded has no value."""
        if not self._fresh(server, oldest):
            return f"has not answered for {self._clock.now() - server.readings[-1][0]:.0f} s"
        once = len(server.readings) < 2 and metric not in serving.LEVELS
        return "has answered only once so far" if once else f"does not report {metric}"

    def _fresh(self, server: _Server, oldest: float) -> bool:
        return bool(server.readings) and self._clock.now() - server.readings[-1][0] <= oldest


@dataclass(frozen=True, slots=True)
class SignalSources:
    """Samples the signals of endpoints."""

    # the last reading of a queue watcher (by id); None if there is no such watcher
    reading: Callable[[str], QueueReading | None]
    reported: ReportedMetrics  # reported metrics
    servers: ReplicaServers  # metrics of replicas' servers
    fleet: FleetMetrics  # readings of GPUs and hosts
    # pollers of Prometheus servers, by name in the settings
    prometheus: Mapping[str, Poller[InstantQuery, InstantVector]]
    waiting: Poller[None, Counts]  # polls the allocator for waiting requests
    room: Poller[bytes, int]  # polls the allocator for how many more replicas fit, by their encoded ask
    clock: Clock  # the clock for ages
    # the wanted replicas of each endpoint by id, since its last look
    aims: dict[str, int] = field(default_factory=dict[str, int])

    def sample(self, endpoint: Endpoint, replicas: Sequence[Replica]) -> dict[str, Sample]:
        """The last values of an endpoint's signals, by signal id; `replicas`: those that have not ended."""
        ready = [one for one in replicas if one.state is ReplicaState.READY]
        ids = [one.id for one in ready]
        gpus = [uuid for one in ready if one.lease is not None for uuid in one.lease.gpu_uuids]
        return {signal.id: self._sample(endpoint, signal, ids, gpus) for signal in endpoint.spec.measured}

    def more(
        self, spec: EndpointSpec, facts: Callable[[], Sequence[AdapterFacts]], since: float = 0.0
    ) -> int | None:
        """How many more replicas the adapters have GPUs for; None if unknown, or nobody needs it.

        An engine that assigns GPUs itself counts as having as many as the endpoint may request: only it knows, and lets them
        wait. Answers requested before `since` do not count: GPUs granted since would count twice.
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
        ask = ask_to_wire(spec.template, sorted(nodes)).SerializeToString(deterministic=True)
        answer, oldest = self.room.ask(ask, period), max(since, self.clock.now() - DEFAULT_MAX_AGE)
        return answer.value if answer.at is not None and answer.at >= oldest else None

    def busy(self, endpoint: Endpoint) -> dict[str, float]:
        """How busy each replica of an endpoint says it is, by id; empty unless the spec needs it."""
        metric = endpoint.spec.busy_metric
        if not metric:
            return {}
        if metric.startswith(serving.PREFIX):
            return self.servers.by_replica(endpoint.id, metric.removeprefix(serving.PREFIX), DEFAULT_MAX_AGE)
        return self.reported.by_replica(endpoint.id, metric, self.clock.now(), DEFAULT_MAX_AGE)

    def keep(self, endpoint_id: str, replicas: Sequence[Replica]) -> None:
        """Forget what replicas of an endpoint reported, except these, which have not ended."""
        ids = {one.id for one in replicas}
        self.reported.keep(endpoint_id, ids)
        self.servers.keep(endpoint_id, ids)

    def forget(self, endpoint_id: str) -> None:
        """Forget what was reported of a deleted endpoint."""
        self.reported.forget(endpoint_id)
        self.servers.keep(endpoint_id, ())

    def _sample(
        self, endpoint: Endpoint, signal: Signal, ready: Sequence[str], gpus: Sequence[str]
    ) -> Sample:
        """The last value of one source; `ready` and `gpus`: ids of the ready replicas, and of the GPUs they hold."""
        # Often enough that each tick finds a new answer, younger than the signal's max_age.
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
            case ReplicaSignal(metric) if metric.startswith(serving.PREFIX):
                return self.servers.sample(
                    endpoint.id, metric.removeprefix(serving.PREFIX), ready, signal.oldest
                )
            case ReplicaSignal(metric):
                return self.reported.of_replicas(endpoint.id, metric, ready, self.clock.now(), signal.oldest)
            case PrometheusSignal(server, query):
                if server not in self.prometheus:
                    return Sample(problem=f"the settings name no prometheus {server!r}")
                asked = InstantQuery(query, signal.oldest)
                return prometheus_sample(self.prometheus[server].ask(asked, often))
            case EndpointSignal(other):
                count = self.aims.get(other)
                return (
                    Sample(problem=f"there is no {endpoint_name(other)}")
                    if count is None
                    else Sample((float(count),), self.clock.now(), proven_empty=not count)
                )
            case TaskSignal():
                return self.reported.tasks_of(endpoint.id)
            case WaitingSignal() as source:
                return waiting_sample(source, self.waiting.ask(None, often))


@asynccontextmanager
async def open_sources(
    reading: Callable[[str], QueueReading | None],
    prometheus: Mapping[str, PrometheusSettings],
    *,
    fleet: grpc.aio.Channel,
    allocator: grpc.aio.Channel,
    clock: Clock,
) -> AsyncGenerator[SignalSources]:
    """Open every source, kept current until the context ends; `reading` returns a queue watcher's last reading by id.

    FailedPreconditionError if a table [prometheus.NAME] of the configuration is invalid.
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
    """The history of every endpoint that reads queues, by the `reading` of watchers by id."""

    def __init__(self, reading: Callable[[str], QueueReading | None], store: Store) -> None:
        self._reading = reading
        self._store = store
        self._noted: dict[str, float] = {}
        self._written: dict[str, RecordedReading] = {}
        self._held: dict[str, RecordedReading] = {}

    async def note(self, endpoint: str, spec: EndpointSpec, at: Moment) -> None:
        """Record the current state of its queues, if it is time; nothing if one of them is unknown.

        While they do not change nothing is written, for at most an hour. A failed write leaves a gap in the history, but does
        not delay scaling.
        """
        if at.now - self._noted.get(endpoint, float("-inf")) < world.SPACING:
            return
        reading = _reading([self._reading(watcher) for watcher in spec.watchers], at.wall)
        if reading is None:
            return
        self._noted[endpoint] = at.now
        written = self._written.get(endpoint)
        if written is not None and reading.goes_on_from(self._held.get(endpoint, written)):
            held = replace(reading, since=written.at)
            self._held[endpoint] = held
            if held.at - written.at < world.LONGEST_HELD:
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
            _log.warning("cannot write readings of queues", endpoints=names, error=error.message)

    @asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Write pending readings when the context ends."""
        try:
            yield
        finally:
            if self._held:
                await self._keep([*self._held.items()])

    def forget(self, endpoint: str) -> None:
        """Drop the readings of a deleted endpoint."""
        for known in (self._noted, self._written, self._held):
            known.pop(endpoint, None)

    async def workload(self, endpoint: str, service: float | None, wall: datetime) -> list[Request]:
        """An endpoint's workload of the last day, `service` seconds per request or as learned; FailedPreconditionError."""
        until = wall.timestamp()  # later readings were made while the clock was wrong
        since = until - world.SPACING * world.KEPT
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
    """The queues' state together; None if one of them is unknown, or there are none."""
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
        """Set what an endpoint reads; empty for a deleted one."""
        if watchers:
            self._watchers[endpoint] = watchers
        else:
            self._watchers.pop(endpoint, None)

"""Queue watchers as declared by users, and the sweeps that read them, by the better of two ways that works.

With a management API, one request returns the ready and unacknowledged messages of all queues of a virtual host, and every few
seconds another returns consumers and rates; AMQP is not used. Without it, or while it fails, passive declares return ready
messages and consumers, one queue at a time (about 0.3 ms of a core each); unacknowledged messages, rates, and the queues that
match a pattern are unknown.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from uuid import uuid4

from gpuscale.autoscaler.domain.signals import (
    PENDING,
    NamePattern,
    QueueFailure,
    QueueReading,
    QueueState,
    QueueTarget,
    Watcher,
    WatchSpec,
    combined,
    failed,
    next_sweep,
    of_totals,
    pattern_problem,
)
from gpuscale.autoscaler.signals import rabbitmq
from gpuscale.autoscaler.signals.brokers import Broker, BrokerSettings, RetryGate, VirtualHostError, resolve
from gpuscale.autoscaler.state import watcher_store
from gpuscale.autoscaler.state.watcher_store import StoredWatcher
from gpuscale.common import errors
from gpuscale.common.names import watcher_name
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, TaskScope, uninterrupted
from gpuscale.common.secrets import environment as own_environment
from gpuscale.common.store.store import Store

NAMES_AT_ONCE = 100
"""Names that a thread matches with a pattern before it checks whether to stop."""

Publish = Callable[[QueueTarget, QueueReading | QueueFailure], None]
_Tell = Callable[[str, QueueReading | QueueFailure], None]
_log = get_logger(__name__)


class VirtualHostReader:
    """Reads queues of one virtual host of one broker; one caller at a time."""

    def __init__(
        self, broker: Broker, virtual_host: str, management: rabbitmq.ManagementClient | None, clock: Clock
    ) -> None:
        self._broker = broker
        self._virtual_host = virtual_host
        self._management = management
        self._clock = clock
        self._session = rabbitmq.AmqpSession(broker, virtual_host)
        self._gate = RetryGate()
        self._patterns: dict[str, NamePattern] = {}
        self._statistics = rabbitmq.QueueStatistics(management, virtual_host, clock) if management else None
        self._counted = False
        self._said: dict[str, str] = {}

    async def read(self, targets: Collection[QueueTarget], publish: Publish) -> None:
        """Read the targets and publish each as soon as it is known."""
        plain: dict[str, list[QueueTarget]] = {}
        for target in targets:
            if not target.pattern:
                plain.setdefault(target.queue, []).append(target)

        def tell(queue: str, result: QueueReading | QueueFailure) -> None:
            for target in plain[queue]:
                publish(
                    target,
                    self._rated(queue, result)
                    if target.rates and isinstance(result, QueueReading)
                    else result,
                )

        patterns = [target for target in targets if target.pattern]
        observed_at = self._clock.now()
        try:
            totals = await self._totals()
        except VirtualHostError as error:
            self._counted = False
            if self._management is not None:
                self._say("management", error.failure)
            for target in patterns:
                publish(target, error.failure)
            await self._declare(plain, tell, f"unacknowledged messages unknown: {error.failure.message}")
            return
        self._say("management", None)
        self._counted = True
        uncounted: list[str] = []
        for queue in plain:
            found = totals.get(queue)
            if found is None:
                tell(queue, QueueFailure(QueueState.NOT_FOUND, f"there is no queue {queue!r}"))
            elif (ready := found.messages_ready) is None or (
                unacked := found.messages_unacknowledged
            ) is None:
                uncounted.append(queue)
            else:
                consumers = self._statistics.consumers(queue) if self._statistics else "consumers unknown"
                tell(queue, of_totals(ready, unacked, observed_at, consumers))
        why = "unacknowledged messages unknown: the broker does not count them now"
        await self._declare(uncounted, tell, why)
        for target in patterns:
            publish(target, await self._matching(target, totals, observed_at))

    async def measure(self, rates: bool) -> None:
        """Read the broker's own statistics if it is time; beside `read`. `rates`: whether rates are needed."""
        if self._statistics is not None and self._counted:
            self._say("statistics", await self._statistics.refresh(rates))

    def keep(self, targets: Collection[QueueTarget]) -> None:
        """Forget all other targets."""
        patterns = {target.queue for target in targets if target.pattern}
        self._patterns = {text: known for text, known in self._patterns.items() if text in patterns}

    async def close(self) -> None:
        """Close its connection."""
        await self._session.close()

    async def _matching(
        self, target: QueueTarget, totals: Mapping[str, rabbitmq.Counted], observed_at: float
    ) -> QueueReading | QueueFailure:
        if target.queue not in self._patterns:
            try:
                self._patterns[target.queue] = NamePattern(target.queue)
            except ValueError as error:  # an earlier version accepted it
                return QueueFailure(QueueState.ERROR, f"pattern {target.queue!r} {error}")
        pattern = self._patterns[target.queue]
        names = pattern.unknown(totals)
        for start in range(0, len(names), NAMES_AT_ONCE):  # a thread cannot be stopped, so each does little
            await asyncio.to_thread(pattern.learn, names[start : start + NAMES_AT_ONCE])
        readings: list[QueueReading] = []
        for queue in pattern.of(totals):
            ready, unacked = totals[queue].messages_ready, totals[queue].messages_unacknowledged
            if ready is None or unacked is None:
                return QueueFailure(QueueState.ERROR, f"the broker does not count queue {queue!r} now")
            reading = of_totals(ready, unacked, observed_at, "consumers are not counted for a pattern")
            readings.append(self._rated(queue, reading) if target.rates else reading)
        if not readings:
            return QueueFailure(QueueState.NOT_FOUND, f"no queue matches {target.queue!r}")
        return combined(readings)

    def _rated(self, queue: str, reading: QueueReading) -> QueueReading:
        """A reading with its queue's rates, if known: they are not while the API fails."""
        if self._statistics is None or not self._counted:
            return reading
        return reading._replace(rates=self._statistics.rates(queue))

    async def _totals(self) -> dict[str, rabbitmq.Counted]:
        if self._management is None:
            text = f"no management API is configured for broker {self._broker.name}"
            raise VirtualHostError(QueueFailure(QueueState.ERROR, text))
        loop = asyncio.get_running_loop()
        self._gate.check(loop.time())
        try:
            totals = await self._management.totals(self._virtual_host)
        except VirtualHostError as error:
            self._gate.failed(error.failure, loop.time())
            raise
        self._gate.succeeded()
        return totals

    async def _declare(self, queues: Iterable[str], publish: _Tell, unacked_unknown: str) -> None:
        left = list(queues)
        while left:
            observed_at = self._clock.now()
            try:
                found = await self._session.declare(left[0])
            except VirtualHostError as error:
                self._say("amqp", error.failure)
                for queue in left:
                    publish(queue, error.failure)
                return
            self._say("amqp", None)
            if isinstance(found, QueueFailure):
                publish(left.pop(0), found)
            else:
                ready, consumers = found
                reading = QueueReading(QueueState.OK, ready, None, consumers, observed_at, unacked_unknown)
                publish(left.pop(0), reading)

    def _say(self, way: str, failure: QueueFailure | None) -> None:
        """Log the first failure of a way to the broker, each different one after it, and its recovery."""
        message = failure.message if failure else ""
        if message == self._said.get(way, ""):
            return
        self._said[way] = message
        context = {"broker": self._broker.name, "virtual_host": self._virtual_host, "way": way}
        if failure:
            _log.warning("queues cannot be read", state=failure.state.value, why=message, **context)
        else:
            _log.info("queues can be read again", **context)


MAX_VIRTUAL_HOSTS_AT_ONCE = 4


class BrokerSweeps:
    """Reads the watched queues of one broker, each at its own interval."""

    def __init__(self, broker: Broker, clock: Clock) -> None:
        self._broker = broker
        self._clock = clock
        self._management = rabbitmq.ManagementClient(broker, broker.management) if broker.management else None
        self._intervals: Mapping[QueueTarget, float] = {}
        self._next: dict[QueueTarget, float] = {}
        self._readings: dict[QueueTarget, QueueReading] = {}
        self._readers: dict[str, VirtualHostReader] = {}
        self._rated: frozenset[str] = frozenset()
        self._changed, self._swept = asyncio.Event(), asyncio.Event()

    def watch(self, intervals: Mapping[QueueTarget, float]) -> None:
        """Watch exactly these queues at these intervals; new ones, and those to be read more often, at once."""
        before = self._intervals
        self._next = {
            target: self._next[target] if target in before and before[target] <= interval else 0.0
            for target, interval in intervals.items()
        }
        self._readings = {target: self._readings.get(target, PENDING) for target in intervals}
        self._intervals = intervals
        self._rated = frozenset(target.virtual_host for target in intervals if target.rates)
        for host, reader in self._readers.items():
            reader.keep([target for target in intervals if target.virtual_host == host])
        self._changed.set()

    @property
    def counts_all(self) -> bool:
        """Whether the broker has a management API, which patterns and rates need."""
        return self._management is not None

    def reading(self, target: QueueTarget) -> QueueReading:
        """The last reading of a queue."""
        return self._readings.get(target, PENDING)

    async def run(self) -> None:
        """Sweep for ever; cancelled, close what was opened."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._measure(), name=f"statistics {self._broker.name}")
                while True:
                    await self._sweep()
                    self._swept.set()
                    # Until the next queue is due, or the watched ones change.
                    until = min(self._next.values(), default=None)
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(until):
                            await self._changed.wait()
        finally:
            for reader in self._readers.values():
                await reader.close()
            if self._management is not None:
                await self._management.close()

    async def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        due = [target for target, at in self._next.items() if at <= now]
        intervals = {self._intervals[target] for target in due}
        following = {interval: next_sweep(now, interval) for interval in intervals}
        self._next.update({target: following[self._intervals[target]] for target in due})
        for host in self._readers.keys() - {target.virtual_host for target in self._next}:
            await self._readers.pop(host).close()
        hosts = {target.virtual_host for target in due}
        some = asyncio.Semaphore(MAX_VIRTUAL_HOSTS_AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for host in hosts:
                targets = [target for target in due if target.virtual_host == host]
                group.create_task(self._read(host, targets, some), name=f"sweep {self._broker.name} {host}")

    async def _read(self, host: str, targets: Sequence[QueueTarget], some: asyncio.Semaphore) -> None:
        if host not in self._readers:
            self._readers[host] = VirtualHostReader(self._broker, host, self._management, self._clock)

        def publish(target: QueueTarget, result: QueueReading | QueueFailure) -> None:
            previous = self._readings.get(target)
            if previous is not None:  # it may no longer be watched
                self._readings[target] = (
                    failed(previous, result) if isinstance(result, QueueFailure) else result
                )

        async with some:
            await self._readers[host].read(targets, publish)

    async def _measure(self) -> None:
        """After each sweep, read the statistics that are due, for ever."""
        while True:
            await self._swept.wait()
            self._swept.clear()
            for host, reader in tuple(self._readers.items()):
                await reader.measure(host in self._rated)


# AMQP carries both names as short strings.
MAX_NAME_BYTES = 255

InUse = Callable[[str], Sequence[str]]


class QueueWatchers:
    """All queue watchers: durable in the store, cached in memory, read by one sweep per broker."""

    def __init__(self, store: Store, sweeps: Mapping[str, BrokerSweeps], clock: Clock, in_use: InUse) -> None:
        self._store = store
        self._sweeps = sweeps
        self._clock = clock
        self._in_use = in_use
        self._stored: dict[str, StoredWatcher] = {}
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Load the stored watchers and start to watch."""
        self._stored = {item.watcher.id: item for item in await self._store.read(watcher_store.load)}
        self._watch()

    @uninterrupted
    async def create(
        self, watcher_id: str, spec: WatchSpec, *, request_id: str, validate_only: bool = False
    ) -> Watcher:
        """Create a watcher, or return the one that this request id created.

        FailedPreconditionError if the configuration does not name the broker, or it cannot count what is requested.
        """
        # Stored ones are compared after an upgrade: a field that is added must not change what was known without it.
        parts = (watcher_id, spec.broker, spec.virtual_host, *spec.queues, repr(spec.interval))
        if spec.pattern or spec.rates:
            parts = (*parts, repr(spec.pattern), repr(spec.rates))
        fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        async with self._changing:
            known = next((one for one in self._stored.values() if one.request_id == request_id), None)
            if known is not None:
                if known.request_fingerprint != fingerprint:
                    raise errors.request_id_reused(request_id)
                return known.watcher
            if watcher_id in self._stored:
                name = watcher_name(watcher_id)
                raise errors.AlreadyExistsError(f"{name} exists", metadata={"name": name})
            self._check(spec)
            watcher = Watcher(watcher_id, spec, uuid4().hex, self._clock.wall())
            if not validate_only:
                stored = StoredWatcher(watcher, request_id, fingerprint)
                await self._store.write(lambda connection: watcher_store.add(connection, stored))
                self._stored[watcher_id] = stored
                self._watch()
            return watcher

    @uninterrupted
    async def update(
        self,
        watcher_id: str,
        change: Callable[[Watcher], WatchSpec],
        *,
        etag: str = "",
        validate_only: bool = False,
    ) -> Watcher:
        """Replace what is watched by `change` of it; an empty etag matches any. Raises like `create`, or AbortedError."""
        async with self._changing:
            stored = self._find(watcher_id, etag)
            before = stored.watcher
            spec = change(before)
            self._check(spec)
            if validate_only or spec == before.spec:
                return Watcher(watcher_id, spec, before.etag, before.create_time)
            watcher = Watcher(watcher_id, spec, uuid4().hex, before.create_time)
            await self._store.write(lambda connection: watcher_store.replace_spec(connection, watcher))
            self._stored[watcher_id] = StoredWatcher(watcher, stored.request_id, stored.request_fingerprint)
            self._watch()
            return watcher

    @uninterrupted
    async def delete(self, watcher_id: str, *, etag: str = "") -> None:
        """Delete a watcher that no endpoint reads (FailedPreconditionError); an empty etag matches any."""
        async with self._changing:
            self._find(watcher_id, etag)
            if endpoints := self._in_use(watcher_id):
                raise errors.FailedPreconditionError(
                    f"{watcher_name(watcher_id)} is read by {', '.join(endpoints)}",
                    reason="WATCHER_IN_USE",
                    metadata={"name": watcher_name(watcher_id), "endpoints": ",".join(endpoints)},
                )
            await self._store.write(
                lambda connection: watcher_store.remove(connection, watcher_id), frees=True
            )
            del self._stored[watcher_id]
            self._watch()

    def get(self, watcher_id: str) -> Watcher:
        """One watcher. Raises NotFoundError if there is none."""
        return self._find(watcher_id).watcher

    def every(self) -> Sequence[Watcher]:
        """All watchers, by id."""
        return [self._stored[watcher_id].watcher for watcher_id in sorted(self._stored)]

    def reading(self, watcher_id: str) -> QueueReading | None:
        """The last reading of a watcher; None if there is no such watcher."""
        stored = self._stored.get(watcher_id)
        if stored is None:
            return None
        spec = stored.watcher.spec
        if spec.broker not in self._sweeps:
            message = f"the configuration names no broker {spec.broker!r} any more"
            return QueueReading(QueueState.ERROR, message=message)
        return combined([self._sweeps[spec.broker].reading(target) for target in spec.targets])

    def states(self) -> Counter[str]:
        """The number of watchers by the state of their last reading."""
        readings = map(self.reading, self._stored)
        return Counter(reading.state.name for reading in readings if reading is not None)

    def _find(self, watcher_id: str, etag: str = "") -> StoredWatcher:
        name = watcher_name(watcher_id)
        found = errors.NotFoundError.unless(self._stored.get(watcher_id), name)
        errors.expect_etag(name, etag, found.watcher.etag)
        return found

    def _check(self, spec: WatchSpec) -> None:
        field = "queue" if len(spec.queues) == 1 else "queues"
        for where, name in (("virtual_host", spec.virtual_host), *((field, queue) for queue in spec.queues)):
            if len(name.encode()) > MAX_NAME_BYTES:
                raise errors.InvalidArgumentError(
                    f"must have at most {MAX_NAME_BYTES} bytes", field=f"queue_watcher.spec.{where}"
                )
        if spec.pattern and (wrong := pattern_problem(spec.queues[0])):
            raise errors.InvalidArgumentError(wrong, field="queue_watcher.spec.queue_pattern")
        if spec.broker not in self._sweeps:
            raise errors.FailedPreconditionError(
                f"the configuration names no broker {spec.broker!r}",
                reason="UNKNOWN_BROKER",
                metadata={"broker": spec.broker},
            )
        if (spec.pattern or spec.rates) and not self._sweeps[spec.broker].counts_all:
            raise errors.FailedPreconditionError(
                f"patterns and rates need the management API, which broker {spec.broker} does not have",
                reason="NO_MANAGEMENT_API",
                metadata={"broker": spec.broker},
            )

    def _watch(self) -> None:
        for broker, sweeps in self._sweeps.items():
            intervals: dict[QueueTarget, float] = {}
            specs = (one.watcher.spec for one in self._stored.values())
            for spec in (one for one in specs if one.broker == broker):
                for target in spec.targets:
                    intervals[target] = min(intervals.get(target, spec.interval), spec.interval)
            sweeps.watch(intervals)


@asynccontextmanager
async def open_watchers(
    store: Store,
    brokers: Mapping[str, BrokerSettings],
    clock: Clock,
    in_use: InUse,
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[QueueWatchers]:
    """The stored watchers, watched until the context ends; `in_use` names the endpoints that read one.

    `environment`: for GPUSCALE_BROKER_<NAME>_AMQP_URL and the like; None: this process's.
    """
    found = resolve(brokers, own_environment() if environment is None else environment)
    sweeps = {name: BrokerSweeps(broker, clock) for name, broker in found.items()}
    watchers = QueueWatchers(store, sweeps, clock, in_use)
    await watchers.load()
    async with TaskScope() as scope:
        for name, sweep in sweeps.items():
            scope.spawn(f"queue sweeps of broker {name}", sweep.run())
        yield watchers

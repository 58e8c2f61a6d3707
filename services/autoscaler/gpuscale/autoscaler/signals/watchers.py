"""Queue watchers as declared by users, and the sweeps that read them."""

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from uuid import uuid4

from gpuscale.autoscaler.domain.queues import (
    QueueReading,
    QueueState,
    QueueTarget,
    Watcher,
    WatchSpec,
    combined,
    pattern_problem,
)
from gpuscale.autoscaler.signals.brokers import BrokerSettings, resolve
from gpuscale.autoscaler.signals.queue_reading import BrokerSweeps
from gpuscale.autoscaler.state import watcher_store
from gpuscale.autoscaler.state.watcher_store import StoredWatcher
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    expect_etag,
)
from gpuscale.common.names import watcher_name
from gpuscale.common.runtime.tasks import Clock, TaskScope, uninterrupted
from gpuscale.common.secrets import environment as own_environment
from gpuscale.common.store.store import Store

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
        parts = (watcher_id, spec.broker, spec.virtual_host, *spec.queues, repr(spec.interval))
        if spec.pattern or spec.rates:
            parts = (*parts, repr(spec.pattern), repr(spec.rates))
        fingerprint = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        async with self._changing:
            known = next((one for one in self._stored.values() if one.request_id == request_id), None)
            if known is not None:
                if known.request_fingerprint != fingerprint:
                    text = "the request id was used for another watcher"
                    raise AlreadyExistsError(text, reason="REQUEST_ID_REUSED")
                return known.watcher
            if watcher_id in self._stored:
                name = watcher_name(watcher_id)
                raise AlreadyExistsError(f"{name} exists", metadata={"name": name})
            self._check(spec)
            watcher = Watcher(watcher_id, spec, _new_etag(), self._clock.wall())
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
            watcher = Watcher(watcher_id, spec, _new_etag(), before.create_time)
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
                raise FailedPreconditionError(
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
        name, found = watcher_name(watcher_id), self._stored.get(watcher_id)
        if found is None:
            raise NotFoundError(f"there is no {name}", metadata={"name": name})
        expect_etag(name, etag, found.watcher.etag)
        return found

    def _check(self, spec: WatchSpec) -> None:
        field = "queue" if len(spec.queues) == 1 else "queues"
        for where, name in (("virtual_host", spec.virtual_host), *((field, queue) for queue in spec.queues)):
            if len(name.encode()) > MAX_NAME_BYTES:
                raise InvalidArgumentError(
                    f"must have at most {MAX_NAME_BYTES} bytes", field=f"queue_watcher.spec.{where}"
                )
        if spec.pattern and (wrong := pattern_problem(spec.queues[0])):
            raise InvalidArgumentError(wrong, field="queue_watcher.spec.queue_pattern")
        if spec.broker not in self._sweeps:
            raise FailedPreconditionError(
                f"the configuration names no broker {spec.broker!r}",
                reason="UNKNOWN_BROKER",
                metadata={"broker": spec.broker},
            )
        if (spec.pattern or spec.rates) and not self._sweeps[spec.broker].counts_all:
            raise FailedPreconditionError(
                f"patterns and rates need the management API, which broker {spec.broker} does not have",
                reason="NO_MANAGEMENT_API",
                metadata={"broker": spec.broker},
            )

    def _watch(self) -> None:
        for broker, sweeps in self._sweeps.items():
            intervals: dict[QueueTarget, float] = {}
            for spec in (
                one.watcher.spec for one in self._stored.values() if one.watcher.spec.broker == broker
            ):
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


def _new_etag() -> str:
    return uuid4().hex

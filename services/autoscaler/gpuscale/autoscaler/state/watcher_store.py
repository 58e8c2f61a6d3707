"""Queue watchers, and the history of endpoints' queues, on disk. See `store`."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta

from sqlmodel import Field, SQLModel, col, delete, insert, select, update

from gpuscale.autoscaler.backtest import world
from gpuscale.autoscaler.backtest.world import RecordedReading
from gpuscale.autoscaler.domain.signals import Watcher, WatchSpec
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.store.store import Prepared, Whole

_EPOCH = datetime.fromtimestamp(0, UTC)
_SEPARATOR = "\n"  # the contract allows no control character in a text
_MICROSECOND = timedelta(microseconds=1)


class WatcherRow(SQLModel, table=True):
    """One queue watcher, with the request that created it."""

    id: str = Field(primary_key=True)
    broker: str
    virtual_host: str
    queue: str
    """Names of queues, one per line, or one pattern."""
    interval_seconds: float
    etag: str
    create_time_us: int = Field(sa_type=Whole)
    request_id: str = Field(unique=True)
    request_fingerprint: str
    pattern: bool = False
    rates: bool = False


@dataclass(frozen=True, slots=True)
class StoredWatcher:
    """A watcher, and the id and fingerprint of the request that created it."""

    watcher: Watcher
    request_id: str
    request_fingerprint: str


def load(connection: Connection) -> Sequence[StoredWatcher]:
    """Every watcher, by id."""
    found: list[StoredWatcher] = []
    for row in connection.execute(select(WatcherRow)).mappings():
        queues = tuple(row["queue"].split(_SEPARATOR))
        spec = WatchSpec(
            row["broker"], row["virtual_host"], queues, row["pattern"], row["rates"], row["interval_seconds"]
        )
        watcher = Watcher(row["id"], spec, row["etag"], _EPOCH + row["create_time_us"] * _MICROSECOND)
        found.append(StoredWatcher(watcher, row["request_id"], row["request_fingerprint"]))
    return sorted(found, key=lambda one: one.watcher.id)


def add(connection: Connection, stored: StoredWatcher) -> None:
    """Add a watcher; its id and request id must be new."""
    watcher = stored.watcher
    connection.execute(
        insert(WatcherRow).values(
            id=watcher.id,
            create_time_us=(watcher.create_time - _EPOCH) // _MICROSECOND,
            request_id=stored.request_id,
            request_fingerprint=stored.request_fingerprint,
            **_spec_columns(watcher),
        )
    )


def replace_spec(connection: Connection, watcher: Watcher) -> None:
    """Update the spec and etag of a watcher."""
    connection.execute(
        update(WatcherRow).where(col(WatcherRow.id) == watcher.id).values(**_spec_columns(watcher))
    )


def remove(connection: Connection, watcher_id: str) -> None:
    """Remove a watcher, if it exists."""
    connection.execute(delete(WatcherRow).where(col(WatcherRow.id) == watcher_id))


def _spec_columns(watcher: Watcher) -> dict[str, str | float]:
    spec = watcher.spec
    return {
        "broker": spec.broker,
        "virtual_host": spec.virtual_host,
        "queue": _SEPARATOR.join(spec.queues),
        "pattern": spec.pattern,
        "rates": spec.rates,
        "interval_seconds": spec.interval,
        "etag": watcher.etag,
    }


class ReadingRow(SQLModel, table=True):
    """A reading; its index is the time of day, so that it replaces the one a day before."""

    endpoint: str = Field(primary_key=True)
    place: int = Field(primary_key=True, sa_type=Whole)
    at: float
    ready: float
    unacked: float
    published: float
    delivered: float
    since: float | None = None


_PUT_READING = Prepared.replacing(SQLModel.metadata.tables["readingrow"])


def keep(connection: Connection, readings: Iterable[tuple[str, RecordedReading]]) -> None:
    """Write readings of endpoints, by id."""
    rows = [
        {"endpoint": endpoint, "place": int(one.at // world.SPACING) % world.KEPT, **asdict(one)}
        for endpoint, one in readings
    ]
    _PUT_READING.run(connection, rows)


def readings(connection: Connection, endpoint: str, since: float, until: float) -> list[RecordedReading]:
    """The readings of an endpoint between two moments, in seconds since 1970; oldest first."""
    at = col(ReadingRow.at)
    own = select(ReadingRow).where(col(ReadingRow.endpoint) == endpoint, at >= since, at <= until)
    return [
        RecordedReading(
            row["at"], row["ready"], row["unacked"], row["published"], row["delivered"], row["since"]
        )
        for row in connection.execute(own.order_by(at)).mappings()
    ]


def remove_readings(connection: Connection, endpoint: str) -> None:
    """Remove all readings of an endpoint."""
    connection.execute(delete(ReadingRow).where(col(ReadingRow.endpoint) == endpoint))

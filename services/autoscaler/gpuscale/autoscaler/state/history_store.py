"""What the queues of endpoints were like, on disk: a day of each, in as many rows as a day has readings. See `store`."""

from collections.abc import Iterable
from dataclasses import asdict

from sqlmodel import Field, SQLModel, col, delete, insert, select

from gpuscale.autoscaler.backtest import history
from gpuscale.autoscaler.backtest.history import Reading
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.store.schema import Whole


class ReadingRow(SQLModel, table=True):
    """A reading; its place follows from the time of day, so that it takes the place of the one a day before."""

    endpoint: str = Field(primary_key=True)
    place: int = Field(primary_key=True, sa_type=Whole)
    at: float
    ready: float
    unacked: float
    published: float
    delivered: float
    since: float | None = None


def keep(connection: Connection, readings: Iterable[tuple[str, Reading]]) -> None:
    """Keep readings of endpoints, by id."""
    for endpoint, one in readings:
        place = int(one.at // history.SPACING) % history.KEPT
        same = (col(ReadingRow.endpoint) == endpoint, col(ReadingRow.place) == place)
        connection.execute(delete(ReadingRow).where(*same))
        connection.execute(insert(ReadingRow).values(endpoint=endpoint, place=place, **asdict(one)))


def readings(connection: Connection, endpoint: str, since: float, until: float) -> list[Reading]:
    """The readings of an endpoint between two moments, in seconds since 1970; oldest first."""
    at = col(ReadingRow.at)
    own = select(ReadingRow).where(col(ReadingRow.endpoint) == endpoint, at >= since, at <= until)
    rows = connection.execute(own.order_by(at)).mappings()
    return [
        Reading(row["at"], row["ready"], row["unacked"], row["published"], row["delivered"], row["since"])
        for row in rows
    ]


def remove_readings(connection: Connection, endpoint: str) -> None:
    """Forget all readings of an endpoint."""
    connection.execute(delete(ReadingRow).where(col(ReadingRow.endpoint) == endpoint))

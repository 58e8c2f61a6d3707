"""Backtests and their reports on disk, as messages of the contract. See `store`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlmodel import Field, SQLModel, col, delete, func, insert, select

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.state.store import Connection
from gpuscale.common.store.store import Prepared, Whole


class BacktestRow(SQLModel, table=True):
    """One backtest, with the request that created it."""

    name: str = Field(primary_key=True)
    message: bytes
    request_id: str = Field(unique=True)
    fingerprint: str


class BacktestReportRow(SQLModel, table=True):
    """The figures of one policy, by its index."""

    backtest: str = Field(primary_key=True)
    place: int = Field(primary_key=True, sa_type=Whole)
    message: bytes


_PUT = Prepared.replacing(SQLModel.metadata.tables["backtestrow"])
_BACKTEST, _REPORT = col(BacktestReportRow.backtest), col(BacktestReportRow.message)


@dataclass(slots=True)
class StoredBacktest:
    """A backtest, the id and fingerprint of the request that created it, and the bytes of its reports."""

    message: api.Backtest
    request_id: str
    fingerprint: str
    report_bytes: int = 0


def load(connection: Connection) -> Sequence[StoredBacktest]:
    """Every backtest."""
    query = select(_BACKTEST, func.sum(func.length(_REPORT))).group_by(_BACKTEST)
    sizes: dict[str, int] = {name: int(size) for name, size in connection.execute(query)}
    return [
        StoredBacktest(
            api.Backtest.FromString(row["message"]),
            row["request_id"],
            row["fingerprint"],
            sizes.get(row["name"], 0),
        )
        for row in connection.execute(select(BacktestRow)).mappings()
    ]


def save(
    connection: Connection, one: StoredBacktest, reports: Sequence[tuple[int, api.BacktestReport]] = ()
) -> None:
    """Insert or replace a backtest, and add reports by index."""
    row = {
        "name": one.message.name,
        "message": one.message.SerializeToString(),
        "request_id": one.request_id,
        "fingerprint": one.fingerprint,
    }
    _PUT.run(connection, [row])
    for place, report in reports:
        values = {"backtest": one.message.name, "place": place, "message": report.SerializeToString()}
        connection.execute(insert(BacktestReportRow).values(values))


def remove(connection: Connection, names: Collection[str]) -> None:
    """Remove backtests with their reports."""
    connection.execute(delete(BacktestReportRow).where(_BACKTEST.in_(names)))
    connection.execute(delete(BacktestRow).where(col(BacktestRow.name).in_(names)))


def report(connection: Connection, name: str, place: int) -> api.BacktestReport | None:
    """The report of a backtest at an index; None if there is none."""
    query = select(_REPORT).where(
        col(BacktestReportRow.backtest) == name, col(BacktestReportRow.place) == place
    )
    found = connection.execute(query).scalar_one_or_none()
    return None if found is None else api.BacktestReport.FromString(found)

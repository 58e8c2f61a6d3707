"""Cordons on disk, in the file of the allocator's state."""

from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Connection, delete, select
from sqlmodel import Field

from gpuscale.allocator.domain import cordons as model
from gpuscale.allocator.state.schema_store import Table
from gpuscale.allocator.state.sealing import sealed
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.schema import Prepared, Whole


class Cordon(Table, table=True):
    """A cordon. `deadline_seconds` is of CLOCK_BOOTTIME and means something only within `boot_id`."""

    node: str = Field(primary_key=True)
    gpu: str = Field(primary_key=True)
    reason: str
    author: str
    create_time: float
    deadline_seconds: float | None
    grace_seconds: float | None
    boot_id: str
    checksum: int = Field(default=0, sa_type=Whole)


_CORDON = Table.metadata.tables["cordon"]
_PUT = Prepared.replacing(_CORDON)


class CordonStore:
    """Reads and writes cordons. Every write returns once it is on disk, and raises as `Store.write` does.

    Args:
        boot_id: of the current boot, to which all deadlines written belong.
    """

    def __init__(self, store: AllocatorStore, boot_id: str) -> None:
        self._store = store
        self._boot_id = boot_id

    async def load(self, now: float) -> tuple[list[model.Cordon], list[model.Cordon]]:
        """Every cordon: those of this boot, and those of an earlier one, whose deadlines start anew."""

        def work(connection: Connection) -> list[tuple[model.Cordon, str]]:
            rows = connection.execute(select(_CORDON)).mappings()
            return [(_from_row(Cordon(**row)), row["boot_id"]) for row in rows]

        found = await self._store.read(work)
        earlier = [model.rebased(one, now) for one, boot in found if boot != self._boot_id]
        return [one for one, boot in found if boot == self._boot_id], earlier

    async def save(self, cordons: Sequence[model.Cordon]) -> None:
        """Write cordons, in place of those there are of the same spots."""
        rows = [sealed(self._to_row(cordon)) for cordon in cordons]

        def work(connection: Connection) -> None:
            _PUT.run(connection, rows)

        await self._store.change(work)

    async def remove(self, spot: model.Spot) -> None:
        """Delete the cordon of a spot, if there is one."""

        def work(connection: Connection) -> None:
            connection.execute(delete(_CORDON).where(_CORDON.c.node == spot.node, _CORDON.c.gpu == spot.gpu))

        await self._store.change(work)

    def _to_row(self, cordon: model.Cordon) -> dict[str, object]:
        return {
            "node": cordon.spot.node,
            "gpu": cordon.spot.gpu,
            "reason": cordon.reason,
            "author": cordon.author,
            "create_time": cordon.created.timestamp(),
            "deadline_seconds": cordon.deadline,
            "grace_seconds": cordon.grace,
            "boot_id": self._boot_id,
        }


def _from_row(row: Cordon) -> model.Cordon:
    return model.Cordon(
        spot=model.Spot(row.node, row.gpu),
        reason=row.reason,
        author=row.author,
        created=datetime.fromtimestamp(row.create_time, UTC),
        deadline=row.deadline_seconds,
        grace=row.grace_seconds,
    )

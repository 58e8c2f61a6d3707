"""Bookings on disk, in the allocator's state. Their table is created on open and needs no schema version."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json
from sqlalchemy import delete, select
from sqlmodel import Field

from gpuscale.allocator.domain import bookings
from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.state.integrity import damaged, is_whole, sealed
from gpuscale.allocator.state.schema import Table
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.store import Prepared, Whole


class Booking(Table, table=True):
    """A booking. `ask` and `spots` are JSON; times are seconds since 1970."""

    id: str = Field(primary_key=True)
    request_id: str = Field(unique=True)
    fingerprint: str
    owner: str
    tenant: str
    title: str
    ask: str
    spots: str
    start_time: float
    end_time: float
    create_time: float
    state: str
    note: str
    checksum: int = Field(default=0, sa_type=Whole)


_BOOKING = Table.metadata.tables["booking"]
_PUT = Prepared.replacing(_BOOKING)
_TEXTS = ("id", "request_id", "fingerprint", "owner", "tenant", "title", "note")
_TIMES = {"start": "start", "end": "end", "created": "create"}
"""Columns of the same name as what they hold, and the first words of those of times."""
_ASK, _SPOTS = TypeAdapter(Ask), TypeAdapter(tuple[tuple[str, str], ...])


@dataclass(eq=False)
class BookingStore:
    """Reads and writes bookings. Every write returns once it is on disk, and raises like `Store.write`."""

    store: AllocatorStore

    async def load(self, horizon: float) -> bookings.Bookings:
        """Load every booking; STATE_INCONSISTENT if one is damaged."""
        rows: list[dict[str, Any]] = await self.store.read(
            lambda connection: [dict(row) for row in connection.execute(select(_BOOKING)).mappings()]
        )
        found = bookings.Bookings(horizon)
        for row in rows:
            if not is_whole(row):
                raise damaged(f"the stored booking {row['id']}")
            del row["checksum"]
            times = {name: row.pop(f"{column}_time") for name, column in _TIMES.items()}
            ask, spots = _ASK.validate_json(row.pop("ask")), _SPOTS.validate_json(row.pop("spots"))
            state = bookings.BookingState(row.pop("state"))
            found.put(bookings.Booking(**row, **times, ask=ask, spots=spots, state=state))
        return found

    async def save(self, one: bookings.Booking) -> None:
        """Write a booking, replacing its earlier value."""
        row: dict[str, object] = {name: getattr(one, name) for name in _TEXTS}
        row |= {f"{column}_time": float(getattr(one, name)) for name, column in _TIMES.items()}
        row |= {"state": str(one.state)} | {
            name: to_json(getattr(one, name)).decode() for name in ("ask", "spots")
        }
        await self.store.change(lambda connection: _PUT.run(connection, [sealed(row)]))

    async def remove(self, ids: Iterable[str]) -> None:
        """Delete bookings."""
        gone = delete(_BOOKING).where(_BOOKING.c.id.in_([*ids]))
        await self.store.change(lambda connection: connection.execute(gone))

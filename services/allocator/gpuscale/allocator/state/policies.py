"""Use policies and notifications on disk, in the allocator's state.

It stores what admins declare, what policies track and did, and pending notifications. None of it decides who holds a GPU, so
its rows have no checksums.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import to_json
from sqlalchemy import Connection, bindparam, delete, insert, select, update
from sqlmodel import Field

from gpuscale.allocator.domain.notifications import NotifiedEvent
from gpuscale.allocator.domain.use_policies import PolicyAct, Track
from gpuscale.allocator.state.schema import Table
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.store.store import Prepared, Whole


class DeclaredPolicy(Table, table=True):
    """A use policy or a notification target: `body` is the JSON of its spec in the contract."""

    kind: str = Field(primary_key=True)
    id: str = Field(primary_key=True)
    body: str
    etag: str
    create_time: float
    request_id: str
    fingerprint: str


class PolicyTrack(Table, table=True):
    """A track, with times of `boot_id`; `etag` is the policy's. The row without a policy has the time of the last look."""

    policy: str = Field(primary_key=True)
    subject: str = Field(primary_key=True)
    etag: str
    boot_id: str
    body: str


class PolicyActed(Table, table=True):
    """An act of a policy, by number."""

    number: int = Field(primary_key=True, sa_type=Whole, sa_column_kwargs={"autoincrement": False})
    body: str


class PowerChanged(Table, table=True):
    """A change of a GPU's cap, by number."""

    number: int = Field(primary_key=True, sa_type=Whole, sa_column_kwargs={"autoincrement": False})
    body: str


class PendingLetter(Table, table=True):
    """An event that was not delivered yet to a target."""

    number: int = Field(primary_key=True, sa_type=Whole, sa_column_kwargs={"autoincrement": False})
    target: str
    event: str
    attempts: int = Field(default=0, sa_type=Whole)
    problem: str = ""
    dead: bool = False


class ToldTrouble(Table, table=True):
    """A node that is down or a GPU in quarantine, as reported to targets."""

    name: str = Field(primary_key=True)


_TABLES = Table.metadata.tables
_DECLARED, _TRACK = _TABLES["declaredpolicy"], _TABLES["policytrack"]
_ACTED, _OUTBOX, _TOLD = _TABLES["policyacted"], _TABLES["pendingletter"], _TABLES["toldtrouble"]
_POWER = _TABLES["powerchanged"]
_PUT_DECLARED, _PUT_TRACK = Prepared.replacing(_DECLARED), Prepared.replacing(_TRACK)
_DROP_TRACK = Prepared(
    delete(_TRACK).where(_TRACK.c.policy == bindparam("policy"), _TRACK.c.subject == bindparam("subject"))
)
_ADD_ACT = Prepared(insert(_ACTED))
_FORGET_ACTS = Prepared(delete(_ACTED).where(_ACTED.c.number <= bindparam("most")))
_ADD_POWER = Prepared(insert(_POWER))
_FORGET_POWER = Prepared(delete(_POWER).where(_POWER.c.number <= bindparam("most")))
_ADD = Prepared(insert(_OUTBOX))
_TELL = Prepared(insert(_TOLD))
_TELL_NO_MORE = Prepared(delete(_TOLD).where(_TOLD.c.name == bindparam("key")))
_SENT = Prepared(delete(_OUTBOX).where(_OUTBOX.c.number == bindparam("key")))
_FAILED = Prepared(
    update(_OUTBOX)
    .where(_OUTBOX.c.number == bindparam("key"))
    .values(attempts=bindparam("attempts"), problem=bindparam("problem"), dead=bindparam("dead"))
)
_TO_TRACK, _TO_ACT, _TO_EVENT = TypeAdapter(Track), TypeAdapter(PolicyAct), TypeAdapter(NotifiedEvent)
ACTS_KEPT = 10_000
"""Acts, and changes of power limits, that are kept, the last ones."""


@dataclass(frozen=True, slots=True)
class PowerChange:
    """A change of a GPU's cap, None for no cap; the budget it belongs to, and why. `gpu` is a resource name.

    With `profiles`, it records an order for these MIG instances instead of a cap, and the reason says how the order ended.
    """

    gpu: str
    before: float | None
    after: float | None
    budget: str
    reason: str
    time: datetime
    profiles: tuple[str, ...] = ()


_TO_CHANGE = TypeAdapter(PowerChange)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What an admin declared, as stored."""

    id: str
    body: str
    etag: str
    create_time: float
    request_id: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Letter:
    """An event for a target. `attempts` failed, the last one with `problem`; a `dead` letter is not sent again."""

    number: int
    target: str
    event: NotifiedEvent
    attempts: int = 0
    problem: str = ""
    dead: bool = False


_TO_LETTER = TypeAdapter(Letter)


@dataclass(frozen=True, slots=True)
class FollowedTrack:
    """A track with the etag of its policy."""

    track: Track
    etag: str


Key = tuple[str, str]
"""The id of a policy, and the name of a subject."""


@dataclass(eq=False)
class PolicyStore:
    """Reads and writes all this, in times of the current boot. Writes return once on disk, and raise like `Store.write`."""

    store: AllocatorStore
    boot_id: str

    async def declared(self, kind: str) -> list[Declaration]:
        """All declarations of a kind."""
        rows = await self._all(select(_DECLARED).where(_DECLARED.c.kind == kind))
        return [Declaration(**{key: value for key, value in row.items() if key != "kind"}) for row in rows]

    async def declare(self, kind: str, one: Declaration) -> None:
        """Write a declaration, replacing the one with its id."""
        row = {name: getattr(one, name) for name in Declaration.__dataclass_fields__} | {"kind": kind}
        await self.store.change(lambda connection: _run(_PUT_DECLARED, connection, [row]))

    async def withdraw(self, kind: str, key: str) -> None:
        """Delete a declaration; for a target, with its undelivered events."""

        def work(connection: Connection) -> None:
            connection.execute(delete(_DECLARED).where(_DECLARED.c.kind == kind, _DECLARED.c.id == key))
            if kind == "targets":
                connection.execute(delete(_OUTBOX).where(_OUTBOX.c.target == key))

        await self.store.change(work)

    async def tracks(self, now: float) -> dict[Key, FollowedTrack]:
        """All tracks, as of their last look."""
        rows = await self._all(select(_TRACK))
        looked = next((float(row["body"]) for row in rows if not row["policy"]), 0.0)
        found: dict[Key, FollowedTrack] = {}
        for row in rows:
            if row["policy"]:
                track = _TO_TRACK.validate_json(row["body"])
                track = track.after_gap(looked) if row["boot_id"] == self.boot_id else track.rebased(now)
                found[row["policy"], row["subject"]] = FollowedTrack(track, row["etag"])
        return found

    async def acts(self) -> list[tuple[int, PolicyAct]]:
        """All acts, with their numbers, oldest first."""
        rows = await self._all(select(_ACTED).order_by(_ACTED.c.number))
        return [(row["number"], _TO_ACT.validate_json(row["body"])) for row in rows]

    async def save_look(
        self,
        now: float,
        changed: Mapping[Key, FollowedTrack | None],
        acts: Sequence[tuple[int, PolicyAct]],
        letters: Sequence[Letter],
    ) -> None:
        """Write a look's changed tracks, acts and letters in one transaction; None removes a track."""
        tracks = [
            {
                "policy": policy,
                "subject": subject,
                "etag": one.etag,
                "boot_id": self.boot_id,
                "body": to_json(one.track).decode(),
            }
            for (policy, subject), one in changed.items()
            if one is not None
        ]
        tracks.append({"policy": "", "subject": "", "etag": "", "boot_id": self.boot_id, "body": repr(now)})
        over = [{"policy": key[0], "subject": key[1]} for key, one in changed.items() if one is None]
        rows = [{"number": number, "body": to_json(act).decode()} for number, act in acts]

        def work(connection: Connection) -> None:
            _run(_PUT_TRACK, connection, tracks)
            _run(_DROP_TRACK, connection, over)
            _run(_ADD_ACT, connection, rows)
            if rows:
                _FORGET_ACTS.run(connection, [{"most": acts[-1][0] - ACTS_KEPT}])
            post(connection, letters)

        await self.store.change(work)

    async def power_changes(self) -> list[tuple[int, PowerChange]]:
        """Changes of caps, each with its number, oldest first."""
        rows = await self._all(select(_POWER).order_by(_POWER.c.number))
        return [(row["number"], _TO_CHANGE.validate_json(row["body"])) for row in rows]

    async def save_power_changes(self, changes: Sequence[tuple[int, PowerChange]]) -> None:
        """Write changes of caps."""
        rows = [{"number": number, "body": to_json(one).decode()} for number, one in changes]

        def work(connection: Connection) -> None:
            _ADD_POWER.run(connection, rows)
            _FORGET_POWER.run(connection, [{"most": changes[-1][0] - ACTS_KEPT}])

        await self.store.change(work)

    async def letters(self) -> list[Letter]:
        """Undelivered letters, oldest first."""
        rows = await self._all(select(_OUTBOX).order_by(_OUTBOX.c.number))
        return [
            _TO_LETTER.validate_python({**row, "event": _TO_EVENT.validate_json(row["event"])})
            for row in rows
        ]

    async def told(self) -> set[str]:
        """The nodes and GPUs whose trouble was reported to targets, and that are not known to have recovered."""
        # Earlier versions wrote one without a name.
        return {row["name"] for row in await self._all(select(_TOLD)) if row["name"]}

    async def post(self, letters: Sequence[Letter], told: Iterable[str], over: Iterable[str]) -> None:
        """Store letters to send, whose trouble they report, and whose is over."""
        begun, gone = [{"name": name} for name in told], [{"key": name} for name in over]

        def work(connection: Connection) -> None:
            post(connection, letters)
            _run(_TELL, connection, begun)
            _run(_TELL_NO_MORE, connection, gone)

        await self.store.change(work)

    async def settle(self, sent: Iterable[int], failed: Iterable[Letter]) -> None:
        """Remove letters that were sent or dropped, and record failed attempts."""
        gone = [{"key": number} for number in sent]
        noted = [
            {"key": one.number, "attempts": one.attempts, "problem": one.problem, "dead": one.dead}
            for one in failed
        ]

        def work(connection: Connection) -> None:
            _run(_SENT, connection, gone)
            _run(_FAILED, connection, noted)

        await self.store.change(work)

    async def _all(self, query: Any) -> Sequence[Any]:
        return await self.store.read(lambda connection: connection.execute(query).mappings().all())


def post(connection: Connection, letters: Sequence[Letter]) -> None:
    """Store letters to send, inside the open transaction."""
    rows = [
        {
            "number": one.number,
            "target": one.target,
            "event": to_json(one.event).decode(),
            "attempts": one.attempts,
            "problem": one.problem,
            "dead": int(one.dead),
        }
        for one in letters
    ]
    _run(_ADD, connection, rows)


def _run(statement: Prepared, connection: Connection, rows: Sequence[Mapping[str, object]]) -> None:
    if rows:
        statement.run(connection, rows)

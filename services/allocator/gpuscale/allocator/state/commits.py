"""Commits: the second half of every change, which waits for the disk, and the notice to listeners afterwards.

This is the group commit: changes that wait together are written in one transaction and answered in one turn of the event loop.
The store below could group them too, but only as separate works: 32 grants in one save take 47 us of CPU each, 32 saves in one
transaction 98. So only one save runs at a time, and groups below have one member. A caller who gives up neither undoes nor
drops a change, and one who repeats the request waits for the same outcome.

Everything that may make room is announced by `Changes` alone: the end of a reservation once it is on disk, news of a node, an
uncordon.
"""

import asyncio
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Final, NoReturn

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation
from gpuscale.allocator.state.policies import Letter, post
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common.errors import UnavailableError
from gpuscale.common.runtime import tasks

_Error = UnavailableError | None
_Pair = tuple[Reservation | None, Reservation]
_What = tuple[Sequence[Reservation], Sequence[Reservation], Sequence[Reservation], Sequence[Letter]]
"""What a group adds, changes and begins, and the letters to write with it."""
_Filled = asyncio.Future["tuple[_Unit, Exception, Sequence[Reservation]] | None"]
"""Done once a change waits; or with one that could not be written alone, why, and what it adds."""
_TOLD = attrgetter("fence", "ttl", "revoke_at", "job")
"""Changes of a live reservation that are reported to watchers and targets: a renewal alone is not."""


class Outcome:
    """The outcome of a write; used from one event loop.

    A caller who gives up does not affect the others, and the answer reaches all of them in the turn of the loop in which it is
    known (a shielded future takes two).
    """

    __slots__ = ("_error", "_listeners", "_waiters", "known")

    def __init__(self) -> None:
        self.known = False
        self._error: _Error = None
        self._waiters: list[asyncio.Future[_Error]] = []
        self._listeners: list[Callable[[_Error], None]] = []

    def __await__(self) -> Generator[Any, None, _Error]:
        """None once the change is on disk and in the ledger; the error if the write failed and was undone."""
        if self.known:
            return self._error
        waiter: asyncio.Future[_Error] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return (yield from waiter)

    def on_settled(self, listener: Callable[[_Error], None]) -> None:
        """Call a listener when it is settled; it must be quick and not raise."""
        self._listeners.append(listener)

    def settle(self, error: _Error) -> None:
        """Notify everybody; once."""
        self.known, self._error = True, error
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(error)
        for listener in self._listeners:
            listener(error)


class Changes:
    """Tells listeners of changed reservations, and of new room. Listeners must be quick and not raise."""

    def __init__(self) -> None:
        self._followers: list[tuple[Callable[[Reservation, bool], None], bool]] = []
        self._listeners: list[Callable[[Collection[str] | None], None]] = []

    def on_change(self, follower: Callable[[Reservation, bool], None], *, ends: bool = False) -> None:
        """Call a follower with each changed or (`ends`) ended reservation, and whether more than its deadline changed."""
        self._followers.append((follower, ends))

    def on_room(self, listener: Callable[[Collection[str] | None], None]) -> None:
        """Call a listener whenever room may have appeared, with the nodes it may be on."""
        self._listeners.append(listener)

    def publish(self, reservations: Iterable[Reservation], renewed: Collection[str] = ()) -> None:
        """Reservations have changed, on disk; those in `renewed`, by id, only in their deadline."""
        for follower, ends in self._followers:
            for reservation in reservations:
                if not (ends and reservation.live):
                    follower(reservation, reservation.id not in renewed)

    def room(self, nodes: Collection[str] | None = None) -> None:
        """Room may have appeared: on these nodes, or anywhere; on none of them if a quota may admit more."""
        for listener in self._listeners:
            listener(nodes)


ENOUGH: Final = 32
"""A group of this size is written at once: others are examined while it is written and answered."""
WRITES: Final = 8
"""A group stays open for at most the time of this many writes,"""
WINDOW: Final = 0.05
"""and never longer than this."""
_RISING: Final = 0.1
_FALLING: Final = 0.5
"""Weight of a write that was slower than usual, or faster: one that hung predicts little."""
_FIRST_WRITE: Final = 0.001


class GroupWindow:
    """How long a group stays open for others. Pure; times in seconds.

    Replies that leave together cost a third less than single ones, and callers who were answered together come back together
    (189 instead of 379 us of CPU at 64 callers). A write shows how many callers there are: changes that arrive while it runs
    are from callers other than those waiting for it. So a group waits for as many as were seen at once, and not at all for one;
    each group that finds more lets the next wait for more. Waiting pays as long as it takes less time than the separate write
    that a late change would need.
    """

    def __init__(self) -> None:
        self._seen = 1
        self._write = _FIRST_WRITE

    @property
    def expected(self) -> int:
        """The number of reservations that a group waits for."""
        return min(self._seen, ENOUGH)

    def pause(self, waiting: int, open_for: float) -> float:
        """How long to wait for the next change, with `waiting` there, the first for `open_for`; 0 to write the group now."""
        if waiting >= self.expected:
            return 0.0
        left = min(WRITES * self._write, WINDOW) - open_for
        return max(0.0, min(self._write, left))

    def wrote(self, group: int, came: int, seconds: float) -> None:
        """A group of reservations was written in `seconds`, during which `came` others arrived."""
        self._seen = max(group + came, self._seen * 3 // 4)
        self._write += (_RISING if seconds > self._write else _FALLING) * (seconds - self._write)


MAX_GROUP = 256
"""Most changes in one transaction."""


class _Kind(StrEnum):
    GRANT = "allocator.reserve.before_commit"
    END = "allocator.end.before_commit"
    CHANGE = "allocator.change.before_commit"


@dataclass(slots=True)
class _Unit:
    """A unit to be written entirely or not at all. For a CHANGE, `before` has the earlier values."""

    kind: _Kind
    reservations: Sequence[Reservation]
    outcome: Outcome
    before: Sequence[Reservation] = ()


class Commits:
    """Writes what the ledger granted, changed or closed and reports the outcome to the ledger; `run` must run.

    `letters` says what to tell targets of changed reservations, each with its earlier value (None if it ends); that is written
    with them, and then `posted`.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: AllocatorStore,
        changes: Changes,
        letters: Callable[[Sequence[_Pair]], Sequence[Letter]] = lambda _: (),
        posted: Callable[[Sequence[Letter]], None] = lambda _: None,
    ) -> None:
        self._ledger = ledger
        self._letters, self._posted = letters, posted
        self._store = store
        self._changes = changes
        self._waiting: list[_Unit] = []
        self._size = 0
        self._filled: _Filled | None = None  # what `run` waits for while nothing waits or is written
        self._window = GroupWindow()
        self._all = asyncio.Event()
        self._under_way: dict[str, Outcome] = {}

    def grant(self, granted: Sequence[Reservation]) -> Outcome:
        """Start to write grants, all or none."""
        return self._begin(_Kind.GRANT, granted)

    def end(self, closed: Sequence[Reservation]) -> Outcome:
        """Start to write the ends of closed reservations, all or none."""
        return self._begin(_Kind.END, closed)

    def change(self, before: Sequence[Reservation], after: Sequence[Reservation]) -> Outcome:
        """Start to write renewals or revocations, all or none; `before` has the earlier values, in the same order."""
        return self._begin(_Kind.CHANGE, after, before)

    async def wait(self, *reservation_ids: str) -> UnavailableError | None:
        """Wait until no grant or end of any of them is being written; the error of the last one, if it failed."""
        error = None
        under_way = self._under_way
        while under_way and (writes := [under_way[key] for key in reservation_ids if key in under_way]):
            error = await writes[0]
        return error

    async def run(self) -> NoReturn:
        """Write for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self._waiting:
                self._filled = asyncio.Future()
                if failed := await self._filled:
                    unit, error, added = failed
                    self._written([unit], await self._store.why(error, added))
                    continue
            opened, seen = clock(), 0  # a group grows for as long as that pays
            while seen < self._size and (pause := self._window.pause(self._size, clock() - opened)):
                seen = self._size
                self._all.clear()
                await tasks.wait_at_most(self._all, pause)
            group, self._waiting = self._waiting[:MAX_GROUP], self._waiting[MAX_GROUP:]
            size, began = sum([len(unit.reservations) for unit in group]), clock()
            self._size = left = self._size - size
            await self._write(group)
            self._window.wrote(size, self._size - left, clock() - began)

    def _begin(
        self, kind: _Kind, reservations: Sequence[Reservation], before: Sequence[Reservation] = ()
    ) -> Outcome:
        outcome = Outcome()
        if kind is not _Kind.CHANGE:
            for one in reservations:
                self._under_way[one.id] = outcome
        unit = _Unit(kind, reservations, outcome, before)
        if (filled := self._filled) is not None and not filled.done():
            awaited = len(reservations) < self._window.expected
            if not (awaited or self._store.short or kind in tasks.failpoints_set()):
                self._begin_alone(unit, filled)
                return outcome
            filled.set_result(None)
        self._waiting.append(unit)
        self._size += len(reservations)
        if self._size >= self._window.expected:
            self._all.set()
        return outcome

    def _begin_alone(self, unit: _Unit, filled: _Filled) -> None:
        """Begin to write a change in the turn of the loop that makes it. Others wait for it; `run` for others, or its failure."""
        size, clock = len(unit.reservations), asyncio.get_running_loop().time

        def done(error: Exception | None, _: object) -> None:
            if filled.done():  # `run` has ended
                return
            try:
                if error is not None:
                    filled.set_result((unit, error, added))
                    return
                if told:
                    self._posted(told)
                self._written([unit], None)
                self._window.wrote(size, self._size, clock() - began)
                self._filled = filled
                if self._waiting:
                    filled.set_result(None)
            finally:
                if (bug := sys.exception()) is not None:
                    filled.set_exception(bug)

        began = clock()
        try:
            added, changed, begun, told = self._what([unit])
            also = partial(post, letters=told) if told else None
            self._store.begin(added, changed, begun, also, done)
            self._filled = None
        finally:
            if self._filled is filled and (bug := sys.exception()) is not None:
                filled.set_exception(bug)

    async def _write(self, group: list[_Unit]) -> None:
        """Write a group in one transaction; if the state refuses any of it, each unit in its own."""
        if tasks.failpoints_set():
            whole, group = group, []
            for unit in whole:
                try:
                    await tasks.hit_async(unit.kind)
                    group.append(unit)
                except UnavailableError as failed:
                    self._settle(unit, failed)
        # Without grants for which there is no room, or that were granted before and have ended.
        if self._store.short:
            problem = "the disk of the state is full: what room is left is for the ends of reservations"
            group = self._refuse_grants(group, UnavailableError(problem, reason="DISK_FULL"))
        error = await self._save(group)
        if error is not None and error.reason == "REQUEST_ENDED":
            group = self._refuse_grants(group, error, frozenset(error.metadata["request_ids"].split(",")))
            error = await self._save(group)
        if error is not None and error.reason == "STATE_CONFLICT" and len(group) > 1:
            for unit in group:
                self._written([unit], await self._save([unit]))
        else:
            self._written(group, error)

    def _written(self, group: Sequence[_Unit], error: UnavailableError | None) -> None:
        # Of two failed changes of one reservation the later is undone first.
        for unit in group if error is None else reversed(group):
            self._settle(unit, error)
        if ends := [unit for unit in group if unit.kind is _Kind.END]:
            self._changes.room(_nodes(ends))

    def _refuse_grants(
        self, group: Sequence[_Unit], error: UnavailableError, requests: Collection[str] | None = None
    ) -> list[_Unit]:
        """Undo all grants, or those for some requests, that must not be written; returns the group's other units."""
        kept: list[_Unit] = []
        for unit in group:
            asked = requests is None or any(one.request_id in requests for one in unit.reservations)
            if asked and unit.kind is _Kind.GRANT:
                self._settle(unit, error)
            else:
                kept.append(unit)
        return kept

    async def _save(self, group: Sequence[_Unit]) -> UnavailableError | None:
        if not group:  # all was refused; an empty write would be witnessed, and missed at the next start
            return None
        added, changed, begun, told = self._what(group)
        try:
            await self._store.save(added, changed, begun, partial(post, letters=told) if told else None)
        except UnavailableError as error:
            return error
        if told:
            self._posted(told)
        return None

    def _what(self, group: Sequence[_Unit]) -> _What:
        """What to write of a group."""
        added: list[Reservation] = []
        changed: list[Reservation] = []
        begun: list[Reservation] = []
        news: list[_Pair] = []
        for unit in group:
            if unit.kind is _Kind.GRANT:
                added += unit.reservations
                continue
            changed += unit.reservations
            for was, now in zip(unit.before or repeat(None), unit.reservations, strict=False):
                if was is None or _TOLD(was) != _TOLD(now):
                    news.append((was, now))
                    if was is not None and was.fence != now.fence:
                        begun.append(now)
        return added, changed, begun, self._letters(news) if news else ()

    def _settle(self, unit: _Unit, error: UnavailableError | None) -> None:
        """Tell the ledger and listeners of a written unit, or undo it."""
        if unit.kind is _Kind.GRANT:
            if error is None:
                self._changes.publish([self._ledger.confirm(one) for one in unit.reservations])
            else:
                for one in unit.reservations:
                    self._ledger.withdraw(one)
                self._changes.room(_nodes([unit]))
        elif unit.kind is _Kind.END:
            end = self._ledger.settle if error is None else self._ledger.reopen
            for one in unit.reservations:
                end(one)
            if error is None:
                self._changes.publish(unit.reservations)
        else:
            pairs = zip(unit.before, unit.reservations, strict=True)
            if error is None:
                renewed = {now.id for was, now in pairs if _TOLD(was) == _TOLD(now)}
                self._changes.publish(unit.reservations, renewed)
            else:
                for before, after in pairs:
                    self._ledger.undo(before, after)
        if unit.kind is not _Kind.CHANGE:
            for one in unit.reservations:
                self._under_way.pop(one.id, None)
        unit.outcome.settle(error)


def _nodes(units: Sequence[_Unit]) -> set[str]:
    return {gpu.node for unit in units for one in unit.reservations for gpu in one.gpus}

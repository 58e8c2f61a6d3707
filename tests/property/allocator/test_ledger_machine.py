"""Whatever happens in whatever order: never more of a GPU than there is, growing fences, faithful repetitions, no leak.

The machine plays clients, the disk (each write may fail, late or not at all) and the sweeper against a ledger, and
keeps a plain model of what must be true.
"""

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpuscale.allocator.domain import ledger
from gpuscale.allocator.domain.bookings import Bookings
from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.ledger import Ledger, Tokens, due_at
from gpuscale.allocator.domain.model import Reservation, State, Wanted, moved
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.queueing import model
from gpuscale.allocator.state.archive import RecordFilter
from gpuscale.allocator.usecases.leases import Records
from gpuscale.common.errors import FailedPreconditionError
from tests.support.allocator_values import NOW, WALL, order, reserved

GPUS = [f"GPU-{index}" for index in range(5)]


Holds = dict[str, dict[str, int]]
"""Thousandths of each GPU by reservation."""


def holds(ledger: Ledger) -> Holds:
    """Who holds how much of each GPU of which anything is held."""
    found: Holds = {}
    for one in ledger._live.values():
        for gpu in one.gpus:
            of_gpu = found.setdefault(gpu.uuid, {})
            of_gpu[one.id] = of_gpu.get(one.id, 0) + gpu.milli
    for uuid, of_gpu in found.items():
        assert ledger.use.gpu(uuid).milli == sum(of_gpu.values())
        assert set(ledger.use.gpu(uuid).reservations) == set(of_gpu)
    assert len(ledger.use) == len(found)
    return found


async def _none(*_: object, **__: object) -> tuple[tuple[()], int]:
    return (), 0


class LedgerMachine(RuleBasedStateMachine):
    """Clients, disk and sweeper around one ledger."""

    pending = Bundle("pending")
    known = Bundle("known")
    closing = Bundle("closing")

    @initialize()
    def start(self) -> None:
        self.now = NOW
        self._follow(Ledger())
        self.highest = 0
        self.expected_held: Holds = {}
        self.by_request: dict[str, str] = {}
        self.closings: dict[str, Reservation] = {}
        self.requests = 0

    @rule(
        target=pending,
        count=st.integers(1, 3),
        milli=st.sampled_from([1, 400, 500, 1000]),
        ttl=st.floats(5, 100),
        holder=st.sampled_from("ab"),
    )
    def reserve(self, count: int, milli: int, ttl: float, holder: str) -> Reservation | None:
        free = [uuid for uuid in GPUS if 1000 - sum(self.expected_held.get(uuid, {}).values()) >= milli]
        self.requests += 1
        wish = replace(order(str(self.requests), ttl=ttl), holder=holder)
        gpus = [reserved(uuid, node=uuid[-1], milli=milli) for uuid in free[:count]]
        if len(free) < count:
            full = next((uuid for uuid in GPUS if uuid not in free), None)
            if full is not None:
                with pytest.raises(ValueError, match="is held already"):
                    self.ledger.grant(wish, [*gpus, reserved(full, milli=milli)], now=self.now, wall=WALL)
            return None
        granted = self.ledger.grant(wish, gpus, now=self.now, wall=WALL)
        assert granted.fence > self.highest
        self.highest = granted.fence
        for gpu in granted.gpus:
            self.expected_held.setdefault(gpu.uuid, {})[granted.id] = gpu.milli
        self.by_request[granted.request_id] = granted.id
        return granted

    @rule(target=known, grant=consumes(pending))
    def disk_takes_the_grant(self, grant: Reservation | None) -> Reservation | None:
        return self.ledger.confirm(grant) if grant else None

    @rule(grant=consumes(pending))
    def disk_refuses_the_grant(self, grant: Reservation | None) -> None:
        if grant:
            self.ledger.withdraw(grant)
            del self.by_request[grant.request_id]
            assert self.ledger.replay(grant.request_id, grant.fingerprint) is None
            self._free(grant)

    @rule(one=known, ttl=st.none() | st.floats(5, 100), fails=st.booleans())
    def renew(self, one: Reservation | None, ttl: float | None, fails: bool) -> None:
        before = self._current(one)
        if before is None:
            return
        try:
            after = self.ledger.renew(before.id, before.fence, ttl, self.now)
        except FailedPreconditionError:
            return
        assert before.live
        assert before.id not in self.closings, "its end is being written"
        if after is before:
            assert before.waiting
            return
        assert after.deadline == self.now + after.ttl
        if fails:
            self.ledger.undo(before, after)
            assert self.ledger.get(before.id) == before

    @rule(target=closing, one=known)
    def release(self, one: Reservation | None) -> Reservation | None:
        current = self._current(one)
        if current is None or current.id in self.closings or not current.live:
            return None
        closed = self.ledger.close(current, State.RELEASED, now=self.now, wall=WALL)
        self.closings[closed.id] = closed
        return closed

    @rule(closed=consumes(closing), fails=st.booleans())
    def disk_takes_the_end(self, closed: Reservation | None, fails: bool) -> None:
        if closed is None:
            return
        del self.closings[closed.id]
        if fails:
            self.ledger.reopen(closed)
        else:
            self.ledger.settle(closed)
            self._free(closed)
            assert self.ledger.get(closed.id) is closed

    @rule(one=known, later=st.none() | st.floats(0, 50), fails=st.booleans())
    def revoke(self, one: Reservation | None, later: float | None, fails: bool) -> None:
        before = self._current(one)
        if before is None:
            return
        try:
            after = self.ledger.revoke(before.id, None if later is None else self.now + later, "drained")
        except FailedPreconditionError:
            return
        assert before.live
        assert after.deadline == before.deadline
        if fails:
            self.ledger.undo(before, after)
            assert self.ledger.get(before.id) == before

    @rule(passed=st.floats(0, 100), limit=st.integers(1, 4), fails=st.booleans())
    def sweep(self, passed: float, limit: int, fails: bool) -> None:
        self.now += passed
        for due in self.ledger.due(self.now, limit):
            assert due_at(due) <= self.now
            if not due.live:
                self.ledger.postpone(due)
                continue
            closed = self.ledger.close(due, State.EXPIRED, now=self.now, wall=WALL)
            if fails:
                self.ledger.reopen(closed)
            else:
                self.ledger.settle(closed)
                self._free(closed)

    @rule(one=known, fails=st.booleans())
    def leaves(self, one: Reservation | None, fails: bool) -> None:
        """A job of it ends, and waits to start again."""
        before = self._current(one)
        if before is None or not before.live or before.id in self.closings or before.waiting:
            return
        wanted = Wanted(order().ask, 60.0, may_preempt=False, fence=0, first=before.first_fence)
        before = self.ledger._put(moved(before, job=before.job or ReservedJob("t", "c"), wanted=wanted))
        waits = self.ledger.leave(before.id, JobMember(0, "nodes/n0", 7), 60.0, self.now)
        self.highest = self.ledger.fence
        self.the_forecast_has_each_lease_once()
        if fails:
            self.ledger.undo(before, waits)
        else:
            self.ledger.use.free(before.id)
            self._free(before)

    @rule(one=known, fails=st.booleans())
    def begins(self, one: Reservation | None, fails: bool) -> None:
        """It starts again under a new fence; or waits on under its own where that cannot be written."""
        waits, free = self._current(one), [uuid for uuid in GPUS if uuid not in self.expected_held]
        if waits is None or not waits.live or waits.id in self.closings or not (waits.waiting and free):
            return
        again = self.ledger.begin(waits.id, [reserved(free[0], node=free[0][-1])], self.now, WALL, 0)
        self.highest = self.ledger.fence
        self.the_forecast_has_each_lease_once()
        if fails:
            self.ledger.undo(waits, again)
        else:
            self.expected_held[free[0]] = {again.id: 1000}

    @rule(
        size=st.integers(1, 4),
        ended=st.booleans(),
        odd=st.booleans(),
        holder=st.sampled_from(["", "a", "b"]),
        gpu_uuid=st.sampled_from(["", *GPUS]),
        node=st.sampled_from(["", "0", "1"]),
    )
    def pages_show_each_once_by_age(self, size: int, ended: bool, odd: bool, **asked: str) -> None:
        records: Any = SimpleNamespace(
            ledger=self.ledger, archive=SimpleNamespace(page=_none), tokens=Tokens([1])
        )
        wanted = RecordFilter(**asked)
        every = (one for one in self.ledger._reservations.values() if one.state is not State.PENDING)
        every = (one for one in every if one in wanted and (ended or one.live))
        fences = sorted(one.fence for one in every if not odd or one.fence % 2)
        page = partial(
            Records.list_reservations, records, wanted, ended=ended, page_size=size,
            keep=(lambda one: bool(one.fence % 2)) if odd else None,
        )  # fmt: skip
        found, token = list[int](), None
        with patch.object(ledger, "AT_ONCE", 3):
            while token != "":
                some, token = asyncio.run(page(page_token=token or ""))
                found += [one.fence for one in some]
                assert (len(some) == size and len(found) < len(fences)) if token else len(some) <= size
        assert found == fences

    @rule()
    def restart(self) -> None:
        """What is on disk makes the same ledger again; what was on its way is lost, as after kill -9."""
        if self._unsettled() or self.closings:
            return
        again = Ledger(fence=self.ledger.fence)
        again.restore(self.ledger.reservations(ended=True))
        assert holds(again) == holds(self.ledger)
        assert list(again.reservations(ended=True)) == list(self.ledger.reservations(ended=True))
        self._follow(again)

    @invariant()
    def every_gpu_is_held_as_expected(self) -> None:
        assert holds(self.ledger) == self.expected_held

    @invariant()
    def no_gpu_is_held_beyond_what_there_is(self) -> None:
        for of_gpu in holds(self.ledger).values():
            assert sum(of_gpu.values()) <= 1000

    @invariant()
    def a_repeated_request_finds_its_grant(self) -> None:
        for request_id, reservation_id in self.by_request.items():
            found = self.ledger.replay(request_id, "f")
            assert found.id == reservation_id

    @invariant()
    def the_forecast_has_each_lease_once(self) -> None:
        with patch.object(model, "ORDER_PART", 1):  # the order is kept for as many looks as there are leases
            found = [one.id for one in self.world.ending_first()]
        holding = [one.id for one in self.ledger._live.values() if not one.waiting]
        assert sorted(found) == sorted(holding)

    def teardown(self) -> None:
        """Once every lease has run out, every GPU is free."""
        if not hasattr(self, "ledger"):
            return
        for one in self._unsettled():
            self.ledger.withdraw(one)
        for closed in self.closings.values():
            self.ledger.settle(closed)
        for due in self.ledger.due(self.now + 1000, 1000):
            if due.live:
                self.ledger.settle(self.ledger.close(due, State.EXPIRED, now=self.now, wall=WALL))
        assert not self.ledger.use
        for one in self.ledger.first_ended(1000):
            self.ledger.forget(one)
        assert self.ledger._by_fence == {"": ([], [])}

    def _follow(self, ledger: Ledger) -> None:
        self.ledger, placer, bookings = ledger, Placer(ledger.use), Bookings(1)
        self.world = model.QueueWorld(ledger, placer, {}, bookings, lambda: self.now, lambda: WALL)

    def _unsettled(self) -> list[Reservation]:
        return [one for one in self.ledger._live.values() if one.state is State.PENDING]

    def _current(self, one: Reservation | None) -> Reservation | None:
        return self.ledger.get(one.id) if one else None

    def _free(self, one: Reservation) -> None:
        for gpu in one.gpus:
            of_gpu = self.expected_held[gpu.uuid]
            del of_gpu[one.id]
            if not of_gpu:
                del self.expected_held[gpu.uuid]


LedgerMachine.TestCase.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=40)
TestLedger = LedgerMachine.TestCase

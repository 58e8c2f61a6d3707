"""Whatever happens in whatever order: one live hold a GPU, growing fences, faithful repetitions, no leak.

The machine plays clients, the disk (each write may fail, late or not at all) and the sweeper against a ledger, and
keeps a plain model of what must be true.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from gpuscale.allocator.ledger import Ledger
from gpuscale.allocator.model import Reservation, State
from gpuscale.common.errors import FailedPreconditionError
from tests.support.allocator_values import NOW, WALL, order, reserved

GPUS = [f"GPU-{index}" for index in range(5)]


class LedgerMachine(RuleBasedStateMachine):
    """Clients, disk and sweeper around one ledger."""

    pending = Bundle("pending")
    known = Bundle("known")
    closing = Bundle("closing")

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()
        self.now = NOW
        self.highest = 0
        self.expected_held: dict[str, str] = {}
        self.by_request: dict[str, str] = {}
        self.closings: dict[str, Reservation] = {}
        self.requests = 0

    @rule(target=pending, count=st.integers(1, 3), ttl=st.floats(5, 100))
    def reserve(self, count: int, ttl: float) -> Reservation | None:
        free = [uuid for uuid in GPUS if uuid not in self.ledger.held]
        if len(free) < count:
            return None
        self.requests += 1
        wish = order(str(self.requests), ttl=ttl)
        gpus = [reserved(uuid) for uuid in free[:count]]
        granted = self.ledger.grant(wish, gpus, suffix="aaaa", now=self.now, wall=WALL)
        assert granted.fence > self.highest
        self.highest = granted.fence
        self.expected_held.update((gpu.uuid, granted.id) for gpu in granted.gpus)
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
        assert after.deadline == self.now + after.ttl
        if fails:
            self.ledger.undo_renewal(before, after)
            assert self.ledger.get(before.id) == before

    @rule(target=closing, one=known)
    def release(self, one: Reservation | None) -> Reservation | None:
        current = self._current(one)
        if current is None or current.id in self.closings:
            return None
        closed = self.ledger.release(current.id, current.fence, now=self.now, wall=WALL)
        if not current.live:
            return None
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

    @rule(passed=st.floats(0, 100), limit=st.integers(1, 4), fails=st.booleans())
    def sweep(self, passed: float, limit: int, fails: bool) -> None:
        self.now += passed
        for due in self.ledger.due(self.now, limit):
            assert due.deadline <= self.now
            if not due.live:
                self.ledger.postpone(due)
                continue
            closed = self.ledger.close(due, State.EXPIRED, now=self.now, wall=WALL)
            if fails:
                self.ledger.reopen(closed)
            else:
                self.ledger.settle(closed)
                self._free(closed)

    @rule()
    def restart(self) -> None:
        """What is on disk makes the same ledger again; what was on its way is lost, as after kill -9."""
        if self._unsettled() or self.closings:
            return
        again = Ledger(fence=self.ledger.fence)
        again.restore(self.ledger.reservations(ended=True))
        assert dict(again.held) == dict(self.ledger.held)
        self.ledger = again

    @invariant()
    def every_gpu_is_held_as_expected(self) -> None:
        assert dict(self.ledger.held) == self.expected_held

    @invariant()
    def no_two_live_reservations_share_a_gpu(self) -> None:
        uuids = [gpu.uuid for one in self.ledger.reservations(ended=False) for gpu in one.gpus]
        assert len(uuids) == len(set(uuids))

    @invariant()
    def a_repeated_request_finds_its_grant(self) -> None:
        for request_id, reservation_id in self.by_request.items():
            found = self.ledger.replay(request_id, "f")
            assert found is not None
            assert found.id == reservation_id

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
        assert not self.ledger.held

    def _unsettled(self) -> list[Reservation]:
        return [one for one in self.ledger._live.values() if one.state is State.PENDING]

    def _current(self, one: Reservation | None) -> Reservation | None:
        return self.ledger.get(one.id) if one else None

    def _free(self, one: Reservation) -> None:
        for gpu in one.gpus:
            del self.expected_held[gpu.uuid]


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase

"""Replicas that will lose their GPUs: none is stopped before another serves in its place, and no more run than that takes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpuscale.autoscaler.domain.planning import plan
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState
from tests.support.autoscaler_values import NOW, leaving, replica, spec

READY, PENDING, STARTING = ReplicaState.READY, ReplicaState.PENDING, ReplicaState.STARTING
events = st.sampled_from(
    ["revoke", "withdraw", "get ready", "get ready", "grant", "grant", "fail", "count", "time"]
)


class Endpoint:
    """Replicas, and what a plan makes of them at once."""

    def __init__(self, wanted: int) -> None:
        self.wanted, self.now, self.made = wanted, NOW, 0
        self.rows: list[Replica] = []

    def act(self) -> None:
        before = self.rows
        found = plan(self.wanted, before, (), spec(), {}, self.now)
        late = {one.id for one in before if one.revocation and one.revocation.leave_at <= self.now}
        gone = {one.id for one in found.stop}
        serving = sum(one.state is READY for one in before)
        self.rows = [one for one in before if one.id not in gone]
        for _ in range(found.start):
            self.rows.append(replica(self.made))
            self.made += 1
        staying = sum(not one.leaving for one in self.rows)
        old = sum(one.leaving for one in self.rows)
        assert staying <= self.wanted
        assert len(self.rows) <= self.wanted + old
        assert old == 0 or sum(one.state is READY and not one.leaving for one in self.rows) < self.wanted
        assert not late & {one.id for one in self.rows}
        left = sum(one.state is READY for one in self.rows) + len(late & gone)
        assert left >= min(self.wanted, serving), "one was stopped that nobody makes up for"

    def happen(self, event: str, which: int) -> None:
        if event == "count":
            self.wanted = which % 6
        elif event == "time":
            self.now += which
        elif self.rows:
            index = which % len(self.rows)
            one = self.rows[index]
            told = one.state is not PENDING
            if event == "revoke" and told:
                one = leaving(one, leave_at=self.now + which)
            elif event == "withdraw":
                one = replace(one, revocation=None)
            elif event == "get ready" and told:
                one = replace(one, state=READY)
            elif event == "grant" and not told:
                one = replace(one, state=STARTING, adapter="a")
            elif event == "fail" and told:
                one = replace(one, state=ReplicaState.FAILED)
            self.rows[index] = one
            self.rows = [each for each in self.rows if not each.ended]


@given(st.integers(0, 5), st.lists(st.tuples(events, st.integers(0, 40)), min_size=20, max_size=60))
def test_whatever_happens_nobody_stops_before_another_serves(
    wanted: int, script: list[tuple[str, int]]
) -> None:
    endpoint = Endpoint(wanted)
    endpoint.act()
    for event, which in script:
        endpoint.happen(event, which)
        endpoint.act()
    for _ in range(2):  # where there is room, all of them are there in the end, and nobody else
        endpoint.rows = [replace(one, state=READY, adapter="a") for one in endpoint.rows]
        endpoint.act()
    assert len(endpoint.rows) == endpoint.wanted
    assert not any(one.leaving for one in endpoint.rows)

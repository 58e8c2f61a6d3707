"""How long reservations last, learned from those that ended."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuscale.allocator.domain.bookings import Bookings
from gpuscale.allocator.domain.durations import ENOUGH, KEPT, MOST, Durations, Kin, Span, lasted
from gpuscale.allocator.domain.jobs import JobMember, ReservedJob
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import State
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.queueing import model
from gpuscale.allocator.queueing.model import QueueWorld
from tests.support.allocator_values import NOW, WALL, order, reserved

ANN, BOB, EVE = (Kin(name, "lab", 1, 1000) for name in ("ann", "bob", "eve"))
ELSE = Kin("zoe", "other", 8, 1000)


def learned(**lengths: list[float]) -> Durations:
    known = Durations()
    for kin in (ANN, BOB, ELSE):
        for seconds in lengths.get(kin.owner, []):
            known.add(kin, seconds)
    return known


def rounded(span: Span | None) -> list[int]:
    return [round(one) for one in span or ()]


def test_own_jobs_count_then_those_of_the_tenant_then_all() -> None:
    assert learned(ann=[1.0, 1.0]).remaining(ANN) is None, "one or two say nothing"
    known = learned(ann=[600.0] * 20, bob=[6000.0] * 20, zoe=[60_000.0] * 20)
    assert rounded(known.remaining(ANN))[1] == 600
    assert rounded(known.remaining(EVE))[1] == 6000, "the tenant's newest are nearer than all"


def test_what_has_run_for_long_is_compared_with_what_lasted_longer() -> None:
    known = learned(ann=[100.0, 100.0, 100.0, 5000.0])
    assert rounded(known.remaining(ANN, 1000.0))[:2] == [4000, 4000]
    longer = [round(8000 * (part ** (-1 / 3) - 1)) for part in (0.8, 0.5, 0.2)]
    assert rounded(known.remaining(ANN, 8000.0)) == longer


def test_new_habits_replace_old_ones() -> None:
    assert rounded(learned(ann=[36_000.0] * 40 + [60.0] * 20).remaining(ANN))[1] == 60


def test_memory_is_bounded() -> None:
    known = Durations()
    for number in range(3 * MOST):
        known.add(Kin(f"u{number}", "t", 1, 1000), 5.0)
        known.remaining(Kin(f"v{number}", "t", 1, 1000))
    assert len(known._samples) == MOST
    assert len(known._profiles) <= MOST
    assert max(map(len, known._samples.values())) == KEPT
    steps = [float(age) for age in range(3 * KEPT)]
    wide = learned(ann=steps[:KEPT], bob=steps[KEPT:-KEPT], zoe=steps[-KEPT:])
    for age in steps:
        wide.remaining(ANN, age)
    assert 0 < max(len(places) for *_, places in wide._profiles.values()) <= KEPT


@given(
    st.lists(st.tuples(st.sampled_from([ANN, BOB, EVE, ELSE]), st.floats(0.0, 1e8)), min_size=ENOUGH),
    st.lists(st.floats(0.0, 1e8), min_size=2).map(sorted),
)
def test_a_span_is_in_order_and_an_end_does_not_move_back_with_age(
    ended: list[tuple[Kin, float]], ages: list[float]
) -> None:
    known = Durations()
    for kin, seconds in ended:
        known.add(kin, seconds)
    ends = [[age + one for one in known.remaining(ANN, age) or ()] for age in ages]
    for age, end in zip(ages, ends, strict=True):
        assert age * (1 - 1e-9) <= end[0] <= end[1] <= end[2]
    for before, after in pairwise(ends):
        assert all(one * (1 - 1e-9) <= other for one, other in zip(before, after, strict=True))


def test_a_job_that_waited_lasted_from_its_grant_on_and_a_restarted_one_from_its_start() -> None:
    ledger, hour = Ledger(), timedelta(hours=1)
    job = ReservedJob("t", "train")
    wish = replace(order(), keep=True, job=job)
    placed = ledger.confirm(ledger.grant(wish, [], now=NOW, wall=WALL, wait=9e4))
    assert placed.wanted
    begun = ledger.begin(placed.id, [reserved("GPU-a")], NOW, WALL + hour, 0)
    ended = ledger.close(begun, State.RELEASED, now=NOW, wall=WALL + 3 * hour)
    assert lasted(ended) == 2 * 3600, "no process has started"
    restarted = QueueWorld(
        Ledger(), Placer(ledger.use), {}, Bookings(1), lambda: NOW, lambda: WALL + 3 * hour
    )
    assert restarted.granted_at(ended) == NOW - 2 * 3600
    member = JobMember(0, "nodes/n0", 7, started=WALL + 2 * hour)
    ended.job = replace(job, members=(member,))
    assert lasted(ended) == 2 * 3600
    ended.wanted = replace(placed.wanted, granted=WALL + hour, first=1)
    assert lasted(ended) == 3600


def test_of_the_first_by_their_end_those_come_that_likely_end_first_and_other_work_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model, "LOOKED_AT_ONCE", 2)
    ledger, durations = Ledger(), learned(ann=[9000.0] * 20, bob=[100.0] * 20)
    world = QueueWorld(ledger, Placer(ledger.use), {}, Bookings(1), lambda: NOW, lambda: WALL)
    world.durations = durations
    for name, owner, ttl, limit in (
        ("late", "ann", 60, 0), ("soon", "bob", 70, 0), ("over", "ann", 80, 0), ("told", "ann", 500, 0), ("limited", "ann", 500, 90),
    ):  # fmt: skip
        wish = replace(order(name, ttl=ttl, owner=owner), tenant="lab", limit=limit)
        ledger.confirm(ledger.grant(wish, [reserved(name)], now=NOW, wall=WALL))
    _, _, over, told, _ = ledger.live.values()
    ledger.close(over, State.RELEASED, now=NOW, wall=WALL)
    ledger.revoke(told.id, NOW + 85, "")
    steps = world.likely_first(9, 4, NOW)
    assert [next(steps), next(steps)] == [None, None], "two of the five at a time"
    with pytest.raises(StopIteration) as done:
        next(steps)
    found = done.value.value
    names = [ledger.get(one.id).request_id for one in found]
    assert [*zip(names, (one.ends - NOW for one in found), strict=True)][:3] == [
        ("over", 80), ("told", 85), ("limited", 90),
    ]  # fmt: skip
    assert names[3] == "soon"
    assert [one.latest and round(one.latest - NOW) for one in found] == [None, None, 90, 100]

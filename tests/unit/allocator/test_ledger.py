"""The state machine of reservations: holds, fences, request ids, renewals, ends, the undoing of failed writes, tokens."""

import asyncio
import hmac
import re
from base64 import urlsafe_b64decode
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from gpuscale.allocator.domain.ledger import RETENTION, Deadlines, Ledger, Tokens, rebased
from gpuscale.allocator.domain.model import EndCause, Order, Reservation, State, moved
from gpuscale.allocator.state.archive import RecordFilter
from gpuscale.allocator.usecases.leases import Leases, Records, every
from gpuscale.common import errors
from gpuscale.common.security.auth import Principal, Role
from tests.support.allocator_values import NOW, WALL, order, reserved


def granted(ledger: Ledger, *uuids: str, wish: Order | None = None, now: float = NOW) -> Reservation:
    """A grant that is not on disk yet."""
    gpus = [reserved(uuid) for uuid in uuids or ("GPU-a",)]
    return ledger.grant(wish or order(), gpus, now=now, wall=WALL)


def active(ledger: Ledger, *uuids: str, wish: Order | None = None) -> Reservation:
    """A grant that is on disk."""
    return ledger.confirm(granted(ledger, *uuids, wish=wish))


def ended(ledger: Ledger, reservation: Reservation, state: State = State.RELEASED) -> Reservation:
    """A reservation whose end is on disk."""
    closed = ledger.close(reservation, state, now=NOW, wall=WALL)
    ledger.settle(closed)
    return closed


def test_a_grant_holds_its_gpus_at_once_and_shows_only_once_it_is_on_disk() -> None:
    ledger = Ledger()
    pending = granted(ledger, "GPU-a", "GPU-b")
    assert [ledger.use.gpu(uuid).reservations for uuid in ("GPU-a", "GPU-b")] == [(pending.id,)] * 2
    assert list(ledger.reservations(ended=True)) == []
    with pytest.raises(errors.NotFoundError):
        ledger.get(pending.id)
    confirmed = ledger.confirm(pending)
    assert confirmed.state is State.ACTIVE
    assert ledger.get(pending.id) is confirmed
    assert list(ledger.reservations(ended=False)) == [confirmed]


class Counted(dict[str, Reservation]):
    """Counts what is looked up."""

    looked_at = 0

    def get(self, *key: Any) -> Any:
        Counted.looked_at += 1
        return super().get(*key)


def counted(count: int, *, holders: int) -> tuple[Any, list[Reservation]]:
    """What `Records` need, with so many reservations, each on a node of its own; every second one has ended."""
    ledger, made = Ledger(), list[Reservation]()
    for number in range(count):
        wish = replace(order(), holder=f"h{number % holders}")
        one = ledger.grant(wish, [reserved(f"GPU-{number}", node=f"n{number}")], now=NOW, wall=WALL)
        made.append(ledger.confirm(one))
        if number % 2:
            ended(ledger, one)
    ledger._reservations, ledger._live = Counted(ledger._reservations), Counted(ledger._live)
    Counted.looked_at, archive = 0, SimpleNamespace(page=AsyncMock(return_value=((), 0)), recall=AsyncMock())
    return SimpleNamespace(ledger=ledger, tokens=Tokens([1]), archive=archive), made


@pytest.mark.parametrize("with_ended", [False, True])
async def test_a_page_looks_at_what_is_on_it_however_many_there_are(*, with_ended: bool) -> None:
    for count in (100, 3000):
        records, _ = counted(count, holders=1)
        after = {"page_size": 10, "page_token": records.tokens.of_page(count // 2)}
        page, _ = await Records.list_reservations(records, RecordFilter(), ended=with_ended, **after)
        step = 1 if with_ended else 2
        assert [one.fence for one in page] == [count // 2 + 1 + step * nth for nth in range(10)]
        assert Counted.looked_at == 11


@pytest.mark.parametrize(
    "wanted",
    [
        RecordFilter(holder="h4"), RecordFilter(gpu_uuid="GPU-4"), RecordFilter(node="n4"),
        RecordFilter(holder="h4", node="n4"), RecordFilter(holder="h5", node="n4"),
    ],
)  # fmt: skip
async def test_a_page_of_a_holder_a_gpu_or_a_node_looks_at_nothing_else(wanted: RecordFilter) -> None:
    for count in (100, 3000):
        records, made = counted(count, holders=count // 2)
        page, _ = await Records.list_reservations(records, wanted, ended=False, page_size=10, page_token="")
        assert [one.id for one in page] == [one.id for one in made if one in wanted and one.live]
        assert Counted.looked_at <= 6


async def test_a_holder_is_kept_alive_without_a_look_at_others() -> None:
    for count in (100, 3000):
        records, made = counted(count, holders=count // 2)
        changes: Any = SimpleNamespace(change=AsyncMock(return_value=None))
        clock: Any = SimpleNamespace(now=lambda: NOW)
        leases = Leases(records.ledger, changes, records.archive, clock, records.tokens)
        renewed = await leases.keep_alive([], "h4", Principal("ann", Role.OPERATOR, "user"))
        assert [one.lease.id for one in renewed] == [
            one.id for one in made if one.holder == "h4" and one.live
        ]
        assert Counted.looked_at <= 12


async def test_all_pages_together_have_a_reservation_once_that_gets_a_new_fence_meanwhile() -> None:
    ledger = Ledger()
    waits = ledger.confirm(ledger.grant(order(), [], now=NOW, wall=WALL, wait=60))
    for number in range(1_500):
        active(ledger, f"GPU-{number}")
    records: Any = SimpleNamespace(ledger=ledger, tokens=Tokens([1]))
    seen: list[int] = []

    def keep(one: Reservation) -> bool:
        seen.append(one.fence)
        return True

    async def begin() -> None:
        while len(seen) < 1_100:  # the second page has begun
            await asyncio.sleep(0)
        ledger.begin(waits.id, [reserved("GPU-x")], NOW, WALL, 0)

    list_page = partial(Records.list_reservations, records, RecordFilter(), ended=False, keep=keep)
    listed, _ = await asyncio.gather(every(list_page), begin())
    assert {waits.fence, 1_502} <= set(seen), "it was read under both"
    assert [one.fence for one in listed if one.id == waits.id] == [1_502]
    assert len(listed) == 1_501


def test_an_id_tells_nothing_of_the_fence() -> None:
    """Nor does it come again: two ledgers that give the same fences give other ids."""
    grants = [[active(ledger, f"GPU-{n}") for n in range(50)] for ledger in (Ledger(41), Ledger(41))]
    assert [one.fence for one in grants[0]] == [one.fence for one in grants[1]]
    ids = [one.id for ledger in grants for one in ledger]
    assert len(set(ids)) == 100
    assert all(re.fullmatch("r[a-z2-7]{12}", one) for one in ids)
    assert sorted(ids[:50]) != ids[:50], "nor of the order"
    assert len({one[:4] for one in ids}) == 1, "made together, they are on few pages of an index"


def test_a_renewal_starts_the_lease_anew() -> None:
    ledger = Ledger()
    reservation = active(ledger, wish=order(ttl=60))
    assert ledger.renew(reservation.id, 1, None, NOW + 50).deadline == NOW + 110
    renewed = ledger.renew(reservation.id, 1, 10.0, NOW + 60)
    assert (renewed.ttl, renewed.deadline) == (10.0, NOW + 70)
    assert ledger.due(NOW + 69.9, 10) == []
    assert ledger.due(NOW + 70, 10) == [renewed]


def test_a_renewal_while_the_end_is_written_is_told_why_it_ends() -> None:
    ledger = Ledger()
    one = active(ledger, "GPU-a")
    ledger.close(one, State.RELEASED, now=NOW, wall=WALL, reason="taken away by an admin")
    with pytest.raises(
        errors.FailedPreconditionError, match=r"has ended \(ending\): taken away by an admin; reserve again"
    ):
        ledger.renew(one.id, one.fence, None, NOW)


def test_a_renewal_that_could_not_be_written_is_taken_back_unless_a_later_one_was() -> None:
    ledger = Ledger()
    before = active(ledger, wish=order(ttl=60))
    failed = ledger.renew(before.id, 1, None, NOW + 10)
    ledger.undo(before, failed)
    assert ledger.get(before.id) is before
    failed = ledger.renew(before.id, 1, None, NOW + 20)
    later = ledger.renew(before.id, 1, None, NOW + 30)
    ledger.undo(before, failed)
    assert ledger.get(before.id) is later


def test_of_two_times_to_leave_the_earlier_holds_with_its_reason() -> None:
    ledger = Ledger()
    one = active(ledger)
    ledger.revoke(one.id, NOW + 100, "first")
    assert ledger.revoke(one.id, NOW + 200, "later").end_reason == "first"
    sooner = ledger.revoke(one.id, NOW + 50, "sooner")
    assert (sooner.revoke_at, sooner.end_reason) == (NOW + 50, "sooner")
    back = ledger.revoke(one.id, None, "")
    assert (back.revoke_at, back.end_reason) == (None, "")


def test_what_is_being_written_is_not_due() -> None:
    ledger = Ledger()
    pending = granted(ledger, "GPU-a", wish=order(ttl=60))
    closing = active(ledger, "GPU-b", wish=order(ttl=60))
    closed = ledger.close(closing, State.RELEASED, now=NOW, wall=WALL)
    assert ledger.due(NOW + 60, 10) == []
    ledger.settle(closed)
    assert ledger.due(NOW + 60, 10) == []
    confirmed = ledger.confirm(pending)
    assert ledger.due(NOW + 60, 10) == [confirmed]


def test_an_end_that_is_settled_again_changes_nothing() -> None:
    ledger = Ledger()
    one, other = active(ledger, "GPU-a"), active(ledger, "GPU-b")
    closed = ended(ledger, one)
    ledger.settle(closed)
    assert list(ledger.reservations(ended=True)) == [closed, other]
    ledger.forget(closed)
    assert list(ledger.reservations(ended=True)) == [other]


def test_nothing_is_left_of_what_waited_was_granted_ended_and_is_forgotten() -> None:
    ledger = Ledger()
    waits = ledger.confirm(ledger.grant(order(), [], now=NOW, wall=WALL, wait=60))
    ledger.forget(ended(ledger, ledger.begin(waits.id, [reserved("GPU-a")], NOW, WALL, 0)))
    kept = {name: value for name, value in vars(ledger).items() if isinstance(value, dict) and value}
    assert kept == {"_by_fence": {"": ([], [])}}


def test_due_is_bounded_and_postponed_work_comes_again() -> None:
    ledger = Ledger()
    for index in range(5):
        active(ledger, f"GPU-{index}", wish=order(ttl=60))
    first = ledger.due(NOW + 60, 2)
    assert len(first) == 2
    assert len(ledger.due(NOW + 60, 10)) == 3
    ledger.postpone(first[0])
    assert ledger.due(NOW + 60, 10) == [first[0]]


def test_a_disk_that_holds_one_gpu_twice_is_refused() -> None:
    one, other = Ledger(), Ledger(fence=1)
    both = [active(one, "GPU-a"), active(other, "GPU-a")]
    with pytest.raises(ValueError, match="GPU-a is held already by r"):
        Ledger().restore(both)


def test_another_boot_gives_every_lease_its_full_time_again() -> None:
    ledger = Ledger()
    lease = active(ledger, wish=order(ttl=60))
    assert rebased(lease, 5.0).deadline == 65.0
    assert rebased(ended(ledger, lease), 5.0).deadline == 5.0 + RETENTION


def test_renewing_for_ever_keeps_one_entry() -> None:
    deadlines = Deadlines()
    for second in range(10_000):
        deadlines.add("lease", second + 60.0)
    assert len(deadlines._heap) == 1
    assert deadlines.pop(60.0) == "lease"


def test_a_deadline_that_moves_earlier_is_met_and_named_once() -> None:
    deadlines = Deadlines()
    deadlines.add("lease", 60.0)
    deadlines.add("lease", 20.0)
    assert deadlines.pop(20.0) == "lease"
    assert deadlines.pop(60.0) is None


TOKENS = Tokens([1, 2, 3, 4])


@pytest.mark.parametrize("fence", [1, 7, 2**40, 2**62])
def test_a_page_token_leads_back_to_its_fence_by_its_key_alone(fence: int) -> None:
    token = TOKENS.of_page(fence)
    assert TOKENS.fence_of_page(token) == fence
    assert TOKENS.of_page(fence) == token, "the same page has the same token"
    raw = urlsafe_b64decode(token + "==")
    key = b"".join(part.to_bytes(8, "big") for part in (1, 2, 3, 4))
    assert raw.startswith(hmac.digest(key, b"page" + fence.to_bytes(8, "big"), "sha256")[:8])
    assert str(fence).encode() not in raw
    assert fence.to_bytes(8, "big") not in raw
    with pytest.raises(errors.InvalidArgumentError):
        Tokens([4, 3, 2, 1]).fence_of_page(token)


@pytest.mark.parametrize(
    "token", ["forged", "", "?", "A" * 22, TOKENS.of_page(7)[:-2], "a" + TOKENS.of_page(7)]
)
def test_a_token_that_was_not_given_is_refused(token: str) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        TOKENS.fence_of_page(token)
    assert [one.field for one in caught.value.violations] == ["page_token"]


def test_tokens_that_follow_each_other_have_nothing_in_common() -> None:
    raw = [urlsafe_b64decode(TOKENS.of_page(fence) + "==") for fence in range(1, 200)]
    assert len({one[:8] for one in raw}) == len({one[8:] for one in raw}) == 199


@pytest.mark.parametrize(
    ("state", "reason", "cause"),
    [
        (State.ACTIVE, "", None), (State.EXPIRED, "", EndCause.EXPIRED), (State.CANCELLED, "", EndCause.CANCELLED),
        (State.ACTIVE, "nodes/n0/gpus/a is drained: fan", EndCause.DRAINED),
        (State.CANCELLED, "nodes/n0 is drained", EndCause.DRAINED),
        (State.RELEASED, "nodes/n0 is drained", EndCause.RELEASED),
        (State.CANCELLED, "preempted for a request of x", EndCause.PREEMPTED),
        (State.LOST, "GPU a vanished from its node", EndCause.GPU_LOST),
        (State.CANCELLED, "by ann: nodes/n0 is drained", EndCause.CANCELLED),
    ],
)  # fmt: skip
def test_what_ended_a_reservation_follows_from_its_state_and_reason(
    state: State, reason: str, cause: EndCause | None
) -> None:
    assert moved(active(Ledger()), state=state, end_reason=reason).end_cause is cause

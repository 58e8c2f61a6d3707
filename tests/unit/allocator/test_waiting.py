"""Callers in the queue, on virtual time: served when something comes free, in time or not at all, and never forgotten; and how long a wait for room lasts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from unittest.mock import create_autospec

import pytest

from gpuscale.allocator.domain.bookings import Bookings
from gpuscale.allocator.domain.jobs import ReservedJob
from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask, Pick, State
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.queueing.model import ORDER_KEPT, QueuePlace, QueueWorld, Rules
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.usecases import capacity as capacity_module
from gpuscale.allocator.usecases import reserving as waiting
from gpuscale.allocator.usecases.capacity import LOOK_GAP, Capacity
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.allocator.usecases.reserving import Waiting
from gpuscale.common.errors import AlreadyExistsError, ResourceExhaustedError
from tests.support.allocator_values import NOW, ask, order, plain_node, reserved
from tests.support.clock import ManualClock
from tests.support.queue_world import wish
from tests.unit.allocator.queue_site import queue_site

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def followed(watch: AsyncGenerator[QueuePlace | str]) -> list[QueuePlace | str]:
    async with aclosing(watch) as told:
        return [one async for one in told]


async def test_a_release_serves_who_waits_at_once() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 100))
        await asyncio.sleep(10)
        await site.release(held)
        await site.settle()
        granted = site.ledger.get(await call)
        assert now() == 10
        assert (granted.request_id, granted.state) == ("w", State.ACTIVE)


async def test_the_end_of_a_lease_serves_who_waits() -> None:
    async with queue_site(n0=1) as site:
        await site.grant(wish("held", ttl=20))
        await site.waiting.wait(wish("w"), 100)
        assert 20 <= now() < 20.5


async def test_nobody_is_looked_at_while_nothing_changes() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=5000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 4000))
        await asyncio.sleep(1)
        before = site.placer.placements
        await asyncio.sleep(3000)
        assert site.placer.placements == before
        await site.release(held)
        await call


async def test_a_look_beside_many_who_just_joined_plays_no_round() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        head = asyncio.create_task(site.waiting.wait(wish("head"), 100))
        await site.settle()
        joined = [site.queue.add(wish(f"w{number}"), now(), 100) for number in range(50)]
        before = site.placer.placements
        assert not isinstance(site.waiting.look(wish("late"), now()), Pick)
        assert site.placer.placements == before + 1
        site.waiting.changed()
        site.waiting.look(wish("later"), now())
        assert all(one.place for one in joined), "room may have come up: they come first"
        for one in joined:
            site.queue.remove(one)
        await site.release(held)
        await head


async def test_those_who_join_share_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with queue_site(n0=1) as site:
        held, play, rounds = await site.grant(wish("held", ttl=1000)), site.queue.round, list[float]()
        monkeypatch.setattr(site.queue, "round", lambda at: (rounds.append(at), play(at))[1])
        calls = [asyncio.create_task(site.waiting.wait(wish("head"), 100))]
        await site.settle()
        for number in range(90):
            calls.append(asyncio.create_task(site.waiting.wait(wish(f"w{number}"), 100)))
            await asyncio.sleep(0.001)
        assert len(rounds) <= 2
        await site.release(held)
        await site.settle()
        assert calls[0].done(), "room is not waited with"
        for call in calls:
            call.cancel()
        await site.settle()


async def test_who_stands_far_back_is_told_of_what_makes_a_difference() -> None:
    async with queue_site(n0=1) as site:
        held, told = await site.grant(wish("held", ttl=9000)), [list[int]() for _ in range(300)]

        async def follow(number: int) -> None:
            async with aclosing(site.waiting.watch(wish(f"w{number}", ttl=9000), 9000)) as news:
                async for one in news:
                    if isinstance(one, QueuePlace):
                        told[number].append(one.position)

        calls = [asyncio.create_task(follow(number)) for number in range(300)]
        await asyncio.sleep(1)
        for _ in range(40):
            await site.release(held)
            await asyncio.sleep(10)
            [held] = site.ledger.reservations(ended=False)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert told[299] == [299, 261], "an eighth of it further on"
        assert told[43][-13:] == [*range(15, 2, -1)]
        assert len(told[43]) <= 25


async def test_who_moves_up_is_told_once_the_grant_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    async with queue_site(n0=1) as site:
        held, wrote, rung = await site.grant(wish("held", ttl=1000)), asyncio.Event(), list[float]()

        class Bell(asyncio.Event):
            def set(self) -> None:
                rung.append(now())
                super().set()

        monkeypatch.setattr(asyncio, "Event", Bell)
        first, second = (site.waiting.watch(wish(name), 100) for name in ("first", "second"))
        assert [getattr(await anext(one), "position", None) for one in (first, second)] == [0, 1]
        await asyncio.sleep(10 - now())
        rung.clear()
        await site.release(held)
        monkeypatch.setattr(site.disk, "_write", wrote.wait)
        moved = asyncio.create_task(anext(second))
        await asyncio.sleep(2)
        assert isinstance(await anext(first), str)
        assert not moved.done(), "a grant that cannot be written is taken back"
        assert rung == [10.0], "only who is served wakes before there is something to tell"
        wrote.set()
        assert getattr(await moved, "position", None) == 0
        for watch in (first, second):
            await watch.aclose()


async def test_who_moves_up_is_told_once_the_grant_to_a_job_is_on_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with queue_site(n0=1) as site:
        held, wrote = await site.grant(wish("held", ttl=1000)), asyncio.Event()
        kept = replace(wish("job"), keep=True, job=ReservedJob("t", "train"))
        job = site.ledger.grant(kept, (), now=now(), wall=site.clock.wall(), wait=100)
        await site.commits.grant([job])
        site.waiting.keep(site.ledger.get(job.id))
        behind = site.waiting.watch(wish("behind"), 100)
        assert getattr(await anext(behind), "position", None) == 1
        await site.release(held)
        monkeypatch.setattr(site.disk, "_write", wrote.wait)
        moved = asyncio.create_task(anext(behind))
        await asyncio.sleep(2)
        assert site.ledger.get(job.id).gpus
        assert not moved.done()
        wrote.set()
        assert getattr(await moved, "position", None) == 0
        await behind.aclose()


async def test_while_a_grant_is_written_a_newcomer_is_told_its_place_and_who_is_served_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with queue_site(n0=1, n1=0) as site:
        held, wrote = await site.grant(wish("held", ttl=1000)), asyncio.Event()
        first, second, third = (site.waiting.watch(wish(name), 100) for name in ("first", "second", "third"))
        assert [getattr(await anext(one), "position", None) for one in (first, second)] == [0, 1]
        await site.release(held)
        monkeypatch.setattr(site.disk, "_write", wrote.wait)
        moved = asyncio.create_task(anext(second))
        await asyncio.sleep(1)
        async with asyncio.timeout(1):
            assert getattr(await anext(third), "position", None) == 1
        site.placer.sizes["n1"] = 1
        site.changes.room(["n1"])
        await asyncio.sleep(1)
        wrote.set()
        assert isinstance(await moved, str)
        for watch in (first, second, third):
            await watch.aclose()


async def test_news_come_no_closer_than_their_gap_and_the_last_is_told() -> None:
    async with queue_site(n0=1) as site:
        held, told = await site.grant(wish("held", ttl=9000)), list[tuple[float, int | None]]()

        async def follow() -> None:
            async with aclosing(site.waiting.watch(wish("last"), 9000)) as news:
                async for one in news:
                    told.append((now(), getattr(one, "position", None)))

        ahead = [asyncio.create_task(site.waiting.wait(wish(f"w{nth}", ttl=9000), 9000)) for nth in range(8)]
        last = asyncio.create_task(follow())
        await asyncio.sleep(1)
        for _ in ahead:
            await site.release(held)
            await asyncio.sleep(0.1)
            [held] = site.ledger.reservations(ended=False)
        await asyncio.sleep(2)
        assert told[-1][1] == 0
        assert 4 <= len(told) <= 6
        assert all(after - before >= waiting.NEWS_GAP for (before, _), (after, _) in pairwise(told))
        await site.release(held)
        await last
        assert told[-1] == (now(), None)


async def test_those_who_come_together_share_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    async with queue_site(n0=1) as site:
        held, foresee, forecasts = await site.grant(wish("held", ttl=1000)), site.queue.foresee, list[float]()
        monkeypatch.setattr(site.queue, "foresee", lambda at: (forecasts.append(at), foresee(at))[1])
        watches = [site.waiting.watch(wish(f"w{number}"), 100) for number in range(waiting.MOST_FORESEEN)]
        told = await asyncio.gather(*map(anext, watches))
        assert all(isinstance(one, QueuePlace) and one.foreseen for one in told)
        assert len(forecasts) <= 2
        for watch in watches:
            await watch.aclose()
        await site.release(held)


async def test_leases_are_sorted_by_their_ends_now_and_then() -> None:
    async with queue_site(n0=400) as site:
        world = QueueWorld(site.ledger, site.placer, {}, Bookings(86_400.0), site.clock.now, site.clock.wall)
        held = [await site.grant(wish(f"held-{number}", ttl=1000 - number)) for number in range(300)]
        assert [one.id for one in world.ending_first()] == [one.id for one in reversed(held)]
        await site.release(held.pop())
        late = await site.grant(wish("late", ttl=5))
        kept = [one.id for one in world.ending_first()]
        assert kept == [*(one.id for one in reversed(held)), late.id], "it is sorted anew a second later"
        await asyncio.sleep(ORDER_KEPT)
        assert next(world.ending_first()).id == late.id


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_wait_ends_when_it_is_over(*, streamed: bool) -> None:
    async with queue_site(n0=1) as site:
        await site.grant(wish("held", ttl=1000))
        with pytest.raises(ResourceExhaustedError) as error:
            await (
                followed(site.waiting.watch(wish("w"), 7.5))
                if streamed
                else site.waiting.wait(wish("w"), 7.5)
            )
        assert now() == pytest.approx(7.5, abs=0.01)
        assert error.value.reason == "WAIT_TIMEOUT"
        assert "no room" in error.value.message
        assert error.value.metadata["last_reason"] == "NO_CAPACITY"


async def test_who_goes_away_leaves_the_queue_at_once() -> None:
    async with queue_site(n0=2) as site:
        held = [await site.grant(wish(name, ttl=1000)) for name in ("a", "b")]
        big = asyncio.create_task(site.waiting.wait(wish("big", 2), 100))
        small = asyncio.create_task(site.waiting.wait(wish("small"), 100))
        await asyncio.sleep(1)
        await site.release(held[0])
        await site.settle()
        assert not small.done()
        big.cancel()
        await site.settle()
        assert site.ledger.get(await small).request_id == "small"
        assert now() == 1
        assert big.cancelled()


async def test_a_repeated_request_stands_in_the_same_place() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        calls = [asyncio.create_task(site.waiting.wait(wish("w"), 100)) for _ in range(3)]
        await asyncio.sleep(1)
        assert len(site.queue) == 1
        calls[0].cancel()
        await site.settle()
        assert site.waiting.knows(wish("w"))
        await site.release(held)
        assert await calls[1] == await calls[2]


async def test_a_request_id_that_waits_is_not_another_requests() -> None:
    async with queue_site(n0=1) as site:
        await site.grant(wish("held", ttl=1000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 3))
        await asyncio.sleep(1)
        other = wish("w", 2)
        object.__setattr__(other, "fingerprint", "other")
        with pytest.raises(AlreadyExistsError):
            site.waiting.knows(other)
        with pytest.raises(ResourceExhaustedError):
            await call


async def test_a_grant_to_a_caller_who_vanished_is_found_by_the_repetition() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 100))
        await asyncio.sleep(1)
        closed = site.ledger.close(held, State.RELEASED, now=now(), wall=site.clock.wall())
        await site.commits.end([closed])
        while site.ledger.replay("w", "w") is None:
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.sleep(1)
        found = site.ledger.replay("w", "w")
        assert found
        assert found.state is State.ACTIVE
        await asyncio.sleep(100)
        assert site.ledger.get(found.id).state is State.EXPIRED


async def test_whoever_asks_at_once_does_not_pass_those_who_wait() -> None:
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 100))
        await asyncio.sleep(1)
        site.ledger.settle(site.ledger.close(held, State.RELEASED, now=now(), wall=site.clock.wall()))
        site.changes.room(["n0"])
        assert not isinstance(site.waiting.look(wish("quick"), now()), waiting.Pick)
        assert site.ledger.get(await call).request_id == "w"


async def test_calls_that_wait_leave_room_for_calls_that_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MOST_CALLS", 1)
    async with queue_site(n0=1) as site:
        held = await site.grant(wish("held", ttl=1000))
        call = asyncio.create_task(site.waiting.wait(wish("w"), 100))
        await asyncio.sleep(1)
        with pytest.raises(ResourceExhaustedError) as error:
            await site.waiting.wait(wish("more"), 100)
        assert error.value.reason == "QUEUE_FULL"
        await site.release(held)
        await call


async def test_a_victim_is_told_ends_after_the_grace_and_makes_room() -> None:
    async with queue_site(Rules(min_runtime=60, grace=30), n0=1) as site:
        victim = await site.grant(wish("victim", ttl=1000, preemptible=True))
        call = asyncio.create_task(
            site.waiting.wait(wish("urgent", priority=5, may_preempt=True, tenant="ops"), 500)
        )
        await asyncio.sleep(59)
        assert site.ledger.get(victim.id).revoke_at is None
        await asyncio.sleep(2)
        told = site.ledger.get(victim.id)
        assert told.revoke_at == pytest.approx(90, abs=0.1)
        assert told.end_reason == "preempted for a request of ops with priority 5"
        await call
        assert 90 <= now() < 90.6
        assert site.ledger.get(victim.id).state is State.CANCELLED


async def test_who_repeats_a_request_with_a_longer_wait_may_preempt() -> None:
    """The first caller would have left before the grace is over; nothing else changes."""
    async with queue_site(Rules(min_runtime=0, grace=30), n0=1) as site:
        victim = await site.grant(wish("victim", ttl=1000, preemptible=True))
        urgent = wish("urgent", priority=5, may_preempt=True)
        short = asyncio.create_task(site.waiting.wait(urgent, 20))
        await asyncio.sleep(10)
        assert site.ledger.get(victim.id).revoke_at is None
        long = asyncio.create_task(site.waiting.wait(urgent, 500))
        await asyncio.sleep(1)
        assert site.ledger.get(victim.id).revoke_at == pytest.approx(40, abs=0.1)
        with pytest.raises(ResourceExhaustedError):
            await short
        await long
        assert 40 <= now() < 41


async def test_a_revocation_that_cannot_be_written_is_tried_again() -> None:
    async with queue_site(Rules(min_runtime=0, grace=30), n0=1) as site:
        victim = await site.grant(wish("victim", ttl=1000, preemptible=True))
        site.disk.broken = True
        call = asyncio.create_task(site.waiting.wait(wish("urgent", priority=5, may_preempt=True), 500))
        await asyncio.sleep(0.5)
        assert site.ledger.get(victim.id).revoke_at is None
        site.disk.broken = False
        await call
        assert 31 <= now() < 32
        assert site.ledger.get(victim.id).state is State.CANCELLED


WITHIN = 0.2
"""Seconds by which a wait may be late: promised."""


class World:
    """One node with one GPU, which a reservation holds until `free`."""

    def __init__(self) -> None:
        clock = ManualClock(NOW)
        self.ledger, self.changes = Ledger(), Changes()
        self.placer, view = Placer(self.ledger.use), FleetView({})
        node = plain_node("n0", 1)
        view.apply([node], full=True)
        self.placer.apply_node(node)
        granted = self.ledger.grant(order(), [reserved("n0-0")], now=NOW, wall=clock.wall())
        self.held = self.ledger.confirm(granted)
        waiting = create_autospec(Waiting, instance=True)
        waiting.look.side_effect = self.look
        self.capacity = Capacity(
            placer=self.placer,
            waiting=waiting,
            view=view,
            follower=create_autospec(FleetFollower, instance=True),
            ledger=self.ledger,
            maintenance=create_autospec(Maintenance, instance=True),
            clock=clock,
        )
        self.capacity.reconsider = self.reconsider
        self.changes.on_room(self.capacity.changed)

    async def reconsider(self, wanted: Ask, found: Refusal) -> Refusal:
        """Idle GPUs may be partitioned."""
        return replace(found, kind=RefusalKind.NO_CAPACITY) if wanted.mig_profile else found

    def look(self, order: object, now: float) -> object:
        return self.placer.place(ask(), now)

    def free(self) -> None:
        self.ledger.use.free(self.held.id)
        self.changes.room(["n0"])


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0, 300.0])
async def test_a_wait_ends_when_its_time_is_over(seconds: float) -> None:
    """The seed overshot by up to one interval of 30 s."""
    began = asyncio.get_running_loop().time()
    answer, waited = await World().capacity.wait(ask(), "me", seconds)
    took = asyncio.get_running_loop().time() - began
    assert (answer.available, answer.reason) == (False, "NO_CAPACITY")
    assert seconds <= took <= seconds + WITHIN
    assert waited == pytest.approx(took)


async def test_news_that_help_nobody_do_not_prolong_a_wait() -> None:
    world = World()

    async def news() -> None:
        while True:
            world.changes.room(["n0"])
            await asyncio.sleep(0.01)

    busy = asyncio.ensure_future(news())
    _, waited = await world.capacity.wait(ask(), "me", 1.0)
    busy.cancel()
    assert 1.0 <= waited <= 1.0 + WITHIN


async def test_room_ends_a_wait_at_once() -> None:
    world = World()
    asyncio.get_running_loop().call_later(42.0, world.free)
    answer, waited = await world.capacity.wait(ask(), "me", 300.0)
    assert answer.available
    assert 42.0 <= waited <= 42.0 + WITHIN


async def test_room_that_comes_right_after_a_look_is_not_missed() -> None:
    world = World()
    loop = asyncio.get_running_loop()
    loop.call_later(10.0, lambda: world.changes.room(["n0"]))
    loop.call_later(10.0 + LOOK_GAP / 2, world.free)
    answer, waited = await world.capacity.wait(ask(), "me", 300.0)
    assert answer.available
    assert waited <= 10.0 + WITHIN


async def test_what_can_never_be_had_is_not_waited_for() -> None:
    answer, waited = await World().capacity.wait(ask(2), "me", 300.0)
    assert (answer.reason, waited) == ("UNSATISFIABLE", 0.0)


async def test_a_profile_that_idle_gpus_may_be_partitioned_for_is_waited_for() -> None:
    world = World()
    asyncio.get_running_loop().call_later(42.0, lambda: world.changes.room(["n0"]))
    answer, waited = await world.capacity.wait(replace(ask(), mig_profile="2g.20gb"), "me", 300.0)
    assert (answer.reason, answer.final) == ("NO_CAPACITY", False)
    assert 300.0 <= waited <= 300.0 + WITHIN


async def test_only_so_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_module, "MOST_WAITS", 2)
    world = World()
    waits = [asyncio.ensure_future(world.capacity.wait(ask(), "me", 9.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhaustedError) as caught:
        await world.capacity.wait(ask(), "me", 9.0)
    assert caught.value.reason == "TOO_MANY_WAITS"
    await asyncio.gather(*waits)
    answer, _ = await world.capacity.wait(ask(), "me", 0.0)
    assert not answer.available

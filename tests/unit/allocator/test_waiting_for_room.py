"""How long a wait for room lasts, on virtual time: exactly as long as it was asked for, and not a look more than needed."""

import asyncio
from dataclasses import replace
from unittest.mock import create_autospec

import pytest

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Ask
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.state.commits import Changes
from gpuscale.allocator.usecases import capacity as capacity_module
from gpuscale.allocator.usecases.capacity import LOOK_GAP, Capacity
from gpuscale.allocator.usecases.draining import Maintenance
from gpuscale.allocator.usecases.fleet import FleetFollower, FleetView
from gpuscale.allocator.usecases.reserving import Waiting
from gpuscale.common.errors import ResourceExhaustedError
from tests.support.allocator_values import NOW, ask, order, plain_node, reserved
from tests.support.clock import ManualClock

pytestmark = pytest.mark.looptime

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

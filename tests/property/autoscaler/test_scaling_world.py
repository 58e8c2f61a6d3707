"""What scaling does, after whatever happened on the way: a replica for each that is wanted, a reservation for each, no more.

Scripts of changes, faults and deaths run against the real parts on virtual time (`tests.property.autoscaler.scaling_world`). Then all is
mended, and what runs, what is stored and what is reserved must be the same things.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from gpuscale.autoscaler.domain import planning
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.spec import EndpointSpec, ModelWeight, Pace, ReplicaTemplate
from gpuscale.autoscaler.loop import reconciler
from gpuscale.autoscaler.loop.leases import Actor
from gpuscale.autoscaler.signals.sources import Histories, SignalSources
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.common.names import replica_name
from tests.property.autoscaler import scaling_script
from tests.property.autoscaler.scaling_doubles import FOREIGN
from tests.property.autoscaler.scaling_world import World
from tests.property.autoscaler.virtual_time import run
from tests.support.fake_adapter import FAILED, READY


def played(
    work: Callable[[World], Coroutine[Any, Any, None]], adapters: Any = scaling_script.ADAPTERS
) -> None:
    """Do something in a world of its own, on virtual time."""

    async def script() -> None:
        world = World(1, scaling_script.NODES, adapters)
        await scaling_script.in_world(world, partial(work, world))

    run(script())


async def story(seed: int) -> World:
    """A script of twenty things that happen, all of them mended, and the end of all endpoints."""
    world = World(seed, scaling_script.NODES, scaling_script.ADAPTERS)

    async def work() -> None:
        happens = scaling_script.Script(world)
        for name in scaling_script.NAMES[:2]:
            await world.create(name, scaling_script.some_spec(world.dice))
        await asyncio.sleep(3)
        for _ in range(20):
            await happens.happen()
        await happens.mend(70)
        scaling_script.agrees(world)
        for name in scaling_script.NAMES:
            await world.user(lambda all_, name=name: all_.delete(name, etag=""))
        await happens.mend(20)
        scaling_script.agrees(world)
        scaling_script.nothing_left(world)

    await scaling_script.in_world(world, work)
    return world


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happened_all_agrees_in_the_end_and_nothing_is_left(seed: int) -> None:
    run(story(seed))


def test_a_lease_that_was_released_before_anybody_said_so_is_renewed_no_more() -> None:
    """Its replica ended, and was found to owe its GPUs on another's behalf."""

    spec = EndpointSpec(1, 2, ReplicaTemplate("worker", gpu_count=1, lease_ttl=30.0), tick=5.0)

    async def work(world: World) -> None:
        await asyncio.sleep(6)
        await world.create("e1", spec)
        await asyncio.sleep(15)
        assert world.keeper._due
        world.keeper.changed = world.keeper._release.set  # type: ignore[method-assign]
        await world.user(lambda all_: all_.delete("e1", etag=""))
        await asyncio.sleep(8)  # less than a third of the lease
        scaling_script.nothing_left(world)

    played(work)


STAGES: dict[str, tuple[object, str]] = {
    "bad-sampling": (SignalSources, "sample"), "bad-reading": (reconciler, "read_known"),
    "bad-evaluating": (reconciler, "asked"), "bad-planning": (planning, "plan"), "bad-acting": (Actor, "act"),
    "bad-keeping": (Histories, "note"), "bad-composing": (reconciler, "compose"),
    "bad-noting": (decision_log, "record"),
}  # fmt: skip


def _broken(stage: str, met: Counter[str]) -> Callable[..., Any]:
    """What a stage does, but for an error that nobody foresaw wherever it has to do with the endpoint of its name."""
    genuine = getattr(*STAGES[stage])

    def broken(*arguments: Any, **fields: Any) -> Any:
        if stage in f"{arguments} {fields}":
            met[stage] += 1
            raise LookupError("nobody thought of this")
        return genuine(*arguments, **fields)

    return broken


def test_what_fails_for_one_endpoint_stops_no_other_at_any_stage() -> None:
    """It is met again and again; once it is mended, that endpoint goes on too."""

    def scaled(name: str) -> EndpointSpec:
        template = ReplicaTemplate("worker", parameters={"of": name})
        return EndpointSpec(
            0, 3, template, (scaling_script.DEPTH,), (Rule("t", "depth", TargetRule(10.0)),), tick=5.0
        )

    met = Counter[str]()

    async def work(world: World) -> None:
        with ExitStack() as stack:
            for stage, (place, name) in STAGES.items():
                stack.enter_context(patch.object(place, name, _broken(stage, met)))
            for name in (*STAGES, "good"):
                await world.create(name, scaled(name))
            await asyncio.sleep(2)
            world.queues["jobs"] = 25
            await asyncio.sleep(6)
            assert {stage for stage, times in met.items() if times > 1} == STAGES.keys()
            assert sum(one.endpoint == "good" and bool(one.adapter) for one in world.rows()) == 3
        await asyncio.sleep(20)
        scaling_script.agrees(world)
        assert len(world.rows()) == 3 * (1 + len(STAGES))

    played(work, scaling_script.ADAPTERS[:2])


def test_one_that_is_created_anew_while_its_name_is_given_up_remembers_nothing() -> None:
    """Somebody calls for the old one in the very moment in which it goes."""

    spec = EndpointSpec(
        0, 3, ReplicaTemplate("worker"), (scaling_script.DEPTH,), scaling_script.RULES[1], tick=2.0
    )

    async def work(world: World) -> None:
        await world.create("e1", spec)
        await asyncio.sleep(10)
        before, gone = world.reconciler._loops["e1"], list[float]()
        genuine = before.look

        async def look(**said: bool) -> float | None:
            after = await genuine(**said)
            if after is None:
                gone.append(world.clock.now())
                world.wakes.call("e1")
                await world.create("e1", spec)
            return after

        before.look = look  # type: ignore[method-assign]
        await world.user(lambda all_: all_.delete("e1", etag=""))
        await asyncio.sleep(10)
        assert world.reconciler._loops["e1"] is not before
        [first, *_] = world.reconciler.past("e1").series["depth"].times
        assert first >= gone[0]

    played(work)


def test_what_nobody_was_told_of_is_given_back_and_what_nobody_knows_is_stopped() -> None:
    """GPUs whose grant was never heard of, of an endpoint that is deleted meanwhile; and a replica of no endpoint."""

    spec = EndpointSpec(1, 2, ReplicaTemplate("worker", gpu_count=1), tick=5.0)

    async def work(world: World) -> None:
        [adapter] = world.adapters
        await asyncio.sleep(6)
        world.allocator.losing = 1.0
        await world.create("e1", spec)
        await asyncio.sleep(2)
        assert len(world.allocator.held) == 2, "its own, whose answer was lost, and another's"
        await world.user(lambda all_: all_.delete("e1", etag=""))
        await asyncio.sleep(2)
        world.allocator.losing = 0.0
        adapter.set("endpoints/nobody/replicas/x", READY)
        await asyncio.sleep(25)  # less than the lease: it is released, and does not run out
        scaling_script.nothing_left(world)

    played(work, scaling_script.ADAPTERS[:1])


def test_what_an_adapter_says_of_the_replicas_of_another_counts_for_nothing() -> None:
    spec = EndpointSpec(1, 2, ReplicaTemplate("worker", adapter="a"), tick=5.0)

    async def work(world: World) -> None:
        await world.create("e1", spec)
        await asyncio.sleep(8)
        [before] = world.rows()
        world.adapters[1].set(replica_name("e1", before.id), FAILED)
        await asyncio.sleep(10)
        assert world.rows() == [before]
        assert before.state is ReplicaState.READY
        scaling_script.agrees(world)

    played(work, scaling_script.ADAPTERS[:2])


@pytest.mark.parametrize("meanwhile", ["an adapter goes", "the lease runs out"])
def test_a_grant_that_was_never_heard_of_is_used_or_replaced(meanwhile: str) -> None:
    """The same request is sent again, also where other nodes would be asked for by now; one that has ended is given up."""

    spec = EndpointSpec(1, 2, ReplicaTemplate("worker", gpu_count=1), tick=5.0)

    async def work(world: World) -> None:
        await asyncio.sleep(6)
        world.allocator.losing = 1.0
        await world.create("e1", spec)
        await asyncio.sleep(2)
        [granted] = set(world.allocator.reservations) - {FOREIGN}
        if meanwhile == "an adapter goes":
            [node] = {gpu.node for gpu in world.allocator.reservations[granted].gpus}
            [other] = [one for one in world.adapters if one.register.node not in node]
            other.away = True
        else:
            world.allocator.expire(granted)
        await asyncio.sleep(2)
        world.allocator.losing = 0.0
        await asyncio.sleep(20)
        scaling_script.agrees(world)
        [row] = world.rows()
        assert row.state is ReplicaState.READY
        assert (row.lease.reservation == granted) is (meanwhile == "an adapter goes")

    played(work, scaling_script.ADAPTERS[:2])


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("a comes back", []),
        ("b comes", ["ADAPTER_LACKS_IT"]),
        ("its time is over and b comes", ["its reservation ended before it was used"]),
        ("scaled in", ["SCALED_IN"]),
        ("deleted", []),
        ("another template and c comes", ["TEMPLATE_CHANGED"]),
    ],
)
def test_a_grant_of_an_earlier_life_waits_for_an_adapter_that_can_use_it(then: str, why: list[str]) -> None:
    """Its autoscaler died before it heard of it, and its adapter is away: it is used or given back, and not asked for anew."""
    spec = EndpointSpec(0, 2, ReplicaTemplate("worker", gpu_count=1, lease_ttl=600.0), tick=5.0)
    others = {"node": "n1.rack-4", "templates": ("other",)}

    async def work(world: World) -> None:
        adapters = {one.register.adapter: one for one in world.adapters}
        adapters["b"].away = adapters["c"].away = True
        await asyncio.sleep(6)
        world.allocator.losing = 1.0
        await world.create("e1", spec)
        await world.user(lambda all_: all_.set_replicas("e1", 1, current=None, who="me"))
        await asyncio.sleep(2)
        adapters["a"].away, world.allocator.losing = True, 0.0
        world.life.dead.set()
        await asyncio.sleep(30)
        [granted] = set(world.allocator.reservations) - {FOREIGN}
        [waiting] = world.rows()
        assert (waiting.adapter, world.allocator.calls["RenewReservation"]) == ("", 0)
        if "template" in then:
            template = replace(spec.template, template="other")

            def change(before: EndpointSpec) -> EndpointSpec:
                return replace(before, template=template)

            await world.user(lambda all_: all_.update("e1", change, etag="", validate_only=False))
        if "over" in then:
            world.allocator.expire(granted)
        if "comes" in then:
            adapters[then.partition(" comes")[0][-1]].away = False
        elif then == "deleted":
            await world.user(lambda all_: all_.delete("e1", etag=""))
        else:
            await world.user(lambda all_: all_.set_replicas("e1", 0, current=None, who="me"))
        await asyncio.sleep(20)
        scaling_script.agrees(world)
        used = [row.lease.reservation for row in world.rows() if row.lease]
        assert len(used) == ("comes" in then)
        assert (used == [granted]) == (then == "a comes back")
        assert len(world.allocator.reservations) == 2 + ("comes" in then and used != [granted])
        with world.connection.begin():
            ended = [one for one in store.replicas(world.connection, show_ended=True) if one.ended]
        assert [one.end_reason.value if one.end_reason else one.reason for one in ended] == why

    played(work, [*scaling_script.ADAPTERS[:2], {"name": "c", **others}])


@pytest.mark.parametrize("effects", range(0, 60, 3))
def test_whoever_dies_between_the_models_that_it_would_like_asks_for_the_one_that_was_granted(
    effects: int,
) -> None:
    """The next life asks for the model that the last asked for, is told the same GPUs, and knows what they count for."""
    template = ReplicaTemplate(
        "worker", gpu_count=1, models=(ModelWeight("H100", 1.0), ModelWeight("A100", 1.0))
    )

    async def work(world: World) -> None:
        uuids = [uuid for node in scaling_script.NODES.values() for uuid in node]
        world.allocator.models = dict.fromkeys(uuids, "NVIDIA A100")
        await asyncio.sleep(6)
        world.life.left = effects
        await world.create("e1", EndpointSpec(2, 4, template, tick=5.0))
        await asyncio.sleep(10)
        await world.create("e1", EndpointSpec(2, 4, template, tick=5.0))  # where it died before it was stored
        await asyncio.sleep(20)
        scaling_script.agrees(world)
        assert world.lives == 2
        assert [one.template.models[0].model for one in world.rows()] == ["A100"] * 2
        assert len(world.allocator.reservations) == 3, (
            "what was granted to the last life is not asked for anew"
        )

    played(work, scaling_script.ADAPTERS[:2])


@pytest.mark.parametrize("seed", range(2))
def test_whoever_dies_meanwhile_the_higher_priority_has_its_gpus_and_the_lower_one_keeps_its_min(
    seed: int,
) -> None:
    """Work that takes its time, and an autoscaler that dies again and again: what gives way is on disk, and asked for anew."""
    per_ten = (Rule("t", "depth", TargetRule(10.0)),)
    pace = Pace(stabilization=0.0)
    one = ReplicaTemplate("worker", gpu_count=1, lease_ttl=30.0)
    batch = EndpointSpec(2, 9, one, (scaling_script.DEPTH,), per_ten, tick=2.0, down=pace, priority=-5)
    chat = EndpointSpec(3, 3, one, tick=2.0, priority=5)

    async def work(world: World) -> None:
        happens, dice = scaling_script.Script(world), world.dice
        world.queues["jobs"] = 70
        await world.create("e1", batch)
        await asyncio.sleep(20)
        own = [row for row in world.rows() if row.endpoint == "e1" and row.lease]
        assert len(own) == 6, "somebody else has the seventh"
        for adapter in world.adapters:
            adapter.finishes = False
        await world.create("e2", chat)
        for _ in range(dice.randrange(4)):
            world.life.left = dice.randrange(80)
            await asyncio.sleep(dice.choice([1, 4, 9]))
        await happens.mend(30)
        counts = Counter(row.endpoint for row in world.rows() if row.state is ReplicaState.READY)
        assert counts["e2"] == 3
        assert counts["e1"] in {2, 3}, (
            "who died may have given what was freed to it again, and has to take it back"
        )
        await happens.mend(130)
        assert Counter(row.endpoint for row in world.rows() if row.lease) == {"e1": 3, "e2": 3}
        scaling_script.agrees(world)

    async def script() -> None:
        world = World(seed, scaling_script.NODES, scaling_script.ADAPTERS[:2])
        await scaling_script.in_world(world, partial(work, world))

    run(script())

"""Scripts of changes, faults and deaths in a scaling world, and what must hold when all is mended."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from gpuscale.api.autoscaler.v1 import DecisionCode
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaState
from gpuscale.autoscaler.domain.rules.rule import Comparator, Rule, StepRule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.spec import (
    AdapterTier,
    Endpoint,
    EndpointSpec,
    GpuGate,
    Pace,
    QueueCount,
    QueueSignal,
    ReplicaTemplate,
    Signal,
)
from gpuscale.autoscaler.servicers.decision_servicer import verified
from gpuscale.autoscaler.state import decision_log, store
from gpuscale.common.errors import UnavailableError
from gpuscale.common.names import replica_name
from tests.property.autoscaler.scaling_doubles import FOREIGN, WorldAdapter
from tests.property.autoscaler.scaling_world import World, seeded
from tests.support.fake_allocator import ACTIVE

NODES = {
    "n1.rack-4": [f"GPU-{one:08X}-9ABC-DEF0" for one in range(4)],
    "n2": [f"MIG-ABCDEF0{one}" for one in range(3)],
}
ADAPTERS = [
    {"name": "a", "node": "n1.rack-4"},
    {"name": "b", "node": "n2"},
    {"name": "c", "node": "n1.rack-4", "max_replicas": 2},
]
NAMES = ["e1", "e2", "x" * 63]
DEPTH = Signal("depth", QueueSignal("jobs", QueueCount.TOTAL))
RULES = (
    (),
    (Rule("t", "depth", TargetRule(10.0)),),
    (
        Rule("u", "depth", StepRule(Comparator(">"), 10.0, 1), cooldown=3.0),
        Rule("d", "depth", StepRule(Comparator("<"), 5.0, -1), cooldown=3.0),
    ),
)
NO_PLACE = {
    DecisionCode.DECISION_CODE_NO_CAPACITY,
    DecisionCode.DECISION_CODE_UNSATISFIABLE,
    DecisionCode.DECISION_CODE_NO_ADAPTER,
}


def some_spec(dice: random.Random) -> EndpointSpec:
    template = ReplicaTemplate(
        "worker",
        adapter=dice.choice(["", "", "a", "b"]),
        parameters={"version": str(dice.randrange(3))},
        gpu_count=dice.choice([0, 1, 1, 2]),
        lease_ttl=dice.choice([10.0, 30.0, None]),
        drain_timeout=dice.choice([None, 5.0]),
    )
    if dice.random() < 0.2:
        tiers = (AdapterTier("a", dice.choice([0, 1])), AdapterTier("b"))
        template = replace(template, adapter="", tiers=tiers)
    low, rules = dice.randrange(3), dice.choice(RULES)
    return EndpointSpec(
        low,
        low + dice.randrange(1, 4),
        template=template,
        signals=(DEPTH,) if rules else (),
        rules=rules,
        tick=dice.choice([2.0, 5.0]),
        paused=dice.random() < 0.15,
        gpu_gate=dice.choice([GpuGate.RESERVE, GpuGate.RESERVE, GpuGate.CAP, GpuGate.ADVISE]),
        down=Pace(stabilization=dice.choice([0.0, 5.0])),
        warm_spares=dice.choice([0, 0, 1]) if low else 0,
        priority=dice.choice([None, None, -5, 0, 5]),
        preempt_after=dice.choice([0.0, 0.0, 3.0]),
    )


class Script:
    """What users, adapters, the allocator and fate do to a world, by the dice."""

    def __init__(self, world: World) -> None:
        self.world, self.dice = world, world.dice
        self.gpus_lost = False
        """Whether a GPU may rightly have gone to another replica before the one that had it ended."""

    async def happen(self) -> None:
        """One more thing, and some time after it."""
        name, adapter = self.dice.choice(NAMES), self.dice.choice(self.world.adapters)
        self._disturb(adapter) if self.dice.random() < 0.6 else await self._ask(name, adapter)
        pause = self.dice.choice([0, 0, 0.01, 0.3, 2, 7, 17])
        for _ in range(int(pause) + 1):
            await asyncio.sleep(min(pause, 1.0))
            self._pass()
        if self.dice.random() < 0.5:
            self._mend_services()
        if self.dice.random() < 0.3:
            adapter.away = adapter.silent = adapter.lies = False
            adapter.crashes = 0.0

    async def _ask(self, name: str, adapter: WorldAdapter) -> None:
        world, dice, spec = self.world, self.dice, some_spec(self.dice)
        match dice.choice(["create", "create", "update", "update", "template", "delete", "set", "forget"]):
            case "create":
                await world.create(name, spec)
            case "update":
                await world.user(lambda all_: all_.update(name, lambda _: spec, etag="", validate_only=False))
            case "template":
                template = {"version": str(dice.random())}

                def change(before: EndpointSpec) -> EndpointSpec:
                    return replace(before, template=replace(before.template, parameters=template))

                await world.user(lambda all_: all_.update(name, change, etag="", validate_only=False))
            case "delete":
                await world.user(lambda all_: all_.delete(name, etag=""))
            case "set":
                count = dice.randrange(5)
                await world.user(lambda all_: all_.set_replicas(name, count, current=None, who="me"))
            case _:
                if not await world.user(lambda _: world.hub.forget(adapter.register.adapter)):
                    self.gpus_lost = True

    def _disturb(self, adapter: WorldAdapter) -> None:
        if self.dice.random() < 0.5:
            self._disturb_adapter(adapter)
        else:
            self._disturb_services()

    def _disturb_adapter(self, adapter: WorldAdapter) -> None:
        dice = self.dice
        match dice.randrange(7):
            case 0:
                adapter.away = not adapter.away
            case 1:
                adapter.lag = dice.choice([0.0, 0.5, 3.0])
            case 2:
                adapter.silent = not adapter.silent
            case 3:
                others = [one for one in self.world.adapters if one is not adapter]
                adapter.lies = not adapter.lies
                adapter.doubly = [name for one in others for name in one.states]
            case 4:
                adapter.crashes = dice.choice([0.1, 0.5])
            case 5:
                adapter.finishes = False
            case _:
                adapter.makes_ready, adapter.acknowledges = dice.choice([(True, False), (False, True)])

    def _disturb_services(self) -> None:
        world, dice = self.world, self.dice
        match dice.randrange(9):
            case 8:
                node = dice.choice(list(NODES))
                self._undrain() if node in world.allocator.drained else world.allocator.drain(
                    node, dice.choice([3.0, 10.0, 40.0])
                )
            case 0:
                world.life.dead.set()
            case 1 | 2:
                world.life.left = dice.randrange(60)
            case 3:
                world.allocator.failure = UnavailableError("switched off")
            case 4:
                world.allocator.losing, world.allocator.slow = dice.choice([(0.3, 0.0), (0.8, 1.0)])
            case 5:
                live = {name for name, one in world.allocator.reservations.items() if one.state == ACTIVE}
                for name in sorted(live - {FOREIGN})[:1]:
                    world.allocator.expire(name)
                    self.gpus_lost = True
            case 6:
                world.state.failing = True
            case _:
                world.queues["jobs"] = dice.choice([None, 0, 3, 12, 25, 70])

    def _pass(self) -> None:
        world = self.world
        for one in world.adapters:
            one.some_end()
        unheard = world.allocator.failure or world.state.failing or world.allocator.losing
        self.gpus_lost = self.gpus_lost or bool(unheard) or world.life.dead.is_set()
        held = Counter(uuid for one in world.adapters for uuid in one.held())
        assert self.gpus_lost or max(held.values(), default=1) == 1, f"two replicas on a GPU: {held}"
        assert world.failure is None, world.failure

    def _undrain(self) -> None:
        """What ended at the deadline may not have left yet, and its GPUs go to others now."""
        allocator = self.world.allocator
        ended = {node for node, (until, _) in allocator.drained.items() if until <= self.world.clock.now()}
        self.gpus_lost = self.gpus_lost or bool(ended)
        for node in list(allocator.drained):
            allocator.undrain(node)

    def _mend_services(self) -> None:
        allocator = self.world.allocator
        allocator.failure, allocator.losing, allocator.slow = None, 0.0, 0.0
        self.world.state.failing = False

    async def mend(self, seconds: int) -> None:
        """Everything works again, for so long."""
        self._mend_services()
        self._undrain()
        self.world.life.left = None
        for one in self.world.adapters:
            one.away = one.silent = one.lies = False
            one.makes_ready = one.acknowledges = True
            one.lag = one.crashes = 0.0
            one.finish()
        if self.world.queues["jobs"] is None:
            self.world.queues["jobs"] = 12
        for _ in range(seconds):
            await asyncio.sleep(1.0)
            self._pass()


def agrees(world: World) -> None:
    """What is wanted, what is stored, what runs and what is reserved are the same."""
    with world.connection.begin():
        endpoints = {one.id: one for one in store.endpoints(world.connection)}
    rows = world.rows()
    running = [name for one in world.adapters for name in one.alive]
    assert sorted(running) == sorted(replica_name(one.endpoint, one.id) for one in rows if one.adapter)
    held = [uuid for one in world.adapters for uuid in one.held()]
    assert len(held) == len(set(held)), "two replicas on a GPU"
    live = {name: one for name, one in world.allocator.reservations.items() if one.state == ACTIVE}
    assert live.pop(FOREIGN).fence == 77, "others' reservations are not touched"
    leases = {one.lease.reservation: one.lease for one in rows if one.lease is not None}
    assert live.keys() == leases.keys(), "a reservation for each replica, and none for nobody"
    assert len(leases) == sum(one.lease is not None for one in rows)
    for name, lease in leases.items():
        assert tuple(gpu.uuid for gpu in live[name].gpus) == lease.gpu_uuids
    assert {one.endpoint for one in rows} <= endpoints.keys()
    for endpoint in endpoints.values():
        _has_what_it_wants(world, endpoint, [one for one in rows if one.endpoint == endpoint.id])


def _has_what_it_wants(world: World, endpoint: Endpoint, rows: list[Replica]) -> None:
    spec = endpoint.spec
    assert not endpoint.deleting
    assert spec.paused or spec.min_replicas <= endpoint.desired <= spec.max_replicas
    assert len(rows) == endpoint.desired
    assert all(one.aimed_at for one in rows)
    with world.connection.begin():
        ids = decision_log.decision_ids(world.connection, endpoint.id, None, 1000)
        decisions = decision_log.decisions(world.connection, ids)
    wires = [(decision_log.to_wire(one), decision_log.inputs_of(one)) for one in decisions]
    for one in rows:
        if one.adapter:
            assert one.state is ReplicaState.READY
            assert len(one.lease.gpu_uuids if one.lease else ()) == one.template.gpu_count
        else:
            assert NO_PLACE & {step.code for step in wires[0][0].steps}, "one that waits is explained"
    for wire, inputs in wires[:40]:
        if inputs is not None:
            assert verified(wire, inputs).equal, wire.name


def nothing_left(world: World) -> None:
    """Deleted endpoints leave nothing behind, but for what answers repeated requests."""
    assert [name for name, one in world.allocator.reservations.items() if one.state == ACTIVE] == [FOREIGN]
    assert not any(one.states for one in world.adapters)
    with world.connection.begin():
        for table in store.METADATA.sorted_tables:
            if table.name not in {"processrow", "endpointrequestrow"}:
                assert not world.connection.execute(table.select()).all(), table.name
    assert not world.reconciler._loops
    assert not world.wakes._wakes
    assert not world.histories._noted
    assert not world.repetitions._known
    assert not world.uses.of("jobs")
    assert not world.keeper._due
    names = [task.get_name() for task in asyncio.all_tasks()]
    assert not [name for name in names if name.startswith("endpoint ")]
    assert len([name for name in names if name.startswith("reports of")]) <= len(world.adapters)


async def in_world(world: World, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do something while the world goes round."""
    with seeded(world):
        lives = [world.live(), *(one.stay(world) for one in world.adapters)]
        tasks = [asyncio.create_task(one) for one in lives]
        try:
            await world._born.wait()
            world.allocator.foreign("n1.rack-4")
            await work()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

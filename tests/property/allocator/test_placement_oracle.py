"""What is granted is possible, and what is refused is not: against every placement there is, on small fleets.

Most faults of placement are of the second sort, and nobody notices: an ask that waits although it could be served.
"""

from collections import Counter
from dataclasses import replace
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuscale.allocator.domain.model import (
    WHOLE,
    Ask,
    GangStrategy,
    Gpu,
    GpuProcess,
    GpuSet,
    Node,
    NodeState,
    Pick,
    Policy,
    Use,
)
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from tests.property.allocator.placement_oracle import Oracle, TooManyError, all_free
from tests.support.allocator_values import MIB, NOW, gpu
from tests.support.placing import NOTHING, obstacle, reservation

GIB = 1024 * MIB
NAMED = frozenset({"gpu-00", "gpu-01", "gpu-10"})


def _gpu(random: Random, node: int, index: int) -> Gpu:
    total = random.choice([80_000, 80_000, 40_000])
    free = random.choice([total] * 6 + [total // 2, total * 19 // 20, 1000, None])
    one = gpu(
        f"GPU-{node}{index}",
        index=index,
        total=None if free is None and random.random() < 0.5 else total,
        free=free,
        utilization=random.choice([0.0] * 8 + [49.0, 50.0, None]),
        trouble=random.choice([""] * 14 + ["HUNG"]),
        quarantine=random.choice([""] * 14 + ["XID 79"]),
        fresh_until=NOW + random.choice([3] * 15 + [-1]),
    )
    return replace(
        one,
        model=random.choice(["A100", "A100", "T4"]),
        mig_profile=random.choice([""] * 10 + ["1g.10gb"]),
        processes=random.choice([(), (), (GpuProcess(8, GIB, "y", None),)]),
    )


def _node(random: Random, number: int) -> Node:
    gpus = [_gpu(random, number, index) for index in range(random.randint(1, 4))]
    if len(gpus) > 1 and random.random() < 0.15:
        gpus[-1] = replace(gpus[-1], mig_profile="1g.10gb", parent=gpus[0].uuid)
    return Node(
        id=f"n{number}",
        rank=number,
        state=random.choice([NodeState.ONLINE] * 14 + [NodeState.STALE, NodeState.OFFLINE]),
        gpus=tuple(gpus),
        labels=random.choice([{}, {"zone": "a"}]),
        cpu_milli=random.choice([None, 8_000, 64_000]),
        memory_total_bytes=random.choice([None, 64 * GIB]),
    )


def _plain_node(random: Random, number: int) -> Node:
    gpus = [gpu(f"GPU-{number}{index}", index=index) for index in range(random.randint(1, 4))]
    return Node(f"n{number}", number, NodeState.ONLINE, tuple(gpus))


def _ask(random: Random) -> Ask:
    """An ask with a few wishes of any sort."""
    any_node = frozenset[str]()
    return Ask(
        gpu_count=random.choice([1, 1, 1, 2, 2, 3]),
        min_memory_bytes=random.choice([0] * 4 + [8_000 * MIB, 30_000 * MIB, 90_000 * MIB]),
        max_utilization_percent=random.choice([100.0, 100.0, 50.0]),
        allow_unknown_utilization=random.random() < 0.5,
        policy=random.choice(list(Policy)),
        gpu_milli=random.choice([WHOLE, WHOLE, WHOLE, 700, 500, 300, 100]),
        gpu_memory_bytes=random.choice([None] * 4 + [20_000 * MIB, 50_000 * MIB]),
        mig_profile=random.choice([""] * 5 + ["1G.10gb"]),
        models=random.choice([()] * 7 + [("a100",), ("h100",)]),
        cpu_milli=random.choice([0] * 8 + [4_000, 30_000]),
        host_memory_bytes=random.choice([0] * 8 + [16 * GIB, 40 * GIB]),
        nodes=random.choice([any_node] * 10 + [frozenset({"n0"})]),
        excluded_nodes=random.choice([any_node] * 5 + [frozenset({"n0"})]),
        gpus=random.choice([any_node] * 6 + [NAMED]),
        excluded_gpus=random.choice([any_node] * 5 + [frozenset({"gpu-10"})]),
        node_labels=random.choice([()] * 9 + [(("zone", "a"),)]),
        apart_from=random.choice([()] * 5 + [(("job", "x"),)]),
        gpu_set=random.choice(list(GpuSet)),
        member_count=random.choice([1, 1, 2, 2, 3, 4]),
        gang_strategy=random.choice(list(GangStrategy)),
    )


def _is_of(one: Gpu, models: tuple[str, ...]) -> bool:
    return not models or any(model.lower() in one.model.lower() for model in models)


def _is_cordoned(node: Node, one: Gpu, cordons: frozenset[str]) -> bool:
    return not cordons.isdisjoint((f"nodes/{node.id}", one.uuid.lower(), one.parent.lower()))


class Fleet:
    """A small fleet that some reservations are on; a plain one has GPUs that are in order, and is empty."""

    def __init__(self, random: Random, *, plain: bool = False) -> None:
        make = _plain_node if plain else _node
        self.nodes = [make(random, number) for number in range(random.randint(1, 3))]
        self.use = Use()
        self.placer = Placer(self.use)
        self.cordons = (
            NOTHING if plain else frozenset(random.choice([(), (), (), ("nodes/n0",), ("gpu-10",)]))
        )
        self.placer.set_cordons(self.cordons)
        for node in self.nodes:
            self.placer.apply_node(node)
        for number in range(0 if plain else random.randint(0, 4)):
            labels = random.choice([{}, {"job": "x"}])
            self.serve(_ask(random), f"r{number}", fence=100 + number, labels=labels)

    def serve(self, ask: Ask, name: str, **fields: object) -> None:
        found = self.placer.place(ask, NOW)
        if isinstance(found, Pick):
            self.use.hold(reservation(found.gpus, name=name, ask=ask, **fields))

    def partition(self, random: Random) -> None:
        """The admin of a node makes its last GPU two MIG instances, or one GPU again; whoever holds it holds on."""
        at = random.randrange(len(self.nodes))
        *others, last = self.nodes[at].gpus
        parts = (f"{last.uuid}/{part}" for part in (1, 2))
        changed = [replace(last, uuid=one, mig_profile="1g.10gb", parent=last.uuid) for one in parts]
        if last.parent:
            changed = [replace(last, uuid=last.parent, mig_profile="", parent="")]
            others = [one for one in others if last.parent not in (one.parent, one.uuid)]
        self.nodes[at] = replace(self.nodes[at], gpus=(*others, *changed))
        self.placer.apply_node(self.nodes[at])

    def end_one(self, random: Random) -> None:
        names = {one.id for node in self.nodes for one in self.use.reservations(node.id)}
        if names:
            self.use.free(random.choice(sorted(names)))

    def check(self, ask: Ask) -> None:
        """The answer is right, and so is the sort of no it is."""
        found = self.placer.place(ask, NOW)
        possible = Oracle(self.nodes, self.use, self.cordons).node_counts(ask)
        if isinstance(found, Refusal):
            assert not possible or found.kind is RefusalKind.NOT_FOUND, found.message
            if found.kind in {RefusalKind.NO_CAPACITY, RefusalKind.UNSATISFIABLE}:
                alone = replace(ask, apart_from=())
                ever = Oracle(all_free(self.nodes), Use()).node_counts(alone)
                assert (found.kind is RefusalKind.UNSATISFIABLE) == (not ever), found.message
            return
        assert possible
        if ask.gang_strategy is GangStrategy.SPREAD:
            assert len(set(found.nodes)) == max(possible)
        if ask.gang_strategy is GangStrategy.PACK:
            assert len(set(found.nodes)) == min(possible)


@given(seed=st.integers(0, 2**32 - 1))
def test_an_ask_is_served_if_and_only_if_some_placement_serves_it(seed: int) -> None:
    random = Random(seed)
    fleet = Fleet(random)
    for _ in range(4):
        ask = _ask(random)
        random.choice([fleet.partition, fleet.end_one, lambda _: None])(random)
        if ask.nodes <= {node.id for node in fleet.nodes}:
            try:
                fleet.check(ask)
            except TooManyError:
                continue


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 2)
def test_a_gpu_is_never_given_beside_an_instance_of_it(seed: int) -> None:
    """However often its admin splits it and makes it whole again while somebody holds it, or a part of it."""
    random = Random(seed)
    fleet = Fleet(random, plain=True)
    for step in range(12):
        ask = Ask(
            random.choice([1, 1, 2]),
            0,
            100.0,
            policy=random.choice(list(Policy)),
            gpu_milli=random.choice([WHOLE, 300]),
            mig_profile=random.choice(["", "1g.10gb"]),
            member_count=random.choice([1, 1, 2]),
        )
        fleet.check(ask)
        random.choice(
            [fleet.partition, fleet.end_one, lambda _, ask=ask, step=step: fleet.serve(ask, f"s{step}")]
        )(random)
    held = [one for node in fleet.nodes for live in fleet.use.reservations(node.id) for one in live.gpus]
    assert not {one.uuid for one in held} & {one.parent for one in held}


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 2)
def test_a_packed_gang_lies_on_as_few_nodes_as_can_be(seed: int) -> None:
    """Also where each member shares several GPUs, of which the preferred ones may run out early."""
    random = Random(seed)
    fleet = Fleet(random, plain=True)
    for one in [one for node in fleet.nodes for one in node.gpus]:
        if milli := random.choice([0, 300, 700, 700]):
            fleet.serve(
                Ask(1, 0, 100.0, gpu_milli=milli, gpus=frozenset({one.uuid.lower()})), f"on {one.uuid}"
            )
    ask = Ask(
        random.choice([2, 2, 3]),
        0,
        100.0,
        policy=random.choice(list(Policy)),
        gpu_milli=300,
        gpu_set=random.choice(list(GpuSet)),
        member_count=random.choice([2, 3]),
        gang_strategy=random.choice([GangStrategy.PACK, GangStrategy.STRICT_PACK]),
    )
    fleet.check(ask)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=settings().max_examples // 2)
@example(332)  # a node without a GPU that fits
def test_an_explanation_counts_what_each_constraint_removes(seed: int) -> None:
    """In order: the first obstacle of each GPU. Alone: the GPUs it would keep out if the ask wished nothing else."""
    random = Random(seed)
    fleet = Fleet(random)
    if random.random() < 0.5:
        fleet.partition(random)
    ask = replace(_ask(random), nodes=NOTHING, gpus=NOTHING, member_count=1)
    outlook = fleet.placer.explain(ask, NOW)
    pairs = [(node, one) for node in fleet.nodes for one in node.gpus]
    first = Counter(obstacle(node, one, fleet.use, ask, NOW, fleet.cordons) for node, one in pairs)
    del first[None]
    assert {one.obstacle: one.removed_in_order for one in outlook.effects if one.removed_in_order} == first
    if isinstance(outlook.answer, Refusal):
        assert outlook.answer.obstacles == first
    alone = {
        Obstacle.MODEL_DIFFERS: sum(not _is_of(one, ask.models) for _, one in pairs),
        Obstacle.CORDONED: sum(_is_cordoned(node, one, fleet.cordons) for node, one in pairs),
        Obstacle.GPU_NOT_OK: sum(bool(one.trouble) for _, one in pairs),
        Obstacle.QUARANTINED: sum(bool(one.quarantine) for _, one in pairs),
        Obstacle.MEMORY_UNKNOWN: sum(
            None in (one.memory_free_bytes, one.memory_total_bytes) for _, one in pairs
        ),
    }
    for effect in outlook.effects:
        assert effect.removed_in_order <= effect.removed_alone <= len(pairs)
        assert effect.removed_alone == alone.get(effect.obstacle, effect.removed_alone), effect.obstacle
    seen = {one.gpu.uuid: one for node in outlook.nodes for one in node.gpus}
    for node, one in pairs:
        assert seen[one.uuid].obstacle is obstacle(node, one, fleet.use, ask, NOW, fleet.cordons)
        assert (seen[one.uuid].score is None) == (seen[one.uuid].obstacle is not None)

"""The arrays answer what a plain look at every GPU answers, whatever happened before and in whatever order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuscale.allocator.domain import model
from gpuscale.allocator.placing.columns import Columns
from gpuscale.allocator.placing.constraints import ABSENT, Constraints
from gpuscale.allocator.placing.index import Index
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.policies import Demand, Tariff, expected_waste, typical, value, value_of
from tests.support.allocator_values import MIB, NOW, gpu, reserved
from tests.support.placing import best_node, obstacle, placer, reservation

GIB = 1024 * MIB
CORDONS = ("nodes/n1", "0-1", "2-0")
NO_TYPICAL = typical({}, lambda _: np.ones(0, np.bool_))
PLAIN = (model.Policy.SPREAD, model.Policy.BESTFIT, model.Policy.FIRSTFIT)


@st.composite
def gpus(draw: st.DrawFn, name: str, index: int) -> model.Gpu:
    """A GPU of any sort, most of them fit for something."""
    free = draw(st.sampled_from([80_000, 80_000, 40_000, 1_000, None]))
    profile = draw(st.sampled_from(["", "", "", "1g.10gb"]))
    return replace(
        gpu(
            name,
            index=index,
            total=draw(st.sampled_from([80_000, 80_000, None])) if free is None else 80_000,
            free=free,
            utilization=draw(st.sampled_from([0.0, 0.0, 49.0, 50.0, None])),
            trouble=draw(st.sampled_from(["", "", "", "HUNG"])),
            quarantine=draw(st.sampled_from(["", "", "", "XID 79"])),
            fresh_until=NOW + draw(st.sampled_from([-1, 3, 3, 3])),
        ),
        model=draw(st.sampled_from(["A100", "T4"])),
        rated_watts=draw(st.sampled_from([None, 400.0, 70.0])),
        mig_profile=profile,
        parent=f"{name[0]}-0" if profile and index else "",
        processes=draw(
            st.sampled_from(
                [(), (model.GpuProcess(7, 3 * GIB, "x", 1),), (model.GpuProcess(8, GIB, "y", None),)]
            )
        ),
    )


@st.composite
def reports(draw: st.DrawFn, of: model.Gpu) -> model.Gpu:
    """The next report of a GPU: later, or old by now, and perhaps busier."""
    return replace(
        of,
        fresh_until=NOW + draw(st.sampled_from([-1, 3, 4])),
        utilization_percent=draw(st.sampled_from([of.utilization_percent, 70.0])),
        rated_watts=draw(st.sampled_from([of.rated_watts, 300.0])),
    )


@st.composite
def turns(draw: st.DrawFn, of: model.Gpu) -> model.Gpu:
    """The next report of a GPU of which anything may have changed."""
    other = draw(gpus(of.uuid, of.index))
    kept = draw(
        st.sets(st.sampled_from(["trouble", "quarantine", "model", "mig_profile", "parent", "processes"]))
    )
    return replace(other, **{name: getattr(of, name) for name in kept})


@st.composite
def nodes(draw: st.DrawFn, rank: int) -> model.Node:
    """A node of any sort with up to four GPUs."""
    return model.Node(
        id=f"n{rank}",
        rank=rank,
        state=draw(
            st.sampled_from([model.NodeState.ONLINE] * 4 + [model.NodeState.STALE, model.NodeState.OFFLINE])
        ),
        gpus=tuple(draw(gpus(f"{rank}-{index}", index)) for index in range(draw(st.integers(0, 4)))),
        labels=draw(st.sampled_from([{}, {"zone": "a"}])),
        cpu_milli=draw(st.sampled_from([None, 8_000, 64_000])),
        memory_total_bytes=draw(st.sampled_from([None, 64 * GIB])),
    )


@st.composite
def asks(draw: st.DrawFn, policies: tuple[model.Policy, ...] = tuple(model.Policy)) -> model.Ask:
    """An ask with some wishes, most of them open."""
    milli = draw(st.sampled_from([model.WHOLE, model.WHOLE, 500, 300]))
    return model.Ask(
        gpu_count=draw(st.integers(0, 3)),
        min_memory_bytes=draw(st.sampled_from([0, 8_000 * MIB])),
        max_utilization_percent=draw(st.sampled_from([100.0, 50.0])),
        allow_unknown_utilization=draw(st.booleans()),
        policy=draw(st.sampled_from(policies)),
        gpu_milli=milli,
        gpu_memory_bytes=draw(st.sampled_from([None, None, None, 20 * GIB])),
        mig_profile=draw(st.sampled_from(["", "", "", "1G.10gb"])),
        models=draw(st.sampled_from([(), (), ("a100",)])),
        cpu_milli=draw(st.sampled_from([0, 0, 4_000])),
        host_memory_bytes=draw(st.sampled_from([0, 0, 16 * GIB])),
        nodes=draw(st.sampled_from([frozenset[str](), frozenset({"n0", "n1"})])),
        excluded_nodes=draw(st.sampled_from([frozenset[str](), frozenset({"n0"})])),
        excluded_gpus=draw(st.sampled_from([frozenset[str](), frozenset({"1-0"})])),
        node_labels=draw(st.sampled_from([(), (), (("zone", "a"),)])),
        apart_from=draw(st.sampled_from([(), (), (("job", "x"),)])),
    )


class World:
    """A placer that went through a history, and what it should know."""

    def __init__(self) -> None:
        self.use = model.Use()
        self.placer = Placer(self.use)
        self.nodes: dict[str, model.Node] = {}
        self.cordons: frozenset[str] = frozenset()
        self.now = NOW

    def step(self, data: st.DataObject) -> None:
        what = data.draw(
            st.sampled_from(
                ["node", "node", "again", "renew", "place", "place", "wait", "free", "cordon", "remove"]
            )
        )
        if what == "node":
            node = data.draw(st.integers(0, 3).flatmap(nodes))
            self.nodes[node.id] = node
            self.placer.apply_node(node)
        elif what == "again" and self.nodes:
            node = self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))]
            node = replace(node, gpus=tuple(data.draw(reports(gpu)) for gpu in node.gpus))
            self.nodes[node.id] = node
            self.placer.apply_node(node)
        elif what == "renew" and self.nodes:
            self.renew(data.draw(st.sampled_from(sorted(self.nodes))), data.draw(st.sampled_from([2, 5])))
        elif what == "place":
            self.serve(data.draw(asks()), labels=data.draw(st.sampled_from([{}, {"job": "x"}])))
        elif what == "wait":
            self.now += data.draw(st.sampled_from([1, 3]))
        elif what == "free":
            live = sorted({one.id for node in self.nodes for one in self.use.reservations(node)})
            if live:
                self.use.free(data.draw(st.sampled_from(live)))
        elif what == "cordon":
            self.cordons = data.draw(st.frozensets(st.sampled_from(CORDONS), max_size=2))
            self.placer.set_cordons(self.cordons)
        elif self.nodes:
            gone = data.draw(st.sampled_from(sorted(self.nodes)))
            del self.nodes[gone]
            self.placer.remove_node(gone)

    def renew(self, node: str, seconds: float) -> bool:
        """What was read of a node counts for longer."""
        for one in self.nodes[node].gpus:
            one.fresh_until = max(one.fresh_until, self.now + seconds)
        return self.placer.renew_node(node)

    def serve(self, ask: model.Ask, **fields: object) -> None:
        """Place an ask and hold what it got: the books refuse what is given twice."""
        found = self.placer.place(ask, self.now)
        if isinstance(found, model.Pick):
            self.use.hold(reservation(found.gpus, name=f"r{id(found)}", ask=ask, **fields))


@pytest.mark.parametrize("most", [3, 0])
@given(data=st.data(), wish=asks(PLAIN))
@settings(max_examples=settings().max_examples // 2)
def test_whatever_happened_the_placer_answers_as_a_plain_look_does(
    data: st.DataObject, wish: model.Ask, most: int
) -> None:
    world, ask = World(), replace(wish, gpu_count=min(wish.gpu_count, most))
    for _ in range(data.draw(st.integers(1, 10))):
        world.step(data)
    known = [world.nodes[name] for name in sorted(world.nodes)]
    outlook = world.placer.explain(ask, world.now)
    for seen in outlook.nodes:
        for one in seen.gpus:
            expected = obstacle(seen.node, one.gpu, world.use, ask, world.now, world.cordons)
            assert one.obstacle is expected, one.gpu.uuid
    if ask.nodes <= set(world.nodes):
        expected_node = best_node(known, world.use, ask, world.now, world.cordons)
        answer = world.placer.place(ask, world.now)
        assert (answer.nodes[0] if isinstance(answer, model.Pick) else None) == expected_node


@given(data=st.data(), ask=asks(), shuffle=st.randoms(use_true_random=False))
@settings(max_examples=settings().max_examples // 2)
def test_neither_history_nor_order_matters(data: st.DataObject, ask: model.Ask, shuffle) -> None:
    """A placer that comes to the same fleet in another order, at once, gives the same answer."""
    world = World()
    for _ in range(data.draw(st.integers(1, 8))):
        world.step(data)
    fresh = list(world.nodes.values())
    shuffle.shuffle(fresh)
    answer = world.placer.place(
        ask, world.now
    )  # first: those that come later are told of all changes in its place
    other = placer(fresh, world.use, world.cordons)
    in_order = placer(world.nodes.values(), world.use, world.cordons)
    assert other.place(ask, world.now) == in_order.place(ask, world.now)
    if ask.policy in PLAIN:
        assert other.place(ask, world.now) == answer


WISHES = tuple(
    model.Ask(count, 0, 100.0, policy=policy, gpu_milli=milli, cpu_milli=cpu)
    for policy in PLAIN
    for count, milli, cpu in ((1, model.WHOLE, 0), (1, 300, 0), (1, 500, 20_000), (2, 300, 0))
)


@given(data=st.data(), wish=st.sampled_from(WISHES))
@settings(max_examples=settings().max_examples // 2)
def test_an_ask_that_comes_again_is_answered_as_by_a_placer_that_never_saw_it(
    data: st.DataObject, wish: model.Ask
) -> None:
    """Of what was worked out for it before, only the GPUs that were held or freed since are looked at anew."""
    world = World()
    for rank in range(2):
        gpus_of = tuple(gpu(f"{rank}-{index}", index=index, utilization=5.0 * index) for index in range(3))
        world.nodes[f"n{rank}"] = model.Node(
            f"n{rank}", rank, model.NodeState.ONLINE, gpus_of, cpu_milli=64_000
        )
        world.placer.apply_node(world.nodes[f"n{rank}"])
    live: list[str] = []
    for name in range(data.draw(st.integers(2, 12))):
        if live and data.draw(st.integers(0, 2)) == 0:
            world.use.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        other = data.draw(st.sampled_from([wish, *WISHES]))
        found = world.placer.place(other, NOW)
        if isinstance(found, model.Pick):
            world.use.hold(reservation(found.gpus, name=f"r{name}", ask=other))
            live.append(f"r{name}")
        answer = world.placer.place(wish, NOW, again=True)
        assert answer == placer(world.nodes.values(), world.use).place(wish, NOW, again=True)


@given(
    data=st.data(),
    wish=asks(),
    members=st.integers(1, 5),
    strategy=st.sampled_from(model.GangStrategy),
    gpu_set=st.sampled_from(model.GpuSet),
)
@settings(max_examples=settings().max_examples // 2)
def test_a_gang_is_whole_or_nothing_and_leaves_no_trace(
    data: st.DataObject, wish: model.Ask, members: int, strategy: model.GangStrategy, gpu_set: model.GpuSet
) -> None:
    world = World()
    for _ in range(data.draw(st.integers(2, 6))):
        world.step(data)
    ask = replace(wish, member_count=members, gang_strategy=strategy, gpu_set=gpu_set)
    before = [(gpu.uuid, world.use.gpu(gpu.uuid)) for node in world.nodes.values() for gpu in node.gpus]
    found = world.placer.place(ask, world.now)
    assert before == [
        (gpu.uuid, world.use.gpu(gpu.uuid)) for node in world.nodes.values() for gpu in node.gpus
    ]
    if not isinstance(found, model.Pick):
        return
    assert [one.member for one in found.gpus] == sorted(list(range(members)) * ask.gpu_count)
    if strategy is model.GangStrategy.STRICT_PACK:
        assert len(set(found.nodes)) == 1
    if strategy is model.GangStrategy.STRICT_SPREAD:
        assert len(set(found.nodes)) == members
    world.use.hold(reservation(found.gpus, name="gang", ask=ask))
    for node in world.nodes.values():
        held = world.use.node(node.id)
        assert not ask.cpu_milli or held.cpu_milli <= (node.cpu_milli or 0)


@given(data=st.data(), ask=asks(), victims=st.integers(0, 3))
@settings(max_examples=settings().max_examples // 2)
def test_what_if_changes_nothing_and_is_what_comes_true(
    data: st.DataObject, ask: model.Ask, victims: int
) -> None:
    """Where nothing runs on the GPUs yet, thinking reservations away answers as freeing them does."""
    world = World()
    for _ in range(data.draw(st.integers(2, 6))):
        world.step(data)
    if any(gpu.processes for node in world.nodes.values() for gpu in node.gpus):
        for node in list(world.nodes.values()):
            idle = replace(node, gpus=tuple(_idle(gpu) for gpu in node.gpus))
            world.nodes[node.id] = idle
            world.placer.apply_node(idle)
    live = sorted({one.id for node in world.nodes for one in world.use.reservations(node)})[:victims]
    now_before = world.placer.place(ask, world.now, again=True)
    imagined = world.placer.place_after(ask, world.now, live)
    assert world.placer.place(ask, world.now, again=True) == now_before
    for one in live:
        world.use.free(one)
    assert isinstance(world.placer.place(ask, world.now, again=True), model.Pick) <= isinstance(
        imagined, model.Pick
    )


@given(
    data=st.data(),
    ask=asks(),
    count=st.integers(0, 3),
    cpu_per_gpu=st.sampled_from([0.0, 7.0]),
    price=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=settings().max_examples // 2)
def test_a_row_alone_is_worth_what_it_is_worth_among_many(
    data: st.DataObject, ask: model.Ask, count: int, cpu_per_gpu: float, price: float
) -> None:
    """Few rows are looked at one by one, many in arrays: codes and values agree to the last bit."""
    world = World()
    for _ in range(data.draw(st.integers(2, 8))):
        world.step(data)
    open_ask = replace(
        ask, gpu_count=count, nodes=frozenset(), excluded_nodes=frozenset(), node_labels=(), apart_from=()
    )
    wish = replace(
        open_ask, excluded_gpus=frozenset(), max_utilization_percent=data.draw(st.sampled_from([50.0, 100.0]))
    )
    if wish.policy is model.Policy.FGD:
        return
    columns = Columns(list(world.nodes.values()), world.use, world.cordons)
    columns.age(NOW)
    constraints, every = Constraints(columns, world.use, wish), np.arange(len(columns))
    scarcity = data.draw(st.sampled_from([0.0, 0.5])) if cpu_per_gpu else 0.0
    shares = {(0, 1, milli, ()): 1 for milli in data.draw(st.sets(st.integers(1, 999), max_size=3))}
    rare = dict.fromkeys(list(columns.builds)[:1], price)
    tariff = Tariff(cpu_per_gpu, rare, expected_waste(shares), scarcity, saves=data.draw(st.booleans()))
    node_codes_then, gpu_codes_then = constraints.codes(every, NOW)
    free = gpu_codes_then == 0
    values = value(wish, columns, every, free, constraints, tariff, lambda: NO_TYPICAL)
    fits = free.sum(1) >= count if count else node_codes_then == 0
    for at in range(len(columns)):
        row = columns.row(at)
        node, codes = constraints.codes_of(row, NOW)
        assert node == node_codes_then[at]
        assert codes == gpu_codes_then[at, : len(codes)].tolist()
        assert set(gpu_codes_then[at, len(codes) :].tolist()) <= {ABSENT}
        again = list(codes)
        constraints.codes_after_use(row, range(len(codes)), node, again)
        assert again == codes
        if fits[at]:
            assert value_of(wish, row, codes, constraints, tariff) == float(values[at])


@pytest.mark.parametrize("profile", ["", "1g.10gb"])
def test_watts_and_instances_count_in_a_row_alone_as_among_many(profile: str) -> None:
    parts = (replace(gpu(f"n-{at}", index=at), rated_watts=300.0 + at) for at in range(3))
    known = [replace(one, mig_profile=profile, parent="n" if profile else "") for one in parts]
    columns = Columns([model.Node("n0", 0, model.NodeState.ONLINE, tuple(known))], model.Use(), frozenset())
    wish = model.Ask(1, 0, 100.0, policy=model.Policy.PACK, mig_profile=profile)
    constraints, tariff = Constraints(columns, model.Use(), wish), Tariff(saves=True)
    free = np.ones((1, 3), np.bool_)
    [among] = value(wish, columns, np.arange(1), free, constraints, tariff, lambda: NO_TYPICAL).tolist()
    assert value_of(wish, columns.row(0), [0, 0, 0], constraints, tariff) == among


LAYOUTS = (("1g.10gb",) * 7, ("3g.40gb", "2g.20gb", "2g.20gb"), ("3g.40gb", *("1g.10gb",) * 4))


@given(data=st.data(), policy=st.sampled_from(model.Policy))
@settings(max_examples=settings().max_examples // 2)
def test_no_instance_comes_from_an_idle_gpu_while_one_in_use_has_it(
    data: st.DataObject, policy: model.Policy
) -> None:
    """So that idle ones can be partitioned anew: within a node by any policy, on all nodes by `pack`."""
    use = model.Use()
    of, instances = placer((), use), dict[str, model.Gpu]()
    for rank, layouts in enumerate(
        data.draw(
            st.lists(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=4), max_size=3, min_size=1)
        )
    ):
        parts = [
            replace(
                gpu(f"{rank}-{at}-{number}", index=10 * at + number, total=10_000 * int(profile[0])),
                memory_free_bytes=10_000 * MIB * int(profile[0]),
                mig_profile=profile,
                parent=f"{rank}-{at}",
            )
            for at, layout in enumerate(layouts)
            for number, profile in enumerate(layout)
        ]
        instances |= {one.uuid: one for one in parts}
        of.apply_node(model.Node(f"n{rank}", rank, model.NodeState.ONLINE, tuple(parts)))
    live: list[str] = []
    for name in range(data.draw(st.integers(1, 30))):
        if live and data.draw(st.integers(0, 2)) == 0:
            use.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        profile = data.draw(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]))
        found = of.place(model.Ask(1, 0, 100.0, policy=policy, mig_profile=profile), NOW)
        if not isinstance(found, model.Pick):
            continue
        [taken] = found.gpus
        used = {instances[uuid].parent for uuid in instances if use.gpu(uuid).milli}
        idle = [one for one in instances.values() if one.parent in used and not use.gpu(one.uuid).milli]
        had = [one for one in idle if one.mig_profile == profile]
        if policy is not model.Policy.PACK:
            had = [one for one in had if one.uuid[0] == taken.uuid[0]]
        assert taken.parent in used or not had
        live.append(f"r{name}")
        use.hold(reservation(found.gpus, name=live[-1]))


@given(data=st.data(), cordons=st.frozensets(st.sampled_from(CORDONS), max_size=2))
@settings(max_examples=settings().max_examples // 2)
def test_following_what_is_held_leads_to_what_a_fresh_look_finds(
    data: st.DataObject, cordons: frozenset[str]
) -> None:
    """Only the GPUs that were held or freed are written anew: all figures are those of columns made from nothing."""
    known = [data.draw(nodes(rank)) for rank in range(2)]
    use = model.Use()
    index = Index(known, use, Demand(), cordons)
    places = [(node, one) for node in known for one in node.gpus]
    for step in range(data.draw(st.integers(1, 8)) if places else 0):
        live = sorted({one.id for node in known for one in use.reservations(node.id)})
        if live and data.draw(st.booleans()):
            use.free(data.draw(st.sampled_from(live)))
        else:
            node, one = data.draw(st.sampled_from(places))
            milli = data.draw(st.sampled_from([model.WHOLE, 500, 300]))
            if use.gpu(one.uuid).milli + milli <= model.WHOLE:
                held = replace(reserved(one.uuid, node=node.id, milli=milli, memory=1024), parent=one.parent)
                use.hold(reservation([held], name=f"r{step}", ask=model.Ask(1, 0, 100.0, cpu_milli=1000)))
        index.follow(NOW)
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(known) - 1))
            reported = data.draw(st.sampled_from([_later, _undivided]))
            known[at] = replace(known[at], gpus=tuple(reported(one) for one in known[at].gpus))
            index.columns.write(at, known[at])
        for at in range(len(known)):
            index.columns.row(at).scores(model.Weights())  # kept from now on, until it changes
    fresh = Columns(known, use, cordons)
    for name in ("held", "available", "utilization", "cpu_free", "memory_free", "free_milli"):
        np.testing.assert_array_equal(getattr(index.columns, name), getattr(fresh, name), name)
    for at in range(len(known)):
        followed, looked = index.columns.row(at), fresh.row(at)
        assert (followed.node, followed.gpus, followed.places) == (looked.node, looked.gpus, looked.places)
        assert followed.scores(model.Weights()) == looked.scores(model.Weights())
    before, old = index.columns.changed.copy(), NOW + 20
    index.follow(old)
    for at, node in enumerate(known):
        became_old = any(NOW <= one.fresh_until < old for one in node.gpus)
        assert became_old <= bool(index.columns.changed[at] > before[at]), "no shape would look at it again"


def _later(one: model.Gpu) -> model.Gpu:
    return replace(one, fresh_until=one.fresh_until + 1)


def _undivided(one: model.Gpu) -> model.Gpu:
    """What was a MIG instance is a GPU of its own, so that its former GPU is whole again."""
    return replace(one, uuid=f"{one.uuid}'", parent="") if one.parent else one


def _idle(one: model.Gpu) -> model.Gpu:
    total = one.memory_total_bytes
    return replace(one, processes=(), memory_free_bytes=total, utilization_percent=0.0)


@given(data=st.data(), ask=asks())
@settings(max_examples=settings().max_examples // 2)
def test_a_report_by_which_an_ask_fits_that_did_not_is_told(data: st.DataObject, ask: model.Ask) -> None:
    world = World()
    for _ in range(data.draw(st.integers(2, 6))):
        world.step(data)
    for name, node in sorted(world.nodes.items()):
        before = world.placer.place(ask, world.now, again=True)
        report = turns if data.draw(st.booleans()) else reports
        if data.draw(st.booleans()):
            told = world.renew(name, 5)
        else:
            gpus_of = tuple(data.draw(report(gpu)) for gpu in node.gpus)
            told = world.placer.apply_node(replace(node, gpus=gpus_of))
        after = world.placer.place(ask, world.now, again=True)
        assert told or isinstance(before, model.Pick) or not isinstance(after, model.Pick), name


def test_a_reading_counts_no_more_for_any_ask_once_it_is_too_old() -> None:
    of = placer([model.Node("n0", 0, model.NodeState.ONLINE, (gpu(fresh_until=NOW),))])
    assert isinstance(of.place(model.Ask(1, 0, 100.0), NOW), model.Pick)
    for policy in model.Policy:  # each looks at all nodes for the first time
        assert not isinstance(of.place(model.Ask(1, 0, 100.0, policy=policy), NOW + 1), model.Pick)


def test_a_report_that_helps_no_ask_is_not_told() -> None:
    world = World()
    held, free = (gpu(f"0-{at}", index=at, free=40_000, utilization=30.0) for at in range(2))
    world.placer.apply_node(model.Node("n0", 0, model.NodeState.ONLINE, (held, free)))
    one = model.Ask(1, 0, 100.0, gpus=frozenset({held.uuid}))
    found = world.placer.place(one, NOW)
    world.use.hold(reservation(found.gpus, name="r"))
    assert not isinstance(world.placer.place(one, NOW), model.Pick)

    def told(*gpus_of: model.Gpu) -> bool:
        return world.placer.apply_node(model.Node("n0", 0, model.NodeState.ONLINE, gpus_of))

    assert not told(replace(held, fresh_until=NOW + 9), replace(free, fresh_until=NOW + 9))
    busier = replace(free, memory_free_bytes=30_000 * MIB, utilization_percent=90.0)
    assert not told(held, busier)
    assert not told(replace(held, memory_free_bytes=80_000 * MIB, utilization_percent=0.0), busier)
    assert told(held, replace(busier, utilization_percent=80.0))
    assert told(held, replace(busier, memory_free_bytes=31_000 * MIB))
    assert told(held, replace(busier, utilization_percent=None)), "some asks allow what is unknown"
    assert told(held, busier), "others do not"
    assert told(held, replace(busier, trouble="HUNG")), "whatever else is new"

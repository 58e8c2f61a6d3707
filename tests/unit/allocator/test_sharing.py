"""Shares of GPUs, memory that is truly there, MIG instances, sets of GPUs, and gangs."""

from collections import Counter
from dataclasses import replace

import pytest

from gpuscale.allocator.feasibility import Obstacle
from gpuscale.allocator.model import (
    Ask,
    GangStrategy,
    Gpu,
    GpuProcess,
    GpuSet,
    Policy,
    ReservedGpu,
)
from gpuscale.allocator.placement import Pick
from gpuscale.allocator.placer import Placer
from gpuscale.allocator.refusal import Refusal, RefusalKind
from gpuscale.allocator.use import Use
from tests.support.allocator_values import MIB, NOW, ask, gpu, node, plain_node
from tests.support.placing import placer, reservation


def take(of: Placer, use: Use, wish: Ask, *, fence: int = 1) -> tuple[ReservedGpu, ...]:
    """Place and hold."""
    answer = of.place(wish, NOW)
    assert isinstance(answer, Pick), answer
    use.hold(reservation(answer.gpus, fence=fence, ask=wish))
    return answer.gpus


def refused(of: Placer, wish: Ask) -> Refusal:
    answer = of.place(wish, NOW)
    assert isinstance(answer, Refusal), answer
    return answer


@pytest.mark.parametrize("policy", Policy)
def test_sixteen_halves_on_eight_gpus_are_two_on_each(policy: Policy) -> None:
    """kai-scheduler #2153 put three and four on one card. The driver keeps 600 MiB of each."""
    use = Use()
    of = placer([node("n0", *(gpu(f"g{i}", index=i, free=79_400) for i in range(8)))], use)
    half = replace(ask(), gpu_milli=500, policy=policy)
    taken = [take(of, use, half)[0] for _ in range(16)]
    assert Counter(one.uuid for one in taken) == {f"g{i}": 2 for i in range(8)}
    for uuid in {one.uuid for one in taken}:
        assert sum(one.memory_bytes or 0 for one in taken if one.uuid == uuid) <= 79_400 * MIB
    assert refused(of, half).obstacles == {Obstacle.HELD: 8}


def test_memory_that_is_granted_is_not_there_for_the_next_even_before_it_is_used() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    big = replace(ask(), gpu_milli=100, gpu_memory_bytes=60_000 * MIB)
    take(of, use, big)
    assert refused(of, big).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}
    take(of, use, replace(ask(), gpu_milli=100, gpu_memory_bytes=20_000 * MIB))


def test_memory_in_use_by_its_holder_is_not_counted_twice() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    take(of, use, replace(ask(), gpu_milli=500), fence=7)
    busy = replace(
        gpu("n0-0", free=45_000, utilization=99.0), processes=(GpuProcess(1, 35_000 * MIB, "train", 7),)
    )
    of.apply_node(node("n0", busy))
    rest = replace(ask(utilization=50), gpu_milli=500)
    assert take(of, use, rest)[0].memory_bytes == 40_000 * MIB


def test_outsiders_are_subtracted_and_named() -> None:
    stranger = replace(gpu("g0", free=30_000), processes=(GpuProcess(42, 50_000 * MIB, "python", None),))
    answer = refused(placer([node("n0", stranger)]), replace(ask(), gpu_milli=500))
    assert answer.obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}
    assert "processes of no reservation there: python (42) uses 50000 MiB" in answer.message


def test_memory_alone_sets_the_share_of_the_gpu() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    quarter = replace(ask(), gpu_memory_bytes=20_000 * MIB)
    assert [take(of, use, quarter)[0].milli for _ in range(4)] == [250] * 4
    assert refused(of, quarter).obstacles == {Obstacle.HELD: 1}


def test_a_whole_gpu_admits_nobody_beside_it_and_wants_nobody() -> None:
    use = Use()
    of = placer([plain_node("n0", 2)], use)
    take(of, use, ask())
    assert take(of, use, replace(ask(), gpu_milli=100))[0].uuid == "n0-1"
    assert refused(of, ask()).obstacles == {Obstacle.HELD: 2}


def mig() -> list[Gpu]:
    """A GPU that is split, two instances of it, and a whole GPU."""
    parts = [
        replace(gpu(f"MIG-{i}", index=i + 1, utilization=None), mig_profile="1g.10gb", parent="GPU-p")
        for i in range(2)
    ]
    return [gpu("GPU-p"), *parts, gpu("GPU-w", index=3)]


def test_mig_instances_go_to_those_who_ask_for_the_profile_and_split_gpus_to_nobody() -> None:
    of = placer([node("n0", *mig())])
    assert isinstance(answer := of.place(ask(), NOW), Pick)
    assert [one.uuid for one in answer.gpus] == ["GPU-w"]
    small = replace(ask(2, unknown=True), mig_profile="1G.10GB")
    assert isinstance(answer := of.place(small, NOW), Pick)
    assert [one.uuid for one in answer.gpus] == ["MIG-0", "MIG-1"]
    assert refused(of, replace(small, gpu_count=3)).kind is RefusalKind.UNSATISFIABLE
    assert refused(of, ask(2)).kind is RefusalKind.UNSATISFIABLE


def test_a_cordon_covers_a_node_a_gpu_and_the_instances_of_a_gpu() -> None:
    of = placer([node("n0", *mig()), plain_node("n1", 1, rank=1)])
    of.set_cordons(frozenset({"gpu-p", "nodes/n1"}))
    assert refused(of, replace(ask(unknown=True), mig_profile="1g.10gb")).obstacles[Obstacle.CORDONED] == 2
    assert isinstance(answer := of.place(ask(), NOW), Pick)
    assert answer.nodes == ("n0",)
    of.set_cordons(frozenset({"gpu-w"}))
    assert isinstance(answer := of.place(ask(), NOW), Pick)
    assert answer.nodes == ("n1",)


def test_a_balanced_set_is_searched_for_not_refused() -> None:
    """seeds/001 refused two of 80, 60 and 60 GB for being uneven; 60 and 60 are even."""
    of = placer(
        [node("n0", *(gpu(f"g{i}", index=i, free=free) for i, free in enumerate([80_000, 60_000, 60_000])))]
    )
    answer = of.place(replace(ask(2), gpu_set=GpuSet.MEMORY_BALANCED), NOW)
    assert isinstance(answer, Pick)
    assert [one.uuid for one in answer.gpus] == ["g1", "g2"]


def linked(index: int, *others: int) -> Gpu:
    return replace(gpu(f"g{index}", index=index), nvlinks={f"g{other}": 4 for other in others})


def test_the_set_with_the_most_nvlinks_is_found_by_search() -> None:
    """A greedy choice would start with g0 and its neighbour; the ring of four is elsewhere."""
    gpus = [
        linked(0, 1),
        linked(1, 0),
        linked(2, 3, 4, 5),
        linked(3, 2, 4, 5),
        linked(4, 2, 3, 5),
        linked(5, 2, 3, 4),
    ]
    answer = placer([node("n0", *gpus)]).place(replace(ask(4), gpu_set=GpuSet.NVLINK), NOW)
    assert isinstance(answer, Pick)
    assert [one.uuid for one in answer.gpus] == ["g2", "g3", "g4", "g5"]


def test_the_best_linked_of_sixteen_is_exact() -> None:
    gpus = [linked(i, *((i + 8) % 16, (i + 4) % 16)) for i in range(16)]
    answer = placer([node("n0", *gpus)]).place(replace(ask(4), gpu_set=GpuSet.NVLINK), NOW)
    assert isinstance(answer, Pick)
    assert [one.index for one in answer.gpus] == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        (GangStrategy.PACK, ("b", "b", "a")),
        (GangStrategy.STRICT_SPREAD, ("a", "b", "c")),
        (GangStrategy.SPREAD, ("a", "b", "c")),
    ],
)
def test_a_gang_lies_as_its_strategy_says(strategy: GangStrategy, nodes: tuple[str, ...]) -> None:
    fleet = [plain_node("a", 2), plain_node("b", 4, rank=1), plain_node("c", 2, rank=2)]
    wish = replace(ask(2), member_count=3, gang_strategy=strategy)
    answer = placer(fleet).place(wish, NOW)
    assert isinstance(answer, Pick)
    assert answer.nodes == nodes
    assert [one.member for one in answer.gpus] == [0, 0, 1, 1, 2, 2]


def test_strict_strategies_refuse_what_the_others_serve() -> None:
    fleet = [plain_node("a", 2), plain_node("b", 4, rank=1)]
    wish = replace(ask(2), member_count=3)
    assert refused(placer(fleet), replace(wish, gang_strategy=GangStrategy.STRICT_PACK)).kind is (
        RefusalKind.UNSATISFIABLE
    )
    strict = replace(wish, gang_strategy=GangStrategy.STRICT_SPREAD)
    assert refused(placer(fleet), strict).kind is RefusalKind.UNSATISFIABLE
    spread = placer(fleet).place(replace(wish, gang_strategy=GangStrategy.SPREAD), NOW)
    assert isinstance(spread, Pick)
    assert Counter(spread.nodes) == {"b": 2, "a": 1}


def test_a_gang_that_does_not_find_room_holds_nothing_and_says_how_far_it_came() -> None:
    use = Use()
    of = placer([plain_node("a", 2), plain_node("b", 2, rank=1)], use)
    take(of, use, ask())
    answer = refused(of, replace(ask(2), member_count=2))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert "1 of 2 members find room" in answer.message
    assert answer.metadata["placed_member_count"] == "1"
    assert isinstance(of.place(ask(2), NOW), Pick)


def test_members_take_cpu_and_main_memory_of_their_node() -> None:
    use = Use()
    of = placer([replace(plain_node("a", 4), cpu_milli=10_000, memory_total_bytes=100 * MIB)], use)
    wish = replace(ask(), cpu_milli=4000, host_memory_bytes=30 * MIB)
    assert refused(of, replace(wish, member_count=3)).kind is RefusalKind.UNSATISFIABLE
    take(of, use, replace(wish, member_count=2))
    assert refused(of, wish).obstacles == {Obstacle.HELD: 2, Obstacle.CPU_BELOW_MIN: 2}
    assert take(of, use, replace(wish, cpu_milli=2000))


def test_thinking_a_reservation_away_gives_back_what_its_processes_use() -> None:
    """Its processes are known by their fence; the memory of an outsider beside them stays taken."""
    use = Use()
    own, stranger = GpuProcess(1, 60_000 * MIB, "train", 7), GpuProcess(2, 15_000 * MIB, "x", None)
    of = placer([plain_node("n0", 1)], use)
    use.hold(reservation(take(of, Use(), ask()), name="victim", fence=7))
    of.apply_node(node("n0", replace(gpu("n0-0", free=5_000, utilization=99.0), processes=(own, stranger))))
    assert isinstance(of.place_after(ask(memory=65_000, utilization=50), NOW, ["victim"]), Pick)
    assert isinstance(of.place_after(ask(memory=65_001), NOW, ["victim"]), Refusal)
    assert isinstance(of.place(ask(memory=0), NOW), Refusal)
    with pytest.raises(KeyError):
        of.place_after(ask(), NOW, ["nobody"])
    use.free("victim")
    assert refused(of, ask(memory=65_000)).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}


def test_readings_grow_old_without_any_news() -> None:
    of = placer([plain_node("n0", 1)])
    assert isinstance(of.place(ask(), NOW), Pick)
    answer = of.place(ask(), NOW + 3.5)
    assert isinstance(answer, Refusal)
    assert answer.obstacles == {Obstacle.STALE: 1}


def test_readings_that_come_back_count_again() -> None:
    of = placer([plain_node("n0", 1)])
    assert isinstance(of.place(ask(), NOW + 3.5), Refusal)
    of.apply_node(node("n0", gpu("n0-0", fresh_until=NOW + 9)))
    assert isinstance(of.place(ask(), NOW + 3.5), Pick)
    assert isinstance(of.place(ask(), NOW + 9.5), Refusal)


def test_what_a_free_gpu_reports_counts_at_once() -> None:
    of = placer([plain_node("n0", 1)])
    assert isinstance(of.place(ask(utilization=50), NOW), Pick)
    of.apply_node(node("n0", gpu("n0-0", utilization=80.0)))
    assert refused(of, ask(utilization=50)).obstacles == {Obstacle.UTILIZATION_TOO_HIGH: 1}
    of.apply_node(node("n0", gpu("n0-0", free=10)))
    assert refused(of, ask(memory=11)).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}


def test_what_a_held_gpu_reports_counts_once_it_is_free() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    use.hold(reservation(take(of, Use(), ask()), name="holder"))
    of.apply_node(node("n0", gpu("n0-0", free=10, utilization=80.0)))
    assert refused(of, ask()).obstacles == {Obstacle.HELD: 1}
    use.free("holder")
    assert refused(of, ask(memory=11)).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}


@pytest.mark.parametrize("utilization", [90.0, None])
def test_the_limit_of_utilization_does_not_count_where_reservations_share_already(
    utilization: float | None,
) -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    third = replace(ask(utilization=50), gpu_milli=300)
    take(of, use, third)
    of.apply_node(node("n0", gpu("n0-0", utilization=utilization)))
    take(of, use, third)


def test_an_explanation_says_what_each_constraint_removes_and_what_would_help() -> None:
    use = Use()
    gpus = [
        gpu("g0", free=1_000),
        gpu("g1", index=1, utilization=90.0),
        gpu("g2", index=2, free=1_000, utilization=90),
    ]
    of = placer([node("n0", *gpus)], use)
    outlook = of.explain(ask(1, memory=2_000, utilization=50), NOW)
    effects = {one.obstacle: (one.removed_in_order, one.removed_alone) for one in outlook.effects}
    assert effects[Obstacle.MEMORY_BELOW_MIN] == (2, 2)
    assert effects[Obstacle.UTILIZATION_TOO_HIGH] == (1, 2)
    assert [one.obstacle for one in outlook.nodes[0].gpus] == [
        Obstacle.MEMORY_BELOW_MIN,
        Obstacle.UTILIZATION_TOO_HIGH,
        Obstacle.MEMORY_BELOW_MIN,
    ]
    assert outlook.remedies == (
        "Ask for less memory: 1 node does then.",
        "Allow a higher utilization: 1 node does then.",
    )

"""Shares of GPUs, memory that is truly there, MIG instances, sets of GPUs, and gangs."""

from collections import Counter
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import (
    Ask,
    GangStrategy,
    Gpu,
    GpuProcess,
    GpuSet,
    Pick,
    Policy,
    Use,
)
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.common.topology import PciPlace
from tests.support.allocator_values import MIB, NOW, ask, gpu, node, plain_node
from tests.support.placing import placer, reservation, take


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
    taken = [take(of, use, half).gpus[0] for _ in range(16)]
    assert Counter(one.uuid for one in taken) == {f"g{i}": 2 for i in range(8)}
    for uuid in {one.uuid for one in taken}:
        assert sum(one.memory_bytes or 0 for one in taken if one.uuid == uuid) <= 79_400 * MIB
    assert refused(of, half).obstacles == {Obstacle.HELD: 8}


def test_a_share_beside_outsiders_holds_at_least_what_was_looked_for() -> None:
    """Half of the memory is in use by nobody's process: half a GPU fits once, and then it holds nine tenths of its part."""
    use = Use()
    of = placer([node("n0", gpu(free=40_000))], use)
    half = replace(ask(), gpu_milli=500)
    assert take(of, use, half).gpus[0].memory_bytes == 36_000 * MIB
    assert refused(of, half).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}


@pytest.mark.parametrize("shares", [[100] * 10, [300, 300, 400], [50] * 20, [333, 333, 333, 1]])
def test_shares_add_up_exactly(shares: list[int]) -> None:
    use = Use()
    of = placer([node("n0", gpu(free=79_400))], use)
    taken = [take(of, use, replace(ask(), gpu_milli=milli)).gpus[0] for milli in shares]
    assert use.gpu("GPU-a").milli == 1000
    assert sum(one.memory_bytes or 0 for one in taken) <= 79_400 * MIB
    assert refused(of, replace(ask(), gpu_milli=1)).obstacles == {Obstacle.HELD: 1}


@pytest.mark.parametrize("size", [2**63 - 1, 2**53, 10**16])
def test_a_share_larger_than_any_gpu_is_never_had(size: int) -> None:
    of = placer([plain_node("n0", 2)])
    for policy in Policy:
        wish = replace(ask(), gpu_memory_bytes=size, policy=policy)
        assert refused(of, wish).kind is RefusalKind.UNSATISFIABLE
        assert refused(of, replace(wish, nodes=frozenset({"n0"}))).kind is RefusalKind.UNSATISFIABLE


def test_memory_in_use_by_its_holder_is_not_counted_twice() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    take(of, use, replace(ask(), gpu_milli=500), name="r7")
    busy = replace(
        gpu("n0-0", free=45_000, utilization=99.0), processes=(GpuProcess(1, 35_000 * MIB, "train", "r7"),)
    )
    of.apply_node(node("n0", busy))
    rest = replace(ask(utilization=50), gpu_milli=500)
    assert take(of, use, rest).gpus[0].memory_bytes == 40_000 * MIB


def test_memory_in_use_counts_once_where_the_driver_lists_no_processes() -> None:
    """As the holders' until their claim is used up; where the list is known to be empty it is nobody's, and is not free."""
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    take(of, use, replace(ask(), gpu_milli=500))
    listed = gpu("n0-0", free=45_000)
    of.apply_node(node("n0", listed))
    half = replace(ask(), gpu_milli=500)
    assert refused(of, half).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}
    of.apply_node(node("n0", replace(listed, processes_known=False)))
    assert take(of, use, half).gpus[0].memory_bytes == 40_000 * MIB


def test_outsiders_are_subtracted_and_named() -> None:
    stranger = replace(gpu("g0", free=30_000), processes=(GpuProcess(42, 50_000 * MIB, "python", None),))
    answer = refused(placer([node("n0", stranger)]), replace(ask(), gpu_milli=500))
    assert answer.obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}
    assert "processes of no reservation there: python (42) uses 50000 MiB" in answer.message


def test_memory_alone_sets_the_share_of_the_gpu() -> None:
    use = Use()
    of = placer([plain_node("n0", 1)], use)
    quarter = replace(ask(), gpu_memory_bytes=20_000 * MIB)
    assert [take(of, use, quarter).gpus[0].milli for _ in range(4)] == [250] * 4
    assert refused(of, quarter).obstacles == {Obstacle.HELD: 1}


def test_of_several_labels_all_have_to_be_there() -> None:
    """On the node that is asked for, and on a reservation to stay apart from."""
    use = Use()
    of = placer([replace(plain_node("a", 2), labels={"zone": "a"})], use)
    both = (("disk", "ssd"), ("zone", "a"))
    assert refused(of, replace(ask(), node_labels=both)).obstacles == {Obstacle.LABELS_DIFFER: 2}
    first = of.place(ask(), NOW)
    use.hold(reservation(first.gpus, labels={"zone": "a"}))
    assert isinstance(of.place(replace(ask(), apart_from=both), NOW), Pick)
    assert refused(of, replace(ask(), apart_from=both[1:])).obstacles == {Obstacle.NOT_APART: 2}


def test_a_balanced_set_is_searched_for_not_refused() -> None:
    """seeds/001 refused two of 80, 60 and 60 GB for being uneven; 60 and 60 are even."""
    of = placer(
        [node("n0", *(gpu(f"g{i}", index=i, free=free) for i, free in enumerate([80_000, 60_000, 60_000])))]
    )
    answer = of.place(replace(ask(2), gpu_set=GpuSet.MEMORY_BALANCED), NOW)
    assert [one.uuid for one in answer.gpus] == ["g1", "g2"]


def linked(index: int, *others: int) -> Gpu:
    return replace(gpu(f"g{index}", index=index), nvlinks={f"g{other}": 4 for other in others})


def test_the_set_with_the_most_nvlinks_is_found_by_search() -> None:
    """A greedy choice would start with g0 and its neighbour; the ring of four is elsewhere."""
    pair, ring = ([linked(one, *(members - {one})) for one in members] for members in ({0, 1}, {2, 3, 4, 5}))
    gpus = [*pair, *ring]
    answer = placer([node("n0", *gpus)]).place(replace(ask(4), gpu_set=GpuSet.NVLINK), NOW)
    assert [one.uuid for one in answer.gpus] == ["g2", "g3", "g4", "g5"]


def test_without_nvlinks_the_set_that_is_nearest_over_pcie_is_taken() -> None:
    """Of two on each of two switches, and the first of them held, both are of the other switch."""
    places = [f"pci0000:16/0000:16:01.0/switch{index // 2}/port{index}/gpu{index}" for index in range(4)]
    gpus = [replace(gpu(f"g{index}", index=index), place=PciPlace(path)) for index, path in enumerate(places)]
    use = Use()
    of = placer([node("n0", *gpus)], use)
    take(of, use, replace(ask(), gpus=frozenset({"g0"})))
    assert [one.uuid for one in take(of, use, replace(ask(2), gpu_set=GpuSet.NVLINK)).gpus] == ["g2", "g3"]


@pytest.mark.parametrize(("teller", "told"), [(1, 3), (3, 1)])
def test_a_link_that_only_one_end_tells_of_counts(teller: int, told: int) -> None:
    gpus = [gpu(f"g{index}", index=index) for index in range(4)]
    gpus[teller] = replace(gpus[teller], nvlinks={f"g{told}": 2})
    answer = placer([node("n0", *gpus)]).place(replace(ask(2), gpu_set=GpuSet.NVLINK), NOW)
    assert [one.index for one in answer.gpus] == [1, 3]


def test_the_best_linked_of_sixteen_is_exact() -> None:
    gpus = [linked(i, *((i + 8) % 16, (i + 4) % 16)) for i in range(16)]
    answer = placer([node("n0", *gpus)]).place(replace(ask(4), gpu_set=GpuSet.NVLINK), NOW)
    assert [one.index for one in answer.gpus] == [0, 4, 8, 12]


@pytest.mark.parametrize("strategy", [GangStrategy.PACK, GangStrategy.STRICT_PACK, GangStrategy.SPREAD])
@pytest.mark.parametrize("policy", Policy)
def test_members_that_share_several_gpus_each_find_every_place_there_is(
    strategy: GangStrategy, policy: Policy
) -> None:
    """Three GPUs with room for one share, one with room for three: each of three members takes the last and another."""
    use = Use()
    of = placer([plain_node("a", 4)], use)
    for index in range(3):
        only = frozenset({f"a-{index}"})
        take(of, use, replace(ask(), gpu_milli=700, gpus=only), fence=index + 10)
    wish = replace(
        ask(2), gpu_milli=300, member_count=3, policy=policy, gang_strategy=strategy, gpu_set=GpuSet.NVLINK
    )
    taken = Counter(one.uuid for one in take(of, use, wish).gpus)
    assert taken == {"a-0": 1, "a-1": 1, "a-2": 1, "a-3": 3}


def test_a_node_that_is_filled_anew_leaves_the_members_on_other_nodes_alone() -> None:
    """The preferred GPUs of both nodes run out."""
    use = Use()
    of = placer([plain_node("a", 4), plain_node("b", 4, rank=1)], use)
    for name in ("a-0", "a-1", "a-2", "b-0", "b-1", "b-2"):
        take(of, use, replace(ask(), gpu_milli=700, gpus=frozenset({name})))
    taken = take(of, use, replace(ask(2), gpu_milli=300, member_count=6, policy=Policy.FIRSTFIT)).gpus
    assert [one.node for one in taken] == ["a"] * 6 + ["b"] * 6
    assert all(use.gpu(f"{name}-{index}").milli >= 900 for name in "ab" for index in range(4))


def test_a_gang_whose_memory_no_gpu_has_room_for_twice_is_never_had() -> None:
    """Its thousandths would do, its bytes would not: nobody has to wait for that."""
    wish = replace(ask(), gpu_milli=100, gpu_memory_bytes=50_000 * MIB, member_count=3)
    assert refused(placer([plain_node("a", 2)]), wish).kind is RefusalKind.UNSATISFIABLE
    unread = node("a", gpu("u", total=None, free=None), gpu("v", index=1))
    assert refused(placer([unread]), wish).kind is RefusalKind.NO_CAPACITY
    by_memory = replace(wish, gpu_milli=1000, gpu_count=2)
    assert refused(placer([unread]), replace(by_memory, member_count=2)).kind is RefusalKind.UNSATISFIABLE
    small = replace(by_memory, member_count=2, gpu_memory_bytes=30_000 * MIB)
    assert refused(placer([unread]), small).kind is RefusalKind.NO_CAPACITY


def test_a_gang_that_does_not_find_room_holds_nothing_and_says_how_far_it_came() -> None:
    use = Use()
    of = placer([plain_node("a", 2), plain_node("b", 2, rank=1)], use)
    take(of, use, ask())
    answer = refused(of, replace(ask(2), member_count=2))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert "1 of 2 members finds room" in answer.message
    assert answer.metadata["placed_member_count"] == "1"
    assert isinstance(of.place(ask(2), NOW), Pick)


@pytest.mark.parametrize("scarce", [{"cpu_milli": 4000}, {"host_memory_bytes": 40 * MIB}])
def test_a_packed_gang_counts_the_room_of_a_node_by_all_that_it_takes(scarce: dict[str, int]) -> None:
    """The first node has GPUs for both members and the rest for one: the second takes both."""
    first = replace(plain_node("a", 4), cpu_milli=7_000, memory_total_bytes=70 * MIB)
    second = replace(plain_node("b", 2, rank=1), cpu_milli=8_000, memory_total_bytes=80 * MIB)
    wish = replace(ask(), member_count=2, policy=Policy.FIRSTFIT, **scarce)
    answer = placer([first, second]).place(wish, NOW)
    assert answer.nodes == ("b", "b")


def test_each_member_takes_cpu_and_main_memory_once_however_many_gpus_it_has() -> None:
    """Twice two members of two GPUs each; whoever ends first, nothing of it stays held."""
    use = Use()
    of = placer([replace(plain_node("a", 8), cpu_milli=16_000, memory_total_bytes=160 * MIB)], use)
    wish = replace(ask(2), member_count=2, cpu_milli=4000, host_memory_bytes=40 * MIB)
    held: list[str] = []
    for _ in range(2):
        answer = of.place(wish, NOW)
        one = reservation(answer.gpus, ask=wish)
        use.hold(one)
        held.append(one.id)
    assert (use.node("a").cpu_milli, use.node("a").memory_bytes) == (16_000, 160 * MIB)
    for name in held:
        use.free(name)
    assert (use.node("a").cpu_milli, use.node("a").memory_bytes, len(use)) == (0, 0, 0)
    assert not use.tenants


def test_thinking_a_reservation_away_gives_back_what_its_processes_use() -> None:
    """Its processes are known by their reservation; the memory of an outsider beside them stays taken."""
    use = Use()
    own, stranger = GpuProcess(1, 60_000 * MIB, "train", "victim"), GpuProcess(2, 15_000 * MIB, "x", None)
    of = placer([plain_node("n0", 1)], use)
    use.hold(reservation(take(of, Use(), ask()).gpus, name="victim"))
    of.apply_node(node("n0", replace(gpu("n0-0", free=5_000, utilization=99.0), processes=(own, stranger))))
    assert isinstance(of.place_after(ask(memory=65_000, utilization=50), NOW, ["victim"]), Pick)
    assert isinstance(of.place_after(ask(memory=65_001), NOW, ["victim"]), Refusal)
    assert isinstance(of.place(ask(memory=0), NOW), Refusal)
    with pytest.raises(KeyError):
        of.place_after(ask(), NOW, ["nobody"])
    use.free("victim")
    assert refused(of, ask(memory=65_000)).obstacles == {Obstacle.MEMORY_BELOW_MIN: 1}


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
    small, busy = gpu("g0", free=1_000), gpu("g1", index=1, utilization=90.0)
    of = placer([node("n0", small, busy, gpu("g2", index=2, free=1_000, utilization=90))], use)
    outlook = of.explain(ask(1, memory=2_000, utilization=50), NOW)
    effects = {one.obstacle: (one.removed_in_order, one.removed_alone) for one in outlook.effects}
    assert effects[Obstacle.MEMORY_BELOW_MIN] == (2, 2)
    assert effects[Obstacle.UTILIZATION_TOO_HIGH] == (1, 2)
    of_small, of_busy, of_both = (one.obstacle for one in outlook.nodes[0].gpus)
    assert of_small is of_both is Obstacle.MEMORY_BELOW_MIN
    assert of_busy is Obstacle.UTILIZATION_TOO_HIGH
    less, busier = "Ask for less memory: 1 node does then.", "Allow a higher utilization: 1 node does then."
    assert outlook.remedies == (less, busier)


def test_only_what_alone_would_make_room_is_named_as_a_help() -> None:
    """Another model is no help where that GPU is cordoned too."""
    nodes = [node("a", replace(gpu("a-0"), model="T4")), node("b", replace(gpu("b-0"), model="T4"), rank=1)]
    of = placer(nodes, cordons=frozenset({"nodes/a"}))
    of_one = of.explain(replace(ask(), models=("a100",)), NOW).remedies
    assert of_one == ("Admit other models: 1 node does then.",)
    of.set_cordons(frozenset({"nodes/a", "nodes/b"}))
    assert of.explain(replace(ask(), models=("a100",)), NOW).remedies == ()


def test_members_on_one_gpu_are_one_holder_of_it_and_of_its_node_and_go_together() -> None:
    use = Use()
    of = placer([node("a", gpu("a-0"))], use)
    take(of, use, replace(ask(), gpu_milli=300), fence=1)
    before = use.gpu("a-0"), use.node("a")
    gang = of.place(replace(ask(), gpu_milli=300, member_count=2), NOW)
    use.hold(reservation(gang.gpus, name="gang", fence=2))
    assert use.gpu("a-0").milli == 900
    for holders in (use.gpu("a-0").reservations, use.node("a").reservations):
        assert holders == (*before[0].reservations, "gang")
    use.free("gang")
    assert (use.gpu("a-0"), use.node("a")) == before


def test_a_gpu_that_takes_the_place_of_another_is_followed_by_its_own_name() -> None:
    """Which column a GPU has is remembered for as long as its node stays as it is."""
    use = Use()
    of = placer([node("a", gpu("a-0"), gpu("a-1", index=1))], use)
    whole = replace(ask(), policy=Policy.FIRSTFIT)
    assert [one.uuid for one in take(of, use, whole).gpus] == ["a-0"]
    of.apply_node(node("a", gpu("a-1"), gpu("a-0", index=1)))
    assert [one.uuid for one in take(of, use, whole, fence=2).gpus] == ["a-1"]
    assert refused(of, whole).obstacles == {Obstacle.HELD: 2}

"""What keeps a GPU out, at its boundary; a refusal says what was asked, what is nearest and what would help."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask, GangStrategy, Gpu, Node, NodeState
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from tests.support.allocator_values import MIB, NOW, ask, gpu, node, plain_node, reserved
from tests.support.placing import held_whole, place, placer, reservation


def refused(nodes: list[Node], wish: Ask, held=(), now: float = NOW) -> Refusal:
    answer = place(nodes, held, wish, now)
    assert isinstance(answer, Refusal), answer
    return answer


def test_a_full_fleet_names_the_nearest_node_and_what_it_lacks() -> None:
    short, busy = gpu("x2", index=2, free=4000), gpu("x3", index=3, utilization=80.0)
    near, far = node("near", gpu("x0"), gpu("x1", index=1), short, busy), plain_node("far", 4, rank=1)
    held = {"x0", *(one.uuid for one in far.gpus)}
    answer = refused([far, near], ask(3, memory=8000, utilization=50), held)
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert answer.message == (
        "no room now for 3 GPUs of one node, each with 8000 MiB free, each used less than 50 %:"
        " the nearest is near with 1 of 3 (the rest: 1 held by other reservations,"
        " 1 with too little free memory (4000 MiB at most), 1 too busy (80 % at least))."
        " Wait until a reservation ends, or ask for less memory, or allow a higher utilization, or ask for 1 GPU."
    )
    lacking = {Obstacle.MEMORY_BELOW_MIN: 1, Obstacle.UTILIZATION_TOO_HIGH: 1}
    assert answer.obstacles == {Obstacle.HELD: 5} | lacking
    assert answer.metadata["nearest_node"] == "near"
    assert answer.metadata["nearest_gpu_count"] == "1"
    assert answer.metadata["held"] == "5"


def test_each_gpu_has_its_own_reason_and_a_quarantine_what_lifts_it() -> None:
    shared = node("n", gpu("x0", quarantine="XID 79: off the bus"), gpu("x1", index=1, utilization=80.0))
    [seen] = placer([shared]).explain(ask(1, utilization=50), NOW).nodes
    assert [one.message for one in seen.gpus] == [
        "Quarantined by the health checks (XID 79: off the bus); once well: gpuscalectl clear quarantine n/x0.",
        "Too busy (80 % at least).",
    ]


def test_more_gpus_than_any_node_has_can_never_be_had() -> None:
    answer = refused([plain_node("a", 2), plain_node("b", 4, rank=1)], ask(5))
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert "the largest node, b, has 4 GPUs" in answer.message


def test_a_gpu_larger_than_any_can_never_be_had() -> None:
    answer = refused([plain_node("a", 2)], ask(1, memory=80_001))
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert "the largest GPU known has 80000 MiB" in answer.message


def test_a_gpu_of_unknown_size_might_be_large_enough() -> None:
    answer = refused([node("a", gpu(total=None, free=None))], ask(1, memory=1))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert answer.obstacles == {Obstacle.MEMORY_UNKNOWN: 1}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (GangStrategy.PACK, "all nodes together take 6 of its 7 members"),
        (GangStrategy.STRICT_PACK, "the roomiest node takes 4 of its 7 members"),
        (GangStrategy.STRICT_SPREAD, "all nodes together take 2 of its 7 members"),
    ],
)
def test_a_gang_that_can_never_lie_as_it_wants_to(strategy: GangStrategy, words: str) -> None:
    gang = replace(ask(1), member_count=7, gang_strategy=strategy)
    answer = refused([plain_node("a", 2), plain_node("b", 4, rank=1)], gang)
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert words in answer.message


def test_a_node_not_heard_of_yet_might_have_room() -> None:
    """After a restart of everything the agents come back one by one: "never" would be a lie."""
    silent = node("silent", rank=1, state=NodeState.OFFLINE, reported=False)
    answer = refused([plain_node("a", 2), silent], ask(4))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert "not heard of since the allocator started: silent" in answer.message


def test_an_offline_node_counts_as_having_its_gpus() -> None:
    gone = node("gone", gpu("a"), gpu("b", index=1), state=NodeState.OFFLINE)
    answer = refused([gone], ask(2))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert answer.obstacles == {Obstacle.NODE_NOT_ONLINE: 2}


def test_chosen_nodes_that_do_not_exist_are_named() -> None:
    answer = refused([plain_node("a", 1)], ask(nodes=["a", "nope"]))
    assert answer.kind is RefusalKind.NOT_FOUND
    assert answer.message == "no such node: nope. The fleet knows a."


def test_chosen_nodes_that_do_not_report_are_said_to_be_so() -> None:
    off = node("off", gpu("x"), state=NodeState.OFFLINE)
    late = node("late", gpu("y"), rank=1, state=NodeState.STALE)
    answer = refused([off, late, plain_node("fine", 1, rank=2)], ask(nodes=["off", "late"]))
    assert answer.kind is RefusalKind.NODE_NOT_ONLINE
    assert "the agent of off is not connected" in answer.message
    assert "no current report has come from late" in answer.message
    assert answer.metadata["node_not_selected"] == "1"


def test_a_chosen_node_whose_readings_all_aged_here_is_stale_too() -> None:
    answer = refused([plain_node("a", 2)], ask(nodes=["a"]), now=NOW + 4)
    assert answer.kind is RefusalKind.NODE_NOT_ONLINE


def test_a_chosen_online_node_without_room_is_no_capacity() -> None:
    nodes = [plain_node("a", 2), plain_node("b", 8, rank=1)]
    answer = refused(nodes, ask(2, nodes=["a"]), held={"a-0"})
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert "the nearest is a with 1 of 2" in answer.message


def test_a_fleet_without_gpus_says_so() -> None:
    answer = refused([node("bare")], ask())
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert "no node here has a GPU" in answer.message


NONE: frozenset[str] = frozenset()


def found(one: Gpu, wish: Ask | None = None, *, now: float = NOW) -> Obstacle | None:
    """What stands in the way of the wish on a node that holds the one GPU."""
    nodes = [node("n0", one)]
    (seen,) = placer(nodes, held_whole(nodes, ())).explain(wish or ask(), now).nodes[0].gpus
    return seen.obstacle


def test_free_memory_equal_to_the_minimum_is_enough() -> None:
    assert found(gpu(free=8000), ask(memory=8000)) is None
    assert found(gpu(free=7999), ask(memory=8000)) is Obstacle.MEMORY_BELOW_MIN


def test_utilization_must_be_below_the_limit_and_a_limit_of_100_admits_all() -> None:
    assert found(gpu(utilization=49.9), ask(utilization=50)) is None
    assert found(gpu(utilization=50.0), ask(utilization=50)) is Obstacle.UTILIZATION_TOO_HIGH
    assert found(gpu(utilization=100.0), ask(utilization=99.9)) is Obstacle.UTILIZATION_TOO_HIGH
    assert found(gpu(utilization=100.0), ask(utilization=100)) is None


def test_readings_count_until_they_are_stale() -> None:
    assert found(gpu(fresh_until=NOW + 3), now=NOW + 3) is None
    assert found(gpu(fresh_until=NOW + 3), now=NOW + 3.1) is Obstacle.STALE


def test_the_first_reason_in_the_documented_order_is_named() -> None:
    """Take the worst GPU there can be and cure it step by step: the reasons come in their order."""
    ill = {"trouble": "LOST", "quarantine": "XID 79", "fresh_until": NOW - 1}
    sick = replace(gpu("GPU-a", free=None, utilization=None, **ill), mig_profile="1g")
    one = node("n0", sick, state=NodeState.OFFLINE)
    use = held_whole([one], {"GPU-a"})
    use.hold(reservation([reserved("GPU-b")], name="other", labels={"job": "x"}))
    wish = replace(
        ask(memory=2, utilization=50, nodes=["other"]),
        node_labels=(("zone", "a"),),
        excluded_gpus=frozenset({"gpu-a"}),
        models=("A100",),
        apart_from=(("job", "x"),),
        cpu_milli=1,
        host_memory_bytes=1,
    )
    cordons = frozenset({"gpu-a"})
    seen: list[Obstacle | None] = []

    def look() -> None:
        seen.append(placer([one], use, cordons).explain(wish, NOW).nodes[0].gpus[0].obstacle)

    look()
    for field, value in (("nodes", NONE), ("node_labels", ()), ("excluded_gpus", NONE), ("models", ())):
        wish = replace(wish, **{field: value})
        look()
    one = replace(one, gpus=(sick := replace(sick, mig_profile=""),))
    look()
    one = replace(one, state=NodeState.ONLINE)
    look()
    for field, value in (("fresh_until", NOW), ("trouble", ""), ("quarantine", "")):
        one = replace(one, gpus=(sick := replace(sick, **{field: value}),))
        look()
    cordons = NONE
    look()
    wish = replace(wish, apart_from=())
    look()
    use.free("r-GPU-a")
    look()
    for field in ("cpu_milli", "host_memory_bytes"):
        wish = replace(wish, **{field: 0})
        look()
    for field, value in (
        ("memory_free_bytes", 1),
        ("memory_free_bytes", 2 * MIB),
        ("utilization_percent", 90.0),
    ):
        one = replace(one, gpus=(sick := replace(sick, **{field: value}),))
        look()
    assert seen == [one for one in Obstacle if not one.startswith("POWER")], "those are of whole nodes"

"""A refusal says what was asked, what is nearest and what would help; never and not-now are told apart."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask, GangStrategy, Node, NodeState
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from tests.support.allocator_values import NOW, ask, gpu, node, plain_node
from tests.support.placing import place


def refused(nodes: list[Node], wish: Ask, held=(), now: float = NOW) -> Refusal:
    answer = place(nodes, held, wish, now)
    assert isinstance(answer, Refusal), answer
    return answer


def test_a_full_fleet_names_the_nearest_node_and_what_it_lacks() -> None:
    near = node(
        "near",
        gpu("x0"),
        gpu("x1", index=1),
        gpu("x2", index=2, free=4000),
        gpu("x3", index=3, utilization=80.0),
    )
    answer = refused(
        [plain_node("far", 4, rank=1), near],
        ask(3, memory=8000, utilization=50),
        held={"x0", "far-0", "far-1", "far-2", "far-3"},
    )
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert answer.message == (
        "no room now for 3 GPUs of one node, each with 8000 MiB free, each used less than 50 %:"
        " the nearest is near with 1 of 3 (the rest: 1 held by other reservations,"
        " 1 with too little free memory (4000 MiB at most), 1 that are too busy (80 % at least))."
        " Wait until a reservation ends, or ask for less memory, or allow a higher utilization, or ask for 1 GPU."
    )
    assert answer.obstacles == {
        Obstacle.HELD: 5,
        Obstacle.MEMORY_BELOW_MIN: 1,
        Obstacle.UTILIZATION_TOO_HIGH: 1,
    }
    assert answer.metadata["nearest_node"] == "near"
    assert answer.metadata["nearest_gpu_count"] == "1"
    assert answer.metadata["held"] == "5"


def test_more_gpus_than_any_node_has_can_never_be_had() -> None:
    answer = refused([plain_node("a", 2), plain_node("b", 4, rank=1)], ask(5))
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert "the largest node, b, has 4 GPUs" in answer.message


def test_a_gpu_larger_than_any_can_never_be_had() -> None:
    answer = refused([plain_node("a", 2)], ask(1, memory=80_001))
    assert answer.kind is RefusalKind.UNSATISFIABLE
    assert "the largest GPU known has 80000 MiB" in answer.message


def test_large_gpus_on_too_few_places_can_never_be_had() -> None:
    mixed = node("mixed", gpu("big"), gpu("small", index=1, total=10_000, free=10_000))
    assert refused([mixed], ask(2, memory=20_000)).kind is RefusalKind.UNSATISFIABLE


def test_a_gpu_of_unknown_size_might_be_large_enough() -> None:
    answer = refused([node("a", gpu(total=None, free=None))], ask(1, memory=1))
    assert answer.kind is RefusalKind.NO_CAPACITY
    assert answer.obstacles == {Obstacle.MEMORY_UNKNOWN: 1}


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (GangStrategy.PACK, "all nodes together take 6 of its 7 members so"),
        (GangStrategy.STRICT_PACK, "the roomiest node takes 4 of its 7 members so"),
        (GangStrategy.STRICT_SPREAD, "all nodes together take 2 of its 7 members so"),
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
    assert answer.kind is RefusalKind.NODE_NOT_FOUND
    assert answer.message == "no such node: nope. The fleet knows a."


def test_chosen_nodes_that_do_not_report_are_said_to_be_so() -> None:
    nodes = [
        node("off", gpu("x"), state=NodeState.OFFLINE),
        node("late", gpu("y"), rank=1, state=NodeState.STALE),
        plain_node("fine", 1, rank=2),
    ]
    answer = refused(nodes, ask(nodes=["off", "late"]))
    assert answer.kind is RefusalKind.NODE_NOT_ONLINE
    assert "the agent of off is not connected" in answer.message
    assert "the last report of late is too old" in answer.message
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

"""When a reserved GPU counts as vanished, and when its absence proves nothing."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Node, NodeState, Reservation
from gpuscale.allocator.usecases.endings import Vanishing
from tests.support.allocator_values import NOW, WALL, gpu, node, order, reserved

AFTER = 10.0
BOTH = node("n0", gpu("GPU-a"), gpu("GPU-b", index=1))
ONE = node("n0", gpu("GPU-a"))


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def held(ledger: Ledger) -> Reservation:
    gpus = [reserved("GPU-a"), reserved("GPU-b", index=1)]
    return ledger.confirm(ledger.grant(order(), gpus, now=NOW, wall=WALL))


def test_a_gpu_that_stays_away_is_lost(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(AFTER)
    vanishing.observe(BOTH, ledger.use, NOW)
    vanishing.observe(ONE, ledger.use, NOW + 1)
    vanishing.observe(ONE, ledger.use, NOW + 5)
    assert vanishing.lost(ledger.use, NOW + 10.9) == {}
    assert vanishing.lost(ledger.use, NOW + 11) == {held.id: {"GPU-b"}}


def test_a_gpu_that_fell_off_its_bus_is_lost_although_it_is_named(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(AFTER)
    vanishing.observe(node("n0", gpu("GPU-a"), gpu("GPU-b", index=1, trouble="LOST")), ledger.use, NOW)
    assert vanishing.lost(ledger.use, NOW + 10) == {held.id: {"GPU-b"}}


def test_a_gpu_that_was_split_into_instances_is_lost_as_a_whole(ledger: Ledger, held: Reservation) -> None:
    """Its instances are given to others once the lease has ended."""
    vanishing = Vanishing(AFTER)
    split = node("n0", gpu("GPU-a"), gpu("GPU-b", index=1), replace(gpu("MIG-b", index=2), parent="GPU-b"))
    vanishing.observe(split, ledger.use, NOW)
    assert vanishing.lost(ledger.use, NOW + 10) == {held.id: {"GPU-b"}}


@pytest.mark.parametrize(
    "other",
    [
        BOTH,
        replace(ONE, state=NodeState.STALE),
        replace(ONE, state=NodeState.OFFLINE),
        replace(ONE, gpus=(), gpu_problem="NVML: driver not loaded"),
        replace(ONE, reported=False),
        node("n0", gpu("GPU-a"), gpu("GPU-b", index=1, trouble="HUNG")),
    ],
)
def test_a_gpu_that_came_back_or_cannot_be_seen_is_not(
    ledger: Ledger, held: Reservation, other: Node
) -> None:
    vanishing = Vanishing(AFTER)
    vanishing.observe(ONE, ledger.use, NOW)
    vanishing.observe(other, ledger.use, NOW + 9)
    assert vanishing.lost(ledger.use, NOW + 100) == {}
    vanishing.observe(ONE, ledger.use, NOW + 20)
    assert vanishing.lost(ledger.use, NOW + 29) == {}, "its time begins anew"
    assert vanishing.lost(ledger.use, NOW + 30) == {held.id: {"GPU-b"}}


def test_a_gpu_that_nobody_holds_any_more_is_nobodys_loss(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(AFTER)
    vanishing.observe(ONE, ledger.use, NOW)
    ledger.settle(ledger.release(held.id, held.fence, now=NOW, wall=WALL))
    assert vanishing.lost(ledger.use, NOW + 10) == {}


def test_a_node_that_is_gone_for_good_has_lost_all_its_gpus(ledger: Ledger, held: Reservation) -> None:
    vanishing = Vanishing(AFTER)
    gone = replace(BOTH, state=NodeState.OFFLINE, gpus=(), forgotten=True)
    vanishing.observe(gone, ledger.use, NOW)
    assert vanishing.lost(ledger.use, NOW + 9.9) == {}
    assert vanishing.lost(ledger.use, NOW + 10) == {held.id: {"GPU-a", "GPU-b"}}
    vanishing.observe(BOTH, ledger.use, NOW + 11)
    assert vanishing.lost(ledger.use, NOW + 30) == {}, "it reports again"

"""Cordons: which GPUs they cover, and that asking again never gives anybody more time."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.cordons import Cordon, Cordons, Spot, cordoned, spot_of
from gpuscale.common.errors import InvalidArgumentError
from tests.support.allocator_values import NOW, WALL

NODE = Spot("n0")
GPU = Spot("n0", "gpu-a")


def cordon(spot: Spot = NODE, *, deadline: float | None = None, reason: str = "") -> Cordon:
    return Cordon(spot, reason, "ann", WALL, deadline, None if deadline is None else deadline - NOW)


@pytest.mark.parametrize(("name", "spot"), [("nodes/n0", NODE), ("nodes/n0/gpus/gpu-a", GPU)])
def test_both_kinds_of_names_are_spots(name: str, spot: Spot) -> None:
    assert spot_of(name) == spot
    assert spot.name == name


@pytest.mark.parametrize(
    "name",
    ["", "n0", "nodes/", "nodes/A", "nodes/n0/", "nodes/n0/gpus", "nodes/n0/gpus/", "gpus/a", "nodes/n0/x/a"],
)
def test_any_other_name_is_refused_by_field(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        spot_of(name)
    assert [violation.field for violation in caught.value.violations] == ["name"]


def test_a_node_covers_its_gpus_and_a_gpu_itself() -> None:
    of_node, of_gpu = Cordons([cordon(NODE)]), Cordons([cordon(GPU)])
    assert of_node.covering("n0", "GPU-A") == of_node.covering("n0") == cordon(NODE)
    assert of_gpu.covering("n0", "GPU-A") == cordon(GPU)
    assert [of_gpu.covering("n0"), of_gpu.covering("n0", "GPU-B"), of_gpu.covering("n1", "GPU-A")] == [
        None
    ] * 3
    assert (NODE.holds("n0", "GPU-A"), GPU.holds("n0", "GPU-A")) == (True, True)
    assert (GPU.holds("n0", "GPU-B"), GPU.holds("n1", "GPU-A"), NODE.holds("n1", "GPU-A")) == (False,) * 3


def test_a_gpu_covers_its_mig_instances() -> None:
    of_gpu = Cordons([cordon(GPU)])
    assert of_gpu.covering("n0", "MIG-1", "GPU-A") == cordon(GPU)
    assert of_gpu.covering("n0", "MIG-1", "GPU-B") is None
    assert of_gpu.covering("n1", "MIG-1", "GPU-A") is None
    assert (GPU.holds("n0", "MIG-1", "GPU-A"), GPU.holds("n0", "MIG-1", "GPU-B")) == (True, False)


def test_a_repeated_drain_gives_nobody_more_time() -> None:
    first = cordon(deadline=NOW + 60, reason="fan")
    later = replace(first, created=WALL.replace(year=2032), deadline=NOW + 90, grace=60.0, reason="")
    assert cordoned(first, later) == first
    sooner = replace(later, deadline=NOW + 10, grace=10.0, reason="fire", author="bob")
    assert cordoned(first, sooner) == replace(sooner, created=WALL)


def test_a_cordon_does_not_end_a_drain() -> None:
    drain = cordon(deadline=NOW + 60, reason="fan")
    assert cordoned(drain, cordon(reason="dust")) == drain
    assert cordoned(cordon(), drain) == drain
    assert cordoned(None, drain) is drain


def test_holders_are_told_why() -> None:
    assert cordon(reason="fan").why == "nodes/n0 is drained: fan"
    assert cordon(GPU).why == "nodes/n0/gpus/gpu-a is drained"
    assert cordon().told(cordon(reason="fan").why)
    assert cordon(reason="dust").told(cordon().why)
    assert not cordon().told(cordon(GPU).why)
    assert not cordon().told("preempted")

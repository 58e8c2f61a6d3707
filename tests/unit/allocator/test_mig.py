"""A GPU whose admin splits it, or makes it whole again, under a lease: nobody else gets a part of what is held."""

import json
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import WHOLE, Ask, Node, Pick, Reservation, Use
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.state import store
from tests.support.allocator_values import NOW, ask, gpu, node, plain_node
from tests.support.placing import placer, reservation

PART = replace(ask(), mig_profile="1g.10gb")
UNSPLIT = node("n0", gpu("GPU-p"), gpu("GPU-q", index=1, trouble="HUNG"))
SPLIT = node(
    "n0",
    gpu("GPU-p", trouble="DIVIDED"),
    *(replace(gpu(f"MIG-{i}", index=i), mig_profile="1g.10gb", parent="GPU-p") for i in (2, 3)),
)


def take(of: Placer, use: Use, wish: Ask, name: str = "r") -> Reservation:
    """Place and hold."""
    answer = of.place(wish, NOW)
    assert isinstance(answer, Pick), answer
    held = reservation(answer.gpus, name=name, ask=wish)
    use.hold(held)
    return held


def messages(of: Placer, wish: Ask) -> list[str]:
    """What an explanation says of each GPU."""
    return [one.message for seen in of.explain(wish, NOW).nodes for one in seen.gpus]


@pytest.mark.parametrize("milli", [WHOLE, 300])
@pytest.mark.parametrize(
    ("before", "first", "after", "then", "count"),
    [(UNSPLIT, ask(), SPLIT, PART, 2), (SPLIT, PART, UNSPLIT, ask(), 1)],
    ids=["split", "made whole"],
)
def test_what_is_another_shape_of_a_held_gpu_is_held(
    milli: int, before: Node, first: Ask, after: Node, then: Ask, count: int
) -> None:
    """Until the lease ends; a share of it is enough, and a share is not to be had either."""
    use = Use()
    of = placer([before], use)
    take(of, use, replace(first, gpu_milli=milli))
    of.apply_node(after)
    for wish in (then, replace(then, gpu_milli=100)):
        refused = of.place(wish, NOW)
        assert isinstance(refused, Refusal)
        assert (refused.kind, refused.obstacles[Obstacle.HELD]) == (RefusalKind.NO_CAPACITY, count)
        assert "held by other reservations" in refused.message
        assert messages(of, wish).count("Held by r.") == count
        [effect] = [one for one in of.explain(wish, NOW).effects if one.obstacle is Obstacle.HELD]
        assert effect.removed_in_order == count
        assert isinstance(of.place_after(wish, NOW, ["r"]), Pick)
        assert isinstance(of.place(wish, NOW), Refusal)
    use.free("r")
    assert isinstance(of.place(then, NOW), Pick)


def test_instances_beside_a_held_one_are_free_and_their_gpu_is_when_all_are() -> None:
    use = Use()
    of = placer([SPLIT], use)
    take(of, use, PART, "a")
    take(of, use, PART, "b")
    of.apply_node(UNSPLIT)
    use.free("a")
    assert messages(of, ask())[0] == "Held by b."
    use.free("b")
    take(of, use, ask(), "c")


def test_an_instance_that_two_share_is_held_until_both_are_gone() -> None:
    use = Use()
    of = placer([SPLIT], use)
    half = replace(PART, gpu_milli=500, gpus=frozenset({"mig-2"}))
    assert {take(of, use, half, name).gpus[0].uuid for name in "ab"} == {"MIG-2"}
    of.apply_node(UNSPLIT)
    use.free("a")
    assert isinstance(of.place(ask(), NOW), Refusal)
    use.free("b")
    assert isinstance(of.place(ask(), NOW), Pick)


def test_other_gpus_are_none_of_its_business() -> None:
    use = Use()
    of = placer([SPLIT, plain_node("n1", 1, rank=1)], use)
    take(of, use, PART)
    assert take(of, use, ask(), "whole").gpus[0].uuid == "n1-0"
    assert use.on(gpu("GPU-q")).milli == 0


def test_whose_instance_it_was_goes_to_disk_and_takes_no_room_there_otherwise() -> None:
    """After a restart nobody else knows."""
    for fleet, wish, told in ((SPLIT, PART, "GPU-p"), (UNSPLIT, ask(), None)):
        [row] = json.loads(store.to_gpus(take(placer([fleet]), Use(), wish)))
        assert row.get("parent") == told

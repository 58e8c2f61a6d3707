"""A GPU whose admin splits it, or makes it whole again, under a lease: nobody else gets a part of what is held."""

import json
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import WHOLE, Ask, Node, Pick, Policy, Use
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import Refusal, RefusalKind
from gpuscale.allocator.state import store
from tests.support.allocator_values import NOW, ask, gpu, node
from tests.support.placing import placer, take

PART = replace(ask(), mig_profile="1g.10gb")
UNSPLIT = node("n0", gpu("GPU-p"), gpu("GPU-q", index=1, trouble="HUNG"))
PARTS = [replace(gpu(f"MIG-{i}", index=i), mig_profile="1g.10gb", parent="GPU-p") for i in (2, 3)]
SPLIT = node("n0", gpu("GPU-p", trouble="DIVIDED"), *PARTS)


def messages(of: Placer, wish: Ask) -> list[str]:
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
    take(of, use, replace(first, gpu_milli=milli), name="r")
    of.apply_node(after)
    for wish in (then, replace(then, gpu_milli=100)):
        refused = of.place(wish, NOW)
        assert (refused.kind, refused.obstacles[Obstacle.HELD]) == (RefusalKind.NO_CAPACITY, count)
        assert "held by other reservations" in refused.message
        assert messages(of, wish).count("Held by r.") == count
        [effect] = [one for one in of.explain(wish, NOW).effects if one.obstacle is Obstacle.HELD]
        assert effect.removed_in_order == count
        assert isinstance(of.place_after(wish, NOW, ["r"]), Pick)
        assert isinstance(of.place(wish, NOW), Refusal)
    use.free("r")
    assert isinstance(of.place(then, NOW), Pick)


def divided(name: str, *counts: int, rank: int = 0) -> Node:
    """A node of GPUs with so many instances each."""
    instances = [
        replace(
            gpu(f"{name}-{at}-{number}", index=10 * at + number), mig_profile="1g.10gb", parent=f"{name}-{at}"
        )
        for at, count in enumerate(counts)
        for number in range(count)
    ]
    return node(name, *instances, rank=rank)


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("milli", [WHOLE, 500])
def test_instances_of_gpus_in_use_go_first_so_that_others_can_be_partitioned_anew(
    policy: Policy, milli: int
) -> None:
    """The fullest first; once it is free again, a GPU is as good as any."""
    use = Use()
    of = placer([divided("n", 3, 3, 3)], use)
    wish = replace(PART, policy=policy, gpu_milli=milli)
    for name in ("n-1-0", "n-2-0", "n-2-1"):
        take(of, use, replace(PART, gpus=frozenset({name})), name=name)
    taken = [
        take(of, use, replace(wish, gpu_milli=WHOLE), name=f"r{number}").gpus[0].uuid for number in range(4)
    ]
    assert taken == ["n-2-2", "n-1-1", "n-1-2", "n-0-0"]
    for name in ("n-1-0", "r1", "r2"):
        use.free(name)
    assert take(of, use, wish).gpus[0].uuid == "n-0-1"
    pair = replace(wish, gpu_count=2)
    use.free("n-2-1")
    assert {one.uuid for one in take(of, use, replace(pair, gpu_milli=WHOLE), name="p").gpus} == {
        "n-0-2",
        "n-2-1",
    }


def test_pack_looks_on_all_nodes_for_the_fullest_gpu_and_says_so() -> None:
    use = Use()
    of = placer([divided("a", 2), divided("b", 7, 7, 7, 7, rank=1)], use)
    wish = replace(PART, policy=Policy.PACK)
    assert take(of, use, wish, name="r").gpus[0].uuid == "a-0-0"
    use.free("r")
    take(of, use, replace(wish, gpus=frozenset({"b-2-5"})), name="s")
    held = take(of, use, wish)
    part = held.gpus[0].score.parts[5]
    assert (held.gpus[0].uuid, part.name, part.value) == ("b-2-0", "free_of_gpu", 6000 // 7)


def test_whose_instance_it_was_goes_to_disk_and_takes_no_room_there_otherwise() -> None:
    """After a restart nobody else knows."""
    for fleet, wish, told in ((SPLIT, PART, "GPU-p"), (UNSPLIT, ask(), None)):
        [row] = json.loads(store.to_gpus(take(placer([fleet]), Use(), wish)))
        assert row.get("parent") == told

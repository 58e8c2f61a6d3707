"""Partitions of idle MIG GPUs for asks that wait: what has room beside what, and what is never touched."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Ask, GangStrategy, Gpu, GpuProcess, Node, NodeState, Use
from gpuscale.allocator.placing.partitions import DIVIDED, partitions_for
from tests.support.allocator_values import NOW, ask, gpu, node, reserved
from tests.support.placing import placer, reservation

H100 = 81_559
A30 = 24_576
Layout = Sequence[str]


def divided(name: str, *profiles: str, total: int = H100) -> list[Gpu]:
    """A GPU with such instances, the eighth of whose memory each takes is not looked at."""
    whole = gpu(f"{name}-0", total=total, free=total, trouble=DIVIDED)
    parts = [gpu(f"{name}-0-{number}", total=9_000) for number in range(len(profiles))]
    of = {"parent": whole.uuid}
    return [whole, *(replace(one, mig_profile=to, **of) for one, to in zip(parts, profiles, strict=True))]


def wish(profile: str, count: int = 1, members: int = 1) -> Ask:
    """For instances of a profile, all on one node."""
    asked = ask(count, unknown=True)
    return replace(asked, mig_profile=profile, member_count=members, gang_strategy=GangStrategy.STRICT_PACK)


def found(asked: Ask, *nodes: Node, use: Use | None = None, ever: bool = False) -> dict[str, Layout]:
    """The profiles that each GPU is to have."""
    use = use or Use()
    made = partitions_for(placer(nodes, use), nodes, asked, NOW, ever=ever)
    return {one.gpu.uuid: one.profiles for one in made}


@pytest.mark.parametrize(
    ("profile", "count", "total"),
    [
        ("1g.10gb", 7, H100), ("1g.20gb", 4, H100), ("2g.20gb", 3, H100), ("3g.40gb", 2, H100),
        ("4g.40gb", 1, H100), ("7g.80gb", 1, H100), ("1g.6gb", 4, A30), ("2g.12gb", 2, A30),
        ("4g.24gb", 1, A30),
    ],
)  # fmt: skip
def test_as_many_as_the_driver_has_places_for(profile: str, count: int, total: int) -> None:
    empty = node("n", *divided("n", total=total))
    assert found(wish(profile, count), empty) == {"n-0": (profile,) * count}
    assert found(wish(profile, count + 1), empty) == {}


@pytest.mark.parametrize(
    ("before", "profile", "after"),
    [
        (("3g.40gb", "3g.40gb"), "4g.40gb", ("4g.40gb", "3g.40gb")),
        (("7g.80gb",), "1g.10gb", ("1g.10gb",)),
        (("1g.10gb",) * 7, "3g.40gb", ("3g.40gb", *("1g.10gb",) * 4)),
        (("2g.20gb", "2g.20gb", "2g.20gb"), "1g.10gb", ("1g.10gb", *("2g.20gb",) * 3)),
    ],
)
def test_what_was_there_stays_as_far_as_there_is_room(before: Layout, profile: str, after: Layout) -> None:
    assert found(wish(profile), node("n", *divided("n", *before))) == {"n-0": after}


def test_of_two_profiles_in_one_gpu_the_sum_of_compute_may_be_seven() -> None:
    there = node("n", *divided("n", "3g.40gb", "2g.20gb", "1g.10gb"))
    assert found(wish("1g.10gb", 2), there) == {"n-0": ("1g.10gb", "1g.10gb", "3g.40gb", "2g.20gb")}


def test_one_gpu_is_partitioned_where_that_is_enough_and_two_where_not() -> None:
    one, other = node("a", *divided("a"), *divided("b")), node("c", *divided("c", "1g.10gb"), rank=1)
    assert found(wish("3g.40gb", 2), one, other) == {"a-0": ("3g.40gb",) * 2}
    assert found(wish("3g.40gb", 1, members=3), one, other) == {"a-0": ("3g.40gb",) * 2, "b-0": ("3g.40gb",)}
    assert found(wish("3g.40gb", 5), one, other) == {}


def test_no_gpu_of_which_anybody_holds_or_may_use_a_part_is_touched() -> None:
    whole, *parts = divided("n", "1g.10gb", "1g.10gb")
    asked, use = wish("3g.40gb"), Use()
    assert found(asked, node("n", whole, *parts))
    use.hold(reservation([replace(reserved(parts[1].uuid, node="n"), parent=whole.uuid)]))
    assert found(asked, node("n", whole, *parts), use=use) == {}
    assert found(asked, node("n", whole, *parts), use=use, ever=True) == {
        "n-0": ("3g.40gb", "1g.10gb", "1g.10gb")
    }
    assert found(wish("3g.40gb", 3), node("n", whole, *parts), use=use, ever=True) == {}
    for changed in (
        replace(parts[0], processes=(GpuProcess(1, 5, "other", None),)),
        replace(parts[0], processes_known=False),
        replace(parts[0], fresh_until=NOW - 1),
        replace(parts[0], quarantine="XID 79"),
    ):
        assert found(asked, node("n", whole, changed, parts[1])) == {}, changed
    promised = replace(asked, excluded_gpus=frozenset({parts[1].uuid.lower()}))
    assert found(promised, node("n", whole, *parts)) == {}
    assert found(asked, node("n", replace(whole, trouble="HUNG"), *parts)) == {}
    assert found(asked, node("n", replace(whole, trouble=""))) == {}, "MIG is not switched on"
    assert found(asked, node("n", whole, *parts, state=NodeState.STALE)) == {}


def test_what_else_the_ask_wants_counts_as_ever() -> None:
    there = node("n", *divided("n"))
    asked = wish("3g.40gb")
    for other in (
        replace(asked, node_labels=(("rack", "a"),)),
        replace(asked, nodes=frozenset({"m"})),
        replace(asked, excluded_nodes=frozenset({"n"})),
        replace(asked, models=("A100",)),
        replace(asked, min_memory_bytes=41 << 30),
        replace(asked, mig_profile="3g.40gb+me"),
        replace(asked, mig_profile="5g.33gb"),
    ):
        assert found(other, there) == {}, other
    cordoned = placer([there])
    cordoned.set_cordons(frozenset({"n-0"}))
    assert partitions_for(cordoned, [there], asked, NOW) == ()
    assert partitions_for(cordoned, [there], asked, NOW, ever=True), "while it is partitioned for somebody"

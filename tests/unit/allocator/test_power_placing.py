"""Placement under power budgets: it goes where there are watts, says where there are none, and knows what was granted since."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpuscale.allocator.domain.model import GangStrategy, Node, Pick, Use
from gpuscale.allocator.domain.power import Governor, PowerBudget, PoweredGpu
from gpuscale.allocator.placing.constraints import Obstacle
from gpuscale.allocator.placing.placer import Placer
from gpuscale.allocator.placing.refusal import RefusalKind
from gpuscale.allocator.usecases.powering import Powering
from gpuscale.api.allocator import v1 as api
from tests.support.allocator_values import NOW, ask, plain_node
from tests.support.clock import ManualClock
from tests.support.placing import placer, reservation

NODES = [replace(plain_node(name, 4, rank=rank), labels={"rack": name}) for rank, name in enumerate("ab")]


def idle(nodes: Sequence[Node], helped: str = "abcd") -> dict[str, list[PoweredGpu]]:
    """The GPUs of nodes, each of which counts 70 W, or 200 W once it is held."""
    watts = {"low": 200.0, "high": 700.0, "watts": 60.0}
    return {
        node.id: [PoweredGpu(gpu.uuid, node.id, helped=node.id in helped, **watts) for gpu in node.gpus]
        for node in nodes
    }


def budgeted(use: Use | None = None, helped: str = "ab", **budgets: PowerBudget) -> Placer:
    """Four idle GPUs on a and on b."""
    found = placer(NODES, use)
    found.power = Governor().look(budgets.items(), NODES, idle(NODES, helped), 0.0).room
    return found


def test_without_budgets_nothing_is_in_the_way() -> None:
    assert isinstance(budgeted().place(ask(4), NOW), Pick)


def test_it_goes_to_another_node_where_one_has_too_few_watts() -> None:
    found = budgeted(small=PowerBudget(4 * 70 + 129, nodes=("a",))).place(ask(1), NOW)
    assert found.nodes == ("b",)
    found = budgeted(enough=PowerBudget(4 * 70 + 130, nodes=("a",))).place(ask(1), NOW)
    assert found.nodes == ("a",)


def test_where_there_are_watts_nowhere_it_says_which_are_missing_and_explains_it() -> None:
    full = budgeted(rack=PowerBudget(4 * 70 + 200, per="rack"))
    found = full.place(ask(2), NOW)
    assert found.kind is RefusalKind.NO_CAPACITY
    assert "budgets/rack leaves rack=a 200 of 480 W, and this needs 260 W" in found.message
    assert found.message.endswith("Wait until others draw less, or raise the budget.")
    assert (found.obstacles, found.metadata["power_budget"]) == ({Obstacle.POWER_BUDGET: 8}, "8")
    explained = full.explain(ask(2), NOW)
    assert [one.obstacle for one in explained.nodes] == [Obstacle.POWER_BUDGET] * 2
    assert "this needs 260 W" in explained.nodes[0].message
    never = full.place(ask(5), NOW)
    assert never.kind is RefusalKind.UNSATISFIABLE, "not for the watts"


def test_what_was_granted_since_the_look_counts_until_it_is_freed() -> None:
    use = Use()
    one = budgeted(use, all=PowerBudget(8 * 70 + 200))
    first = one.place(ask(1), NOW)
    held = reservation(first.gpus)
    use.hold(held)
    no = one.place(ask(1), NOW)
    assert "leaves all 70 of 760 W, and this needs 130 W" in no.message
    use.free(held.id)
    assert isinstance(one.place(ask(1), NOW), Pick)


@pytest.mark.parametrize(("watts", "fits"), [(519, False), (520, True)])
def test_a_gang_counts_as_a_whole(watts: int, fits: bool) -> None:
    gang = replace(ask(2), member_count=2, gang_strategy=GangStrategy.SPREAD)
    found = budgeted(all=PowerBudget(8 * 70 + watts)).place(gang, NOW)
    assert isinstance(found, Pick) is fits


@pytest.mark.parametrize(
    ("strategy", "members", "where"),
    [
        (GangStrategy.PACK, 4, "aabb"),
        (GangStrategy.SPREAD, 3, "aab"),
        (GangStrategy.STRICT_PACK, 3, ""),
        (GangStrategy.STRICT_SPREAD, 3, ""),
        (GangStrategy.PACK, 5, ""),
    ],
)
def test_a_gang_goes_where_each_rack_has_watts_for_a_part_of_it(
    strategy: GangStrategy, members: int, where: str
) -> None:
    one = budgeted(use := Use(), rack=PowerBudget(4 * 70 + 2 * 130, per="rack"))
    found = one.place(replace(ask(1), member_count=members, gang_strategy=strategy), NOW)
    assert "".join(sorted(found.nodes) if isinstance(found, Pick) else ()) == where
    assert (len(use), use.newly) == (0, {})


def test_members_that_must_be_apart_are_so_where_watts_split_them() -> None:
    one = placer(nodes := [plain_node(name, 2, rank=rank) for rank, name in enumerate("abcd")])
    short = PowerBudget(4 * 70 + 130, nodes=("a", "b"))
    one.power = Governor().look([("short", short)], nodes, idle(nodes), 0.0).room
    apart = replace(ask(1), member_count=3, gang_strategy=GangStrategy.STRICT_SPREAD)
    found = one.place(apart, NOW)
    assert (found.nodes[0] in "ab", found.nodes[1:]) == (True, ("c", "d"))


def test_a_power_limit_takes_a_node_that_can_keep_it() -> None:
    limited = replace(ask(1), power_limit_watts=300.0)
    found = budgeted(helped="b").place(limited, NOW)
    assert found.nodes == ("b",)
    none = budgeted(helped="").place(limited, NOW)
    assert (none.kind, none.obstacles) == (RefusalKind.UNSATISFIABLE, {Obstacle.POWER_LIMIT: 8})
    assert "nodes/a has no gpuscale-power, nodes/b has no gpuscale-power" in none.message
    chosen = replace(limited, nodes=frozenset({"b"}))
    told = budgeted(helped="").place(chosen, NOW)
    assert "nodes/a" not in told.message
    assert "nodes/b has no gpuscale-power." in {
        one.message for one in budgeted(helped="").explain(chosen, NOW).nodes
    }
    too_low = budgeted().place(replace(limited, power_limit_watts=100.0), NOW)
    assert "GPUs of nodes/a admit 200 to 700 W" in too_low.message


@pytest.mark.parametrize(
    ("told", "pause", "ends", "why"),
    [
        ({"problem": "busy"}, 1.0, False, "busy"),
        ({"watts": 690}, 1.0, False, "its helper tells no limits"),
        ({}, 60.0, False, "its agent is not heard of"),
        ({}, 60.0, True, "no cap is needed any more"),
    ],
)
async def test_a_lost_cap_is_told_with_its_cause(
    told: dict[str, Any], pause: float, ends: bool, why: str
) -> None:
    clock, node, budgets = ManualClock(), plain_node("a", 1), [("rack", "", PowerBudget(300))]
    uuid, view = node.gpus[0].uuid, SimpleNamespace(nodes=[node], get=lambda _: node)
    records = SimpleNamespace(view=view, ledger=SimpleNamespace(use=placer([node]).use), clock=clock)
    world: Any = SimpleNamespace(specs=lambda: budgets, room=lambda: None, **vars(records))
    powering = Powering(world, world, world, world, world)
    powering.take("a", {uuid: api.GpuPower(watts=690, lowest_watts=200, limit_watts=700)})
    await powering.look()
    powering.take("a", {uuid: api.GpuPower(**told)})
    clock.advance(pause)
    del budgets[: int(ends)]
    await powering.look()
    assert powering.changes()[0][1].reason == why

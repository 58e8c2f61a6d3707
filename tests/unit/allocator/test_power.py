"""Power budgets: whose sums there are, how watts are shared, what an emergency is, and what may start."""

from dataclasses import replace

import pytest

from gpuscale.allocator.domain.model import Node, NodeState
from gpuscale.allocator.domain.power import CALM, Governor, PowerBudget, PoweredGpu, PowerLook, PowerShare

NODES = [
    Node("a", 0, NodeState.ONLINE, (), labels={"rack": "r"}),
    Node("b", 1, NodeState.ONLINE, (), labels={"rack": "s"}),
    Node("c", 2, NodeState.ONLINE, ()),
]
BUSY = PoweredGpu("g", "a", helped=True, low=200.0, high=700.0, watts=690.0, held=True)
IDLE = replace(BUSY, watts=60.0, held=False)


def look(
    budget: PowerBudget, *gpus: PoweredGpu, governor: Governor | None = None, now: float = 0.0
) -> PowerLook:
    """What is chosen for GPUs g0, g1 and so on of the node a."""
    named = [replace(gpu, uuid=f"g{at}") for at, gpu in enumerate(gpus)]
    return (governor or Governor()).look([("one", budget)], NODES, {"a": named}, now)


def caps(found: PowerLook) -> list[float]:
    return [found.caps[uuid].watts for uuid in sorted(found.caps)]


@pytest.mark.parametrize(
    ("budget", "sums"),
    [
        (PowerBudget(1.0), ["all", "all", "all"]),
        (PowerBudget(1.0, nodes=("b",)), ["", "all", ""]),
        (PowerBudget(1.0, per="node"), ["nodes/a", "nodes/b", "nodes/c"]),
        (PowerBudget(1.0, per="rack"), ["rack=r", "rack=s", ""]),
        (PowerBudget(1.0, labels=(("rack", "s"),), per="node"), ["", "nodes/b", ""]),
    ],
)
def test_a_budget_is_for_all_for_each_node_or_for_each_value_of_a_label(
    budget: PowerBudget, sums: list[str]
) -> None:
    assert [budget.sum_of(node) for node in NODES] == sums


def test_without_need_there_are_no_caps_but_those_that_holders_want() -> None:
    assert look(PowerBudget(1400.0), BUSY, BUSY).caps == {}
    found = look(PowerBudget(1400.0), replace(BUSY, wish=300.0), replace(BUSY, wish=100.0), IDLE)
    assert caps(found) == [300.0, 200.0], (
        "not below what the device admits; and nobody wishes for what nobody holds"
    )
    assert "limits it to 300 W" in found.caps["g0"].reason
    assert look(PowerBudget(9999.0), replace(BUSY, wish=900.0)).caps == {}


def test_shares_are_equal_or_go_by_priority_or_by_measured_speed() -> None:
    gpus = [replace(BUSY, priority=at, activity=30.0 * (at + 1)) for at in range(3)]
    assert caps(look(PowerBudget(1200.0), *gpus)) == [400.0, 400.0, 400.0]
    by_priority = PowerBudget(1200.0, share=PowerShare.PRIORITY)
    assert caps(look(by_priority, *gpus)) == [200.0, 300.0], "the third may draw all it can"
    by_speed = PowerBudget(1200.0, share=PowerShare.SPEED)
    assert caps(look(by_speed, *reversed(gpus))) == [300.0, 200.0]
    gpus[1] = replace(gpus[1], activity=None)
    assert caps(look(by_speed, *gpus)) == [400.0, 400.0, 400.0], "activity is not read of all"


def test_what_one_does_not_use_others_get_and_what_nobody_gains_by_changes_nothing() -> None:
    calm = replace(BUSY, watts=150.0)
    assert caps(look(PowerBudget(800.0), calm, BUSY)) == [200.0, 600.0]
    in_force = [replace(BUSY, watts=390.0, cap=400.0), replace(BUSY, watts=340.0, cap=400.0)]
    assert caps(look(PowerBudget(800.0), *in_force)) == [400.0, 400.0]
    uneven = [replace(BUSY, watts=watts, cap=watts) for watts in (410.0, 390.0)]
    assert caps(look(PowerBudget(800.0), *uneven)) == [410.0, 390.0], "it would gain little"
    in_force[1] = replace(in_force[1], watts=100.0)
    assert caps(look(PowerBudget(800.0), *in_force)) == [400.0, 200.0], "what is to be lowered goes first"
    assert caps(look(PowerBudget(800.0), in_force[0], replace(in_force[1], cap=200.0))) == [600.0, 200.0]


@pytest.mark.parametrize("watts", [690.0, None])
def test_above_the_budget_for_five_seconds_all_go_down_to_the_lowest_and_stay_there(
    watts: float | None,
) -> None:
    """A cap without effect; what is drawn unseen counts with the limit."""
    governor, budget = Governor(), PowerBudget(1200.0)
    stuck, other = replace(BUSY, watts=watts, cap=None), replace(BUSY, watts=600.0, cap=600.0)
    found = {now: look(budget, stuck, other, governor=governor, now=now) for now in (0.0, 4.0, 5.0)}
    assert [caps(one) for one in found.values()] == [[600.0, 600.0], [600.0, 600.0], [200.0, 200.0]]
    assert "it drew more for 5 s" in found[5.0].caps["g0"].reason
    assert (found[5.0].sums[0].emergency, found[5.0].sums[0].room) == (True, 0.0)
    low = [replace(BUSY, watts=190.0, cap=200.0)] * 2
    assert caps(look(budget, *low, governor=governor, now=5.0 + CALM - 1)) == [200.0, 200.0]
    assert caps(look(budget, *low, governor=governor, now=5.0 + CALM)) == [600.0, 600.0]


def test_a_budget_that_is_removed_and_made_again_starts_without_an_emergency() -> None:
    governor, drawn = Governor(), replace(BUSY, watts=690.0)
    for now in (0.0, 5.0):
        found = look(PowerBudget(600.0), drawn, governor=governor, now=now)
    assert found.sums[0].emergency
    governor.look([], NODES, {"a": [drawn]}, 6.0)
    assert not look(PowerBudget(600.0), drawn, governor=governor, now=7.0).sums[0].emergency


def test_what_is_not_known_takes_all_there_is() -> None:
    unknown = PoweredGpu("g", "a")
    found = look(PowerBudget(9999.0), BUSY, unknown)
    assert (caps(found), found.sums[0].drawn, found.sums[0].room) == ([200.0], None, 0.0)
    assert "is unknown" in found.caps["g0"].reason
    loose = replace(unknown, high=500.0)
    assert caps(look(PowerBudget(1000.0), BUSY, loose)) == [500.0], (
        "its limit, and what it draws is not known"
    )
    assert look(PowerBudget(1000.0), BUSY, replace(loose, watts=80.0)).caps == {}
    assert caps(look(PowerBudget(1000.0), BUSY, replace(loose, watts=80.0, held=True))) == [500.0]


def test_what_may_start_is_what_is_left_with_all_caps_at_their_lowest() -> None:
    found = look(PowerBudget(600.0), replace(BUSY, cap=460.0, watts=450.0), IDLE, IDLE)
    assert (found.sums[0].room, caps(found)) == (260.0, [460.0, 200.0, 200.0])
    room = found.room
    assert room.costs == {"g1": 130.0, "g2": 130.0}, "each counts 70 W now, and 200 W once it is held"
    assert room.short({"g1": "a"}, {}) is None
    assert room.short({"g1": "a", "g2": "a"}, {}) is None
    tight = look(PowerBudget(599.0), BUSY, IDLE, IDLE).room
    short = tight.short({"g1": "a", "g2": "a"}, {})
    assert (short[0].name, *short[1:]) == ("all", 259.0, 260.0)
    assert tight.short({"g2": "a"}, {"g1": "a"}) is not None, "granted since the look"
    assert tight.short({"g0": "a"}, {"g1": "a", "g2": "a"}) is None, "it is held already"
    assert tight.short({"x": "b"}, {}) is None
    unknown = look(PowerBudget(5000.0), replace(IDLE, helped=False, low=0.0, high=None)).room
    assert unknown.short({"g0": "a"}, {}) is not None

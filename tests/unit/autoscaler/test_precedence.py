"""Who gives way: what is freed is all that helps, at the least cost, and never what an endpoint keeps."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.domain.decisions import Code, Stage
from gpuscale.autoscaler.domain.engine import Memory, Question
from gpuscale.autoscaler.domain.inputs import GiveWay, Inputs
from gpuscale.autoscaler.domain.planning import AdapterFacts
from gpuscale.autoscaler.domain.precedence import (
    HOLD,
    LONGEST_HOLD,
    RECENT,
    Holder,
    NodeRoom,
    choose,
    hold,
    yielding,
)
from gpuscale.autoscaler.domain.replicas import Replica, ReplicaLease, ReplicaState
from gpuscale.autoscaler.domain.spec import EndpointSpec, GpuGate, ReplicaTemplate, ScalingMode
from gpuscale.autoscaler.domain.whatif import answer
from gpuscale.autoscaler.loop.hub import Wakes
from gpuscale.autoscaler.loop.precedence import Given, Precedence, StartRefusal
from gpuscale.autoscaler.wire.decisions import question_from_wire, question_to_wire
from gpuscale.common.errors import PermissionDeniedError
from gpuscale.common.security.auth import Limits, Principal, Role, require_priority
from tests.support.autoscaler_values import (
    NOW,
    WALL,
    down,
    endpoint,
    leaving,
    observed,
    replica,
    seen,
    spec,
    up,
)
from tests.support.clock import ManualClock

READY = ReplicaState.READY


def held(*gpus: str) -> tuple[frozenset[str], ...]:
    """GPUs, each by the reservations on it, as `a` or `a+b`."""
    return tuple(frozenset(one.split("+")) for one in gpus)


def holders(priorities: dict[str, int]) -> dict[str, Holder]:
    """A replica for each reservation, named as it; its endpoint is the letter that it begins with."""
    return {
        one: Holder(one[0], one, priority, rank) for rank, (one, priority) in enumerate(priorities.items())
    }


def chosen(
    gpus: int, rooms: Sequence[NodeRoom], priorities: dict[str, int], *, spare: int = 9, **more: Any
) -> list[str]:
    found = holders(priorities)
    given = dict.fromkeys((one.endpoint for one in found.values()), spare)
    coming = more.pop("coming", "").split()
    answer = choose(gpus, rooms, coming, found, given, **{"counted": 0, "more": 1} | more)
    return ["+".join(sorted(one)) for one in answer]


def test_the_lowest_priority_gives_way_first_then_the_fewest_replicas_then_the_first_to_stop() -> None:
    room = [NodeRoom(0, held("b1", "a1", "a2"))]
    assert chosen(1, room, {"b1": 5, "a1": 0, "a2": 0}) == ["a1"]
    assert chosen(1, room, {"b1": 5, "a2": 0, "a1": 0}, more=3) == ["a2", "a1", "b1"]
    shared = [NodeRoom(0, held("a1+a2")), NodeRoom(0, held("c1"))]
    assert chosen(1, shared, {"a1": 0, "a2": 0, "c1": 0}) == ["c1"]


def test_all_that_a_replica_needs_is_freed_on_one_node_beside_what_is_free_there() -> None:
    rooms = [NodeRoom(0, held("a1")), NodeRoom(1, held("b1", "x")), NodeRoom(0, held("c1", "c2"))]
    everybody = {"a1": -5, "b1": 0, "c1": -5, "c2": -5}
    assert chosen(2, rooms, everybody) == ["c1+c2"], "a lower priority goes before fewer replicas"
    assert chosen(2, rooms, {"a1": 0, "b1": 0, "c1": 0, "c2": 0}) == ["b1"]
    assert chosen(3, rooms, everybody) == []
    assert chosen(1, rooms, everybody) == [], "one is free"


def test_a_replica_on_several_gpus_frees_them_all_and_makes_smaller_ones_needless() -> None:
    assert chosen(3, [NodeRoom(0, held("a1", "b1", "b1", "b1"))], {"a1": -1, "b1": 0}) == ["b1"]


def test_what_ends_anyway_is_counted_on_once() -> None:
    room = [NodeRoom(0, held("gone", "a1", "a2"))]
    assert chosen(1, room, {"a1": 0, "a2": 0}, coming="gone") == []
    assert chosen(1, room, {"a1": 0, "a2": 0}, coming="gone", more=2) == ["a1"]
    assert chosen(1, room, {"a1": 0, "a2": 0}, coming="gone", counted=1) == ["a1"]
    assert chosen(1, [NodeRoom(0, held("a1"))], {"a1": 0}, counted=1, more=0) == []


def test_nobody_gives_more_than_it_can_spare_and_strangers_are_let_be() -> None:
    room = [NodeRoom(0, held("a1", "a2", "x+a3", "x"))]
    assert chosen(1, room, {"a1": 0, "a2": 0, "a3": 0}, more=4, spare=1) == ["a1"]
    assert chosen(2, room, {"a1": 0, "a2": 0, "a3": 0}, spare=1) == []


def having(count: int) -> list[Replica]:
    return [replica(number, READY, lease=ReplicaLease(f"v{number}", 1, ("g",))) for number in range(count)]


def test_those_named_stop_but_for_the_min_whatever_became_of_the_others() -> None:
    way = GiveWay(1, "endpoints/chat (priority 10)", ("r000", "r001"))
    policy, rows = spec(up(), low=1), having(3)
    assert [one.id for one in yielding(way, policy, rows)] == ["r000", "r001"]
    assert [one.id for one in yielding(way, policy, rows[:2])] == ["r000"]
    assert not list(yielding(way, policy, rows[:1]))
    assert [one.id for one in yielding(way, policy, [*rows[:2], leaving(rows[2])])] == ["r000"]


HELD_STILL = {
    "paused": spec(up(), paused=True), "shadow": spec(up(), mode=ScalingMode.SHADOW), "by hand": spec(),
    "switched off": spec(up(disabled=True)),
}  # fmt: skip


def question(policy: EndpointSpec, before: int, way: GiveWay | None, depth: float = 50.0) -> Question:
    inputs = Inputs(before, before, NOW, WALL, observed(seen(depth)), gives_way=way)
    return Question(policy, inputs, Memory(0.0))


@pytest.mark.parametrize("policy", HELD_STILL.values(), ids=list(HELD_STILL))
def test_a_count_that_people_hold_does_not_give_way(policy: EndpointSpec) -> None:
    assert not policy.gives_way
    way = GiveWay(0, "endpoints/chat (priority 10)", ("r000",))
    assert not list(yielding(way, policy, having(3)))
    assert answer(question(policy, 3, way)).result.evaluation.wanted == 3


def test_an_evaluation_says_to_whom_it_gives_way_and_what_would_be_otherwise() -> None:
    policy, way = spec(up(step=2), low=1), GiveWay(2, "endpoints/chat (priority 10)", ("r000",))
    found = answer(question(policy, 4, way))
    evaluation = found.result.evaluation
    assert (evaluation.wanted, evaluation.asked, evaluation.limited_by) == (2, 6, Code.GIVES_WAY)
    step = evaluation.steps[-1]
    assert (step.stage, step.before, step.after) == (Stage.GPU, 6, 2)
    assert step.text == "gives way to endpoints/chat (priority 10): 2 at most until then"
    assert [(one.code, one.wanted) for one in found.alternatives] == [(Code.GIVES_WAY, 6)]
    capped = replace(policy, gpu_gate=GpuGate.CAP, template=ReplicaTemplate("worker", gpu_count=1))
    assert answer(question(capped, 2, way)).result.evaluation.limited_by is Code.GIVES_WAY, (
        "however few there are"
    )
    none = replace(way, most=0)
    assert answer(question(policy, 4, none)).result.evaluation.wanted == 1, "its min holds"
    fewer = question(spec(down()), 2, replace(way, most=4), depth=0.0)
    assert answer(fewer).result.evaluation.wanted == 1, "it may want fewer by itself"


def test_a_decision_of_who_gives_way_can_be_evaluated_again() -> None:
    asked = question(spec(up()), 4, GiveWay(2, "endpoints/chat (priority 10)", ("r000", "r001")))
    assert question_from_wire(question_to_wire(asked)).inputs.gives_way == asked.inputs.gives_way
    assert question_from_wire(question_to_wire(question(spec(up()), 4, None))).inputs.gives_way is None


def test_who_gives_way_again_and_again_stays_longer() -> None:
    times = [NOW - 400, NOW - 200, NOW]
    assert [hold(times[-count:], NOW) for count in (1, 2, 3)] == [HOLD, 2 * HOLD, 4 * HOLD]
    assert hold([NOW - RECENT, NOW], NOW) == HOLD
    assert hold([NOW] * 9, NOW) == LONGEST_HOLD


def test_a_priority_is_for_those_who_may_ask_for_it() -> None:
    ann = Principal("ann", Role.OPERATOR, "token", Limits((), 5))
    require_priority(ann, 5, "endpoint.spec.priority")
    require_priority(replace(ann, role=Role.ADMIN), 1000, "endpoint.spec.priority")
    with pytest.raises(
        PermissionDeniedError, match=r"endpoint\.spec\.priority: ann may ask for 5 at most"
    ) as caught:
        require_priority(ann, 6, "endpoint.spec.priority")
    assert caught.value.reason == "PRIORITY_TOO_HIGH"
    assert "login-code create ann --role operator --max-priority 6, or of a token:" in caught.value.message


async def test_a_concession_lasts_from_the_answer_on_and_not_from_the_question() -> None:
    """The allocator may take as long as RPC_TIMEOUT, and an earlier concession may end meanwhile."""
    clock, answers = ManualClock(), 10.0
    start = clock.now()

    async def explained(*_: object, **__: object) -> allocator_api.ExplainPlacementResponse:
        clock.advance(answers)
        gpu = allocator_api.GpuOutlook(obstacle=allocator_api.Obstacle.OBSTACLE_HELD, reservations=["v1"])
        return allocator_api.ExplainPlacementResponse(nodes=[allocator_api.NodeOutlook(gpus=[gpu])])

    batch = endpoint(spec(up()), name="e")

    async def read(_: object) -> Any:
        return [batch], [replica(1, READY, lease=ReplicaLease("v1", 1, ("g",)))]

    facts = AdapterFacts("a", "fake", "n", frozenset({"worker"}), 0, live=True)
    channel: Any = SimpleNamespace(unary_unary=lambda *_, **__: explained)
    store: Any = SimpleNamespace(read=read)
    hub: Any = SimpleNamespace(facts=lambda: [facts], live=lambda _: True)
    precedence = Precedence(store, clock, hub, channel, Wakes(), lambda _: {})
    earlier = precedence.given["e"] = Given([start - HOLD + answers / 2], until=start + answers / 2)
    chat = endpoint(spec(priority=10, template=ReplicaTemplate("worker", gpu_count=1)), name="chat")
    waiting = replica(2, template=chat.spec.template)
    await precedence.claim(chat, StartRefusal(Stage.GPU, Code.NO_CAPACITY, "none free"), [waiting])
    given = precedence.given["e"]
    assert given is not earlier, "that one had ended"
    assert (given.times[-1], given.until) == (start + answers, start + answers + 2 * HOLD)

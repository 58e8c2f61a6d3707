"""Reservations and asks as messages: every field arrives, what is absent is not zero, what is left open is filled in."""

from dataclasses import replace
from pathlib import Path

import pytest

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import (
    MOVABLE_LABEL,
    WHOLE,
    Policy,
    Reservation,
    Score,
    ScorePart,
    Weights,
)
from gpuscale.allocator.servicers import answers, servicer
from gpuscale.allocator.servicers.servicer import to_ask, to_order
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as api
from gpuscale.common import wire
from gpuscale.common.security.auth import Principal, Role
from tests.support.allocator_values import MIB, NOW, WALL, order, reserved

SCORE = Score(0.54, (ScorePart("memory", 0.9, 0.6), ScorePart("utilization", None, 0.4)), "by memory alone")


def granted() -> Reservation:
    """A share that knows its memory and a whole GPU that does not, of two members."""
    share = replace(reserved("GPU-A", index=3, milli=500, memory=40_000), score=SCORE)
    whole = replace(reserved("GPU-b", node="n1"), score=SCORE, member=1, lost=True)
    wanted = replace(order(ttl=60.5), labels={"job": "x"}, priority=7, preemptible=True)
    ledger = Ledger()
    return ledger.confirm(ledger.grant(wanted, [share, whole], now=NOW, wall=WALL))


def test_a_gpu_arrives_with_its_score_and_what_is_not_known_is_absent() -> None:
    share, whole = answers.from_reservation(granted(), NOW, WALL).gpus
    assert (share.name, share.node_name, share.node) == ("nodes/n0/gpus/gpu-a", "nodes/n0", "n0")
    assert (share.uuid, share.index) == ("GPU-A", 3)
    assert (share.model, share.simulated, share.milli, share.member) == ("Test GPU", True, 500, 0)
    assert (share.memory_bytes, whole.HasField("memory_bytes")) == (40_000 * MIB, False)
    assert (whole.node, whole.milli, whole.member, whole.lost, share.lost) == ("n1", 1000, 1, True, False)
    assert (share.score.total, share.score.note) == (0.54, "by memory alone")
    memory, utilization = share.score.parts
    assert (memory.name, memory.value, memory.weight) == ("memory", 0.9, 0.6)
    assert (utilization.name, utilization.weight) == ("utilization", 0.4)
    assert not utilization.HasField("value")


def test_a_lease_is_told_to_the_nanosecond_and_its_end_by_the_wall_clock() -> None:
    one = granted()
    message = answers.from_reservation(one, NOW + 20.25, WALL)
    assert (message.fence, dict(message.labels)) == (1, {"job": "x"})
    assert (message.owner, message.holder, message.request_id) == ("ann", "job", one.request_id)
    assert message.state == message.STATE_ACTIVE
    assert message.policy == api.PlacementPolicy.PLACEMENT_POLICY_SPREAD
    assert (message.priority, message.preemptible) == (7, True)
    assert (message.ttl.seconds, message.ttl.nanos) == (60, 500_000_000)
    assert (message.remaining.seconds, message.remaining.nanos) == (40, 250_000_000)
    assert (wire.to_datetime(message.expire_time) - WALL).total_seconds() == 40.25
    assert wire.to_datetime(message.create_time) == WALL
    assert not message.HasField("end_time")


def test_what_is_asked_for_is_told_of_what_waits_and_not_of_what_may_move_and_was_granted_at_once() -> None:
    ledger, movable = Ledger(), replace(order(), labels={MOVABLE_LABEL: "60"})
    granted_at_once = ledger.grant(movable, [reserved("GPU-A")], now=NOW, wall=WALL)
    waits = ledger.grant(replace(movable, request_id="2"), [], now=NOW, wall=WALL, wait=60.0)
    assert answers.from_reservation(granted_at_once, NOW, WALL).asked_gpu_count == 0
    assert answers.from_reservation(waits, NOW, WALL).asked_gpu_count == 1


def test_answers_do_not_write_into_each_other() -> None:
    """What lasts of a reservation is kept ready: an answer is a copy of it."""
    one = granted()
    answers.from_reservation(one, NOW, WALL).gpus[0].uuid = "another"
    assert answers.from_reservation(one, NOW, WALL).gpus[0].uuid == "GPU-A"


def test_another_fence_is_told_of_a_job_that_begins_anew_on_its_own_gpus() -> None:
    one = granted()
    again = replace(one, fence=one.fence + 2)
    told = [answers.from_reservation(each, NOW, WALL).fence for each in (one, again)]
    assert told == [one.fence, one.fence + 2]


def test_another_ttl_is_told_though_the_message_is_kept_ready() -> None:
    one = granted()
    answers.from_reservation(one, NOW, WALL)
    assert answers.from_reservation(replace(one, ttl=90.0), NOW, WALL).ttl.seconds == 90


SETTINGS = AllocatorSettings(data_dir=Path("unused"))


@pytest.mark.parametrize(
    ("ask", "least"),
    [
        (api.Ask(gpu_count=1), 8000 * MIB),
        (api.Ask(gpu_count=1, min_memory_bytes=0), 0),
        (api.Ask(gpu_count=1, gpu_milli=WHOLE), 8000 * MIB),
        (api.Ask(gpu_count=1, mig_profile="1g.5gb"), 4_500_000_000),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb+me"), 8000 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250), 0),
        (api.Ask(gpu_count=1, gpu_memory_bytes=5 * MIB), 5 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250, gpu_memory_bytes=5 * MIB), 5 * MIB),
        (api.Ask(gpu_count=1, gpu_milli=250, min_memory_bytes=7 * MIB), 7 * MIB),
    ],
)
def test_the_least_free_memory(ask: api.Ask, least: int) -> None:
    """Of a share what goes with it has to be free, and no more: small shares fit on GPUs that are nearly full."""
    assert to_ask(ask, SETTINGS).min_memory_bytes == least


def test_what_a_request_leaves_open_is_of_the_settings_which_are_the_seeds_unless_told() -> None:
    ann = Principal("ann", Role.OPERATOR, "token")
    told = SETTINGS.model_copy(
        update={"default_ttl_seconds": 33.0, "memory_weight": 0.0, "utilization_weight": 1.0}
    )
    asked = api.ReserveRequest(holder="test_translate", ask=api.Ask(gpu_count=1))
    seeds, own = (to_order(asked, ann, settings) for settings in (SETTINGS, told))
    assert (seeds.ttl, seeds.ask.max_utilization_percent, seeds.ask.policy) == (300, 50, Policy.SPREAD)
    assert (own.ttl, seeds.ask.weights, own.ask.weights) == (33, Weights(0.6, 0.4), Weights(0.0, 1.0))
    asked.ask.weights.CopyFrom(api.ScoreWeights(memory=1.0, utilization=0.0))
    assert to_order(asked, ann, told).ask.weights == Weights(1.0, 0.0)


@pytest.mark.parametrize(
    ("ask", "admitted"),
    [
        (api.Ask(gpu_count=1), False),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb"), True),
        (api.Ask(gpu_count=1, mig_profile="1g.10gb", allow_unknown_utilization=False), False),
        (api.Ask(gpu_count=1, allow_unknown_utilization=True), True),
    ],
)
def test_unknown_utilization_is_admitted_of_mig_instances(ask: api.Ask, admitted: bool) -> None:
    assert to_ask(ask, SETTINGS).allow_unknown_utilization is admitted


def test_as_many_asks_are_kept_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_ASKS_KEPT", 2)
    before = len(servicer._asks)
    for count in range(1, before + 10):
        to_ask(api.Ask(gpu_count=count), SETTINGS)
    assert len(servicer._asks) <= max(before, 2)


def test_a_request_that_differs_in_its_id_alone_is_translated_once_for_an_equal_caller() -> None:
    """Each call makes another principal of a caller behind a gateway, or with a certificate."""
    ann = Principal("ann", Role.OPERATOR, "gateway", via="front")
    asked = api.ReserveRequest(holder="test_translate", ask=api.Ask(gpu_count=1))
    fingerprint = wire.fingerprint(asked)
    asked.request_id = "A1"
    first = to_order(asked, ann, SETTINGS)
    asked.request_id = "B2"
    again, another = (to_order(asked, one, SETTINGS) for one in (replace(ann), replace(ann, name="bob")))
    assert (first.request_id, first.owner, first.fingerprint) == ("a1", "ann", f"{fingerprint} ann")
    assert again == replace(first, request_id="b2")
    assert again.labels is first.labels
    assert (another.owner, another.fingerprint) == ("bob", f"{fingerprint} bob")

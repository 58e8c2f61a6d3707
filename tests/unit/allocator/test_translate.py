"""Reservations as messages: every field arrives, and what is absent is not zero."""

from dataclasses import replace

from gpuscale.allocator.domain.ledger import Ledger
from gpuscale.allocator.domain.model import Reservation, Score, ScorePart
from gpuscale.allocator.servicers import servicer as translate
from gpuscale.common import wire
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
    share, whole = translate.from_reservation(granted(), NOW, WALL).gpus
    assert (share.name, share.node, share.uuid, share.index) == ("nodes/n0/gpus/gpu-a", "n0", "GPU-A", 3)
    assert (share.model, share.simulated, share.milli, share.member) == ("Test GPU", True, 500, 0)
    assert (share.memory_bytes, whole.HasField("memory_bytes")) == (40_000 * MIB, False)
    assert (whole.node, whole.milli, whole.member, whole.lost, share.lost) == ("n1", 1000, 1, True, False)
    assert (share.score.total, share.score.note) == (0.54, "by memory alone")
    memory, utilization = share.score.parts
    assert (memory.name, memory.value, memory.weight) == ("memory", 0.9, 0.6)
    assert (utilization.name, utilization.HasField("value"), utilization.weight) == (
        "utilization",
        False,
        0.4,
    )


def test_a_lease_is_told_to_the_nanosecond_and_its_end_by_the_wall_clock() -> None:
    message = translate.from_reservation(granted(), NOW + 20.25, WALL)
    assert (message.fence, dict(message.labels)) == (1, {"job": "x"})
    assert (message.priority, message.preemptible) == (7, True)
    assert (message.ttl.seconds, message.ttl.nanos) == (60, 500_000_000)
    assert (message.remaining.seconds, message.remaining.nanos) == (40, 250_000_000)
    assert (wire.to_datetime(message.expire_time) - WALL).total_seconds() == 40.25
    assert wire.to_datetime(message.create_time) == WALL
    assert not message.HasField("end_time")


def test_answers_do_not_write_into_each_other() -> None:
    """What lasts of a reservation is kept ready: an answer is a copy of it."""
    one = granted()
    translate.from_reservation(one, NOW, WALL).gpus[0].uuid = "another"
    assert translate.from_reservation(one, NOW, WALL).gpus[0].uuid == "GPU-A"


def test_another_ttl_is_told_though_the_message_is_kept_ready() -> None:
    one = granted()
    translate.from_reservation(one, NOW, WALL)
    assert translate.from_reservation(replace(one, ttl=90.0), NOW, WALL).ttl.seconds == 90

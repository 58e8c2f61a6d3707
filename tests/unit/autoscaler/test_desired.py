"""What an adapter is told."""

from dataclasses import replace

from gpuscale.autoscaler.domain.replicas import (
    HURRIED_DRAIN,
    DesiredReplica,
    Replica,
    ReplicaOrder,
    ReplicaReport,
    ReplicaState,
    asked_to_stop,
    desired_state,
    unknown_to,
)
from gpuscale.autoscaler.domain.spec import ReplicaTemplate
from tests.support.autoscaler_values import AT, NOW, lease, replica

S = ReplicaState
ALIVE, GONE = ReplicaReport(S.READY), ReplicaReport(S.STOPPED)


def told(
    own: dict[str, Replica], reported: dict[str, ReplicaReport], *strays: str
) -> dict[str, ReplicaOrder]:
    return {line.replica: line.order for line in desired_state(own, reported, strays)}


def test_run_and_stop() -> None:
    running = replica(0, S.READY)
    assert told({"a": running, "b": asked_to_stop(running, "", AT)}, {}) == {
        "a": ReplicaOrder.RUN,
        "b": ReplicaOrder.STOP,
    }


def test_a_line_carries_what_the_adapter_needs() -> None:
    template = ReplicaTemplate("w", parameters={"queue": "q"}, gpu_count=1, drain_timeout=9.0)
    one = replica(0, S.READY, template=template, lease=lease(4))
    [line] = desired_state({"a": one}, {}, ())
    assert line == DesiredReplica(
        "a", ReplicaOrder.RUN, "w", {"queue": "q"}, ("GPU-4",), 4, 9.0, 1, "reservations/v4", "token of v4"
    )
    assert "token of v4" not in repr(line)


def test_one_that_lost_its_gpus_may_not_take_its_time() -> None:
    patient = replica(0, S.READY, template=ReplicaTemplate("w", drain_timeout=None))
    [line] = desired_state({"a": asked_to_stop(patient, "", AT, hurry=True)}, {}, ())
    assert (line.order, line.drain_timeout) == (ReplicaOrder.STOP, HURRIED_DRAIN)


def test_what_ended_and_was_noted_is_forgotten() -> None:
    assert told({}, {"a": GONE}) == {"a": ReplicaOrder.FORGET}
    assert told({"a": replica(0, S.READY)}, {"a": GONE}) == {"a": ReplicaOrder.RUN}, "not noted yet"


def test_strangers_are_stopped_only_once_they_are_strays() -> None:
    assert told({}, {"a": ALIVE}) == {}
    assert told({}, {"a": ALIVE}, "a") == {"a": ReplicaOrder.STOP}


def test_since_when_strangers_are_known_as_such() -> None:
    reported = {"a": ALIVE, "b": ALIVE, "c": GONE}
    assert unknown_to({"b"}, reported, {}, NOW) == {"a": NOW}
    assert unknown_to({"b"}, reported, {"a": 5.0, "gone": 1.0}, NOW) == {"a": 5.0}
    assert unknown_to({"a", "b"}, reported, {"a": 5.0}, NOW) == {}


def test_the_order_of_lines_does_not_matter() -> None:
    one = replica(0, S.READY)
    other = replace(one, id="x")
    assert desired_state({"a": one, "b": other}, {}, ()) == desired_state({"b": other, "a": one}, {}, ())

"""The states of a replica, and what its adapter is told."""

from dataclasses import replace

import pytest

from gpuscale.autoscaler.domain.replicas import (
    HURRIED_DRAIN,
    DesiredReplica,
    EndReason,
    Goal,
    Replica,
    ReplicaReport,
    ReplicaState,
    asked_to_stop,
    assigned,
    desired_state,
    ended,
    reported,
    shown_state,
    unknown_to,
)
from gpuscale.autoscaler.domain.spec import ReplicaTemplate
from tests.support.autoscaler_values import AT, NOW, WALL, lease, replica

S = ReplicaState


def test_a_replica_runs_and_stops() -> None:
    started = assigned(replica(nodes=("n",)), "a", "n", lease())
    assert (started.state, started.nodes, started.granted) == (S.STARTING, (), True)
    ready = reported(started, ReplicaReport(S.READY, pid=42), AT)
    assert (ready.state, ready.pid, ready.ready_at) == (S.READY, 42, NOW)
    draining = asked_to_stop(ready, "scale-in", AT)
    assert (draining.state, draining.goal, draining.aimed_at) == (S.DRAINING, Goal.STOP, False)
    assert not draining.owes_release, "its GPUs are its own until it has ended"
    gone = reported(draining, ReplicaReport(S.STOPPED, exit_code=0), AT)
    assert (gone.state, gone.owes_release, gone.end_time, gone.exit_code) == (S.STOPPED, True, WALL, 0)
    assert gone.reason == "scale-in"
    killed = reported(draining, ReplicaReport(S.STOPPED, exit_code=-9, reason="SIGKILL after 30 s"), AT)
    assert killed.reason == "scale-in; SIGKILL after 30 s"


def test_one_that_should_stop_stays_draining_until_it_has_ended() -> None:
    """Its adapter's reports may be older than the order."""
    draining = asked_to_stop(replica(0, S.READY), "scale-in", AT)
    for state in (S.STARTING, S.READY, S.DRAINING):
        assert reported(draining, ReplicaReport(state), AT).state is S.DRAINING


@pytest.mark.parametrize(
    ("state", "code", "reason"),
    [
        *((S.FAILED, code, EndReason.EXITED) for code in (0, 1, None)),
        # Else a clean restart of many replicas would look like a crash loop, and wait out its back-off.
        (S.STOPPED, 0, EndReason.ADAPTER_STOPPED),
    ],
)
def test_one_that_ends_by_itself_has_failed_and_one_that_its_adapter_stopped_has_not(
    state: S, code: int | None, reason: EndReason
) -> None:
    gone = reported(replica(0, S.READY, lease=lease()), ReplicaReport(state, exit_code=code), AT)
    assert (gone.state, gone.owes_release, gone.end_reason) == (state, True, reason)


def test_a_pending_replica_stops_where_nobody_was_told_of_it() -> None:
    gone = asked_to_stop(replica(), "scale-in", AT)
    assert (gone.state, gone.owes_release) == (S.STOPPED, False)


def test_a_pending_replica_whose_reserve_is_open_waits_for_the_answer() -> None:
    waiting = asked_to_stop(replica(nodes=("n",)), "scale-in", AT)
    assert (waiting.state, waiting.goal, waiting.nodes) == (S.PENDING, Goal.STOP, ("n",))


def test_a_lost_lease_hurries_one_that_drains_already() -> None:
    draining = asked_to_stop(replica(0, S.READY, lease=lease()), "scale-in", AT)
    hurried = asked_to_stop(draining, "its reservation expired", AT, hurry=True)
    assert hurried.hurry
    assert asked_to_stop(hurried, "scale-in", AT) == hurried, "nothing slows it down again"


def test_what_has_ended_stays_ended() -> None:
    gone = ended(replica(0, S.READY), S.FAILED, "exit 1", AT)
    assert asked_to_stop(gone, "scale-in", AT) == gone


def test_ready_again_keeps_the_first_time() -> None:
    ready = reported(replica(0, S.STARTING), ReplicaReport(S.READY), AT)
    later = replace(AT, now=NOW + 50)
    again = reported(reported(ready, ReplicaReport(S.STARTING), later), ReplicaReport(S.READY), later)
    assert again.ready_at == NOW


@pytest.mark.parametrize("state", list(ReplicaState))
def test_a_silent_adapter_shows_unknown_and_stores_nothing(state: ReplicaState) -> None:
    one = replica(0, state)
    if state in {S.PENDING, S.STOPPED, S.FAILED}:
        assert shown_state(one, silent=True) is state
    else:
        assert shown_state(one, silent=True) is S.UNKNOWN
    assert shown_state(one, silent=False) is state


def test_granted_means_gpus_held_or_none_needed() -> None:
    assert replica().granted
    needy = replace(replica(), template=replace(replica().template, gpu_count=1))
    assert not needy.granted
    assert replace(needy, lease=lease()).granted
    assert not asked_to_stop(replace(needy, lease=lease(), state=S.READY, adapter="a"), "", AT).granted


ALIVE, GONE = ReplicaReport(S.READY), ReplicaReport(S.STOPPED)


def told(own: dict[str, Replica], reported: dict[str, ReplicaReport], *strays: str) -> dict[str, Goal]:
    return {line.replica: line.goal for line in desired_state(own, reported, strays)}


def test_run_and_stop() -> None:
    running = replica(0, S.READY)
    assert told({"a": running, "b": asked_to_stop(running, "", AT)}, {}) == {"a": Goal.RUN, "b": Goal.STOP}


def test_a_line_carries_what_the_adapter_needs() -> None:
    template = ReplicaTemplate("w", parameters={"queue": "q"}, gpu_count=1, drain_timeout=9.0)
    [line] = desired_state({"a": replica(0, S.READY, template=template, lease=lease(4))}, {}, ())
    assert line == DesiredReplica(
        "a", Goal.RUN, "w", {"queue": "q"}, ("GPU-4",), 4, 9.0, 1, "reservations/v4", "token of v4"
    )
    assert "token of v4" not in repr(line)


def test_one_that_lost_its_gpus_may_not_take_its_time() -> None:
    patient = replica(0, S.READY, template=ReplicaTemplate("w", drain_timeout=None))
    [line] = desired_state({"a": asked_to_stop(patient, "", AT, hurry=True)}, {}, ())
    assert (line.goal, line.drain_timeout) == (Goal.STOP, HURRIED_DRAIN)


def test_what_ended_and_was_noted_is_forgotten() -> None:
    assert told({}, {"a": GONE}) == {"a": Goal.FORGET}
    assert told({"a": replica(0, S.READY)}, {"a": GONE}) == {"a": Goal.RUN}, "not noted yet"


def test_strangers_are_stopped_only_once_they_are_strays() -> None:
    assert told({}, {"a": ALIVE}) == {}
    assert told({}, {"a": ALIVE}, "a") == {"a": Goal.STOP}


def test_since_when_strangers_are_known_as_such() -> None:
    reported = {"a": ALIVE, "b": ALIVE, "c": GONE}
    assert unknown_to({"b"}, reported, {}, NOW) == {"a": NOW}
    assert unknown_to({"b"}, reported, {"a": 5.0, "gone": 1.0}, NOW) == {"a": 5.0}
    assert unknown_to({"a", "b"}, reported, {"a": 5.0}, NOW) == {}


def test_the_order_of_lines_does_not_matter() -> None:
    one = replica(0, S.READY)
    other = replace(one, id="x")
    assert desired_state({"a": one, "b": other}, {}, ()) == desired_state({"b": other, "a": one}, {}, ())

"""Endpoints that share GPUs in a backtest, and workloads from an endpoint's own history."""

from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest

from gpuscale.autoscaler.backtest.history import LONGEST_GAP, SPACING, NoWorkloadError, Reading, workload
from gpuscale.autoscaler.backtest.simulate import Part, StoppedError, run, run_shared
from gpuscale.autoscaler.backtest.world import Pool, Setting, World
from gpuscale.autoscaler.domain.rules.rule import Rule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.spec import EndpointSpec, QueueCount, QueueSignal, ReplicaTemplate, Signal
from gpuscale.client.traces import Request

BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
WORK = [Request(0.0, 60.0), Request(0.0, 60.0), Request(300.0, 1.0)]


def part(requests: list[Request] = WORK, *, low: int = 0) -> Part:
    rule = Rule("r", "q", TargetRule(1.0, tolerance_up=0.0, tolerance_down=0.0), cooldown=0.0)
    signal = Signal("q", QueueSignal("queue", QueueCount.TOTAL))
    spec = EndpointSpec(low, 8, ReplicaTemplate("worker", gpu_count=1), (signal,), (rule,), 5.0)
    return Part(spec, requests, Setting(1, lambda _number: 10.0))


def test_alone_it_is_the_same_as_a_run_of_its_own() -> None:
    one = part()
    [shared] = run_shared([one], goal=5.0, begin=BEGIN, most=None)
    alone = run(one.spec, one.requests, one.setting, goal=5.0, begin=BEGIN)
    assert shared.gpu_hours == pytest.approx(alone.gpu_hours, abs=5.0 / 3600), "it ends within a tick"
    assert replace(shared, gpu_hours=0.0, timeline=()) == replace(alone, gpu_hours=0.0, timeline=())


def test_what_one_gives_back_is_the_others_at_that_moment() -> None:
    """Two GPUs for four pieces of work of a minute each: the second endpoint waits until the first lets go."""
    first, second = run_shared([part(), part()], goal=5.0, begin=BEGIN, most=2)
    alone, _ = run_shared([part(), part()], goal=5.0, begin=BEGIN, most=4)
    assert first == alone, "who comes first is not held up"
    assert first.pending_replica_hours == 0.0 < second.pending_replica_hours
    assert second.wait_p99 > first.wait_p99 + 60.0
    assert second.unserved == 0


def test_a_gpu_that_is_given_back_is_taken_at_once() -> None:
    """Not only when the other is evaluated next."""
    pool, setting = Pool(1), Setting(1, lambda _number: 10.0)
    first, second = World(setting, 1, pool), World(setting, 0, pool)
    second.scale(1)
    assert second.granted == 0
    first.scale(0)
    assert second.granted == 1


def test_never_more_gpus_are_held_than_there_are() -> None:
    reports = run_shared([part(low=1), part(low=1), part()], goal=5.0, begin=BEGIN, most=2)
    hours = sum(one.gpu_hours for one in reports)
    longest = max(moment.at for one in reports for moment in one.timeline) + 5.0
    assert hours <= 2 * longest / 3600
    assert [one.unserved for one in reports[:2]] == [0, 0]


def test_it_ends_when_it_is_told_to() -> None:
    with pytest.raises(StoppedError):
        run_shared([part()], goal=5.0, begin=BEGIN, most=None, stopped=lambda: True)


def test_measured_arrivals_become_requests_whose_time_is_learnt() -> None:
    """Two a second for a minute, and six in hand at any time: three seconds each (Little's law)."""
    readings = [Reading(SPACING * n, 0, 6, 2.0, 2.0) for n in range(3)]
    found = workload(readings)
    assert len(found) == 6 + 120
    assert {one.service for one in found} == {3.0}
    assert [one.arrival for one in found] == sorted(one.arrival for one in found)


def test_fractions_of_requests_are_owed_to_the_next_step() -> None:
    """One and a half in each half minute are six in two minutes."""
    found = workload([Reading(SPACING * n, 0, 0, 0.05, 0.05) for n in range(5)], service=1.0)
    assert len(found) == 6


def test_arrivals_without_rates_are_what_left_and_what_grew() -> None:
    """Four in hand that take two seconds each: two leave a second, and ten more are there after half a minute."""
    found = workload([Reading(0, 0, 4), Reading(30, 10, 4)], service=2.0)
    assert len(found) == 4 + 60 + 10


@pytest.mark.parametrize(
    ("readings", "service"),
    [
        ([], None),
        ([Reading(0, 1, 1)], 1.0),
        ([Reading(0, 1, 1), Reading(30, 1, 1)], None),
        ([Reading(0, 0, 0), Reading(30, 0, 0)], 1.0),
    ],
)
def test_no_workload_is_made_up(readings: list[Reading], service: float | None) -> None:
    with pytest.raises(NoWorkloadError):
        workload(readings, service)


def test_a_time_without_readings_is_left_out() -> None:
    """As after a restart: nobody knows what came, so it is neither nothing nor as much as before."""
    before = [Reading(SPACING * n, 0, 2, 1.0, 1.0) for n in range(3)]
    after = [Reading(LONGEST_GAP * 3 + SPACING * n, 0, 2, 1.0, 1.0) for n in range(3)]
    found = workload([*before, *after])
    assert len(found) == 2 + 60 + 60
    gaps = [other.arrival - one.arrival for one, other in pairwise(found[2:])]
    assert max(gaps) == pytest.approx(1.0), "time goes on where it stopped"

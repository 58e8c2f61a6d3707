"""The simulated endpoint, the figures taken of it, and the reading of traces."""

from dataclasses import replace
from datetime import UTC, datetime
from io import StringIO
from itertools import pairwise
from typing import Any

import pytest

from gpuscale.autoscaler.backtest import simulate
from gpuscale.autoscaler.backtest.world import (
    LONGEST_GAP,
    SPACING,
    NoWorkloadError,
    RecordedReading,
    Setting,
    SimulatedPool,
    World,
    workload,
)
from gpuscale.autoscaler.domain.presets import PRESETS, Wish
from gpuscale.autoscaler.domain.rules.rule import Comparator, Rule, StepRule
from gpuscale.autoscaler.domain.rules.targets import TargetRule
from gpuscale.autoscaler.domain.spec import (
    EndpointSpec,
    HostSignal,
    QueueCount,
    QueueSignal,
    ReplicaTemplate,
    Signal,
)
from gpuscale.client.traces import Request, ServiceModel, read_trace
from gpuscale.common.errors import InvalidArgumentError

TEMPLATE = ReplicaTemplate("worker", gpu_count=1)


def setting(
    slots: int = 1, cold: float = 30.0, *, max_gpus: int | None = None, kills: bool = False
) -> Setting:
    return Setting(slots, lambda _number: cold, max_gpus, kills=kills)


def test_requests_wait_for_a_slot_and_are_served_in_order() -> None:
    world = World(setting(), 1)
    for second in range(3):
        world.arrive(Request(float(second), 10.0))
    world.advance(100.0)
    assert world.tally.waits == [0.0, 9.0, 18.0]
    assert world.tally.backlog_seconds == 9.0 + 18.0
    assert world.settled


def test_a_replica_takes_work_once_it_is_ready() -> None:
    world = World(setting(cold=30.0), 0)
    world.arrive(Request(0.0, 5.0))
    world.scale(1)
    world.advance(29.9)
    assert (world.ready, world.waiting) == (0, 1)
    world.advance(30.0)
    assert (world.ready, world.waiting, world.tally.waits) == (1, 0, [30.0])


def test_a_replica_that_is_told_to_go_finishes_what_it_has() -> None:
    """Its GPU is held, and paid for, until then."""
    world = World(setting(), 2)
    world.arrive(Request(0.0, 10.0))
    world.arrive(Request(0.0, 20.0))
    world.scale(0)
    assert (world.granted, world.in_hand) == (0, 2)
    world.advance(60.0)
    assert world.tally.killed == 0
    assert world.tally.gpu_seconds == 10.0 + 20.0


def test_a_world_that_kills_serves_what_was_dropped_anew() -> None:
    world = World(setting(kills=True), 2)
    world.arrive(Request(0.0, 10.0))
    world.arrive(Request(0.0, 10.0))
    world.advance(9.0)
    world.scale(1)
    assert (world.tally.killed, world.waiting) == (1, 1)
    world.advance(20.0)
    assert world.settled
    assert world.tally.waits == [0.0, 0.0], "a wait is counted once"


def test_victims_are_those_on_their_way_up_then_the_least_busy() -> None:
    world = World(setting(slots=2), 2)
    world.arrive(Request(0.0, 100.0))
    world.scale(3)
    world.scale(2)
    assert world.ready == 2, "the one that was still starting went"
    world.scale(1)
    assert world.in_hand == 1, "the idle one went"


def test_no_more_gpus_are_granted_than_there_are_and_the_rest_waits_for_a_release() -> None:
    world = World(setting(max_gpus=2), 2)
    world.arrive(Request(0.0, 50.0))
    world.scale(4)
    world.advance(10.0)
    assert (world.granted, world.tally.pending_seconds) == (2, 20.0)


def fixed(count: int) -> EndpointSpec:
    return EndpointSpec(count, count, TEMPLATE, tick=10.0)


def test_figures_of_a_run() -> None:
    requests = [Request(0.0, 3600.0), Request(0.0, 1800.0), Request(0.0, 10.0)]
    report = simulate.run(fixed(2), requests, setting(), goal=5.0)
    assert report.violation_percent == pytest.approx(100 / 3)
    assert (report.request_count, report.unserved_count) == (3, 0)
    assert (report.flap_count, report.change_count) == (0, 0)
    assert (report.wait_p50_seconds, report.wait_p99_seconds) == (0.0, 1800.0)
    assert report.gpu_hours == pytest.approx(2.0, abs=0.02)
    assert simulate.oracle_gpu_hours(requests, 1) == pytest.approx(5410 / 3600)


def test_what_is_never_served_is_late() -> None:
    report = simulate.run(EndpointSpec(0, 0, TEMPLATE, tick=60.0), [Request(0.0, 1.0)], setting(), goal=5.0)
    assert (report.unserved_count, report.violation_percent) == (1, 100.0)


def test_a_flap_is_a_turn_within_ten_minutes() -> None:
    world = World(setting(), 1)
    for moment, count in [(10.0, 2), (20.0, 1), (630.0, 2), (700.0, 3), (710.0, 2)]:
        world.advance(moment)
        world.scale(count)
    assert simulate.measure(world, 1, 5.0, 1000.0).flap_count == 2, "the turn after 610 s is none"


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_every_preset_runs_and_the_same_again_gives_the_same(preset: str) -> None:
    wish = Wish("queue", 1, 8, TEMPLATE, slots=2, goal=10.0, service_time=4.0)
    requests = [Request(3.0 * n, 4.0) for n in range(100)] + [
        Request(300.0 + 0.2 * n, 4.0) for n in range(600)
    ]
    first, second = (
        simulate.run(PRESETS[preset](wish), requests, setting(slots=2), goal=10.0) for _ in range(2)
    )
    assert first == second
    assert first.most_replicas <= 8
    assert (first.change_count > 0) == (preset != "opengris_no")


def test_samplers_that_no_gpu_is_free_for_are_not_wanted() -> None:
    """So that none is to be taken back one check at a time when the queue is empty."""
    wish = Wish("queue", 1, 1000, TEMPLATE)
    spec, world = PRESETS["distributedfunsearch"](wish), setting(slots=1, cold=60.0, max_gpus=2)
    report = simulate.run(spec, [Request(0.0, 12.0)] * 500, world, goal=10.0)
    assert (report.most_replicas, report.pending_replica_hours, report.unserved_count) == (2, 0.0, 0)


def test_the_default_is_late_less_often_than_steps_and_costs_less_than_a_full_house() -> None:
    wish = Wish("queue", 1, 8, TEMPLATE, slots=2, goal=10.0, service_time=4.0)
    requests = [Request(float(n), 4.0) for n in range(600)] + [
        Request(600.0 + 0.4 * n, 4.0) for n in range(1500)
    ]
    policies = [PRESETS[name](wish) for name in ("gpuscale", "backend_ai")]
    ours, steps = (simulate.run(one, requests, setting(2), goal=10.0) for one in policies)
    full = simulate.run(fixed(8), requests, setting(2), goal=10.0)
    assert ours.violation_percent < steps.violation_percent / 2
    assert ours.gpu_hours < full.gpu_hours


def test_both_forms_of_a_trace_are_read() -> None:
    plain = read_trace(StringIO("arrival_seconds,service_seconds\n2,3\n1,4\n"), ServiceModel())
    assert plain == [Request(1.0, 4.0), Request(2.0, 3.0)]
    tokens = read_trace(
        StringIO("t_s,context_tokens,generated_tokens\n0,1000,10\n"), ServiceModel(1.0, 0.001, 0.1)
    )
    assert tokens == [Request(0.0, 3.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "columns"),
        ("", "columns"),
        ("arrival_seconds,service_seconds\n", "no request"),
        ("arrival_seconds,service_seconds\n1,2\nx,2\n", "line 3"),
        ("arrival_seconds,service_seconds\n1\n", "line 2"),
        ("arrival_seconds,service_seconds\n-1,2\n", "line 2"),
        ("arrival_seconds,service_seconds\n1,nan\n", "line 2"),
    ],
)
def test_a_trace_that_is_none_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        read_trace(StringIO(text), ServiceModel())


@pytest.mark.parametrize("count", [1, simulate.MOST_MOMENTS, simulate.MOST_MOMENTS + 1, 5000])
def test_a_timeline_is_thinned_out_and_keeps_the_longest_queue(count: int) -> None:
    timeline = simulate.Timeline()
    for at in range(count):
        timeline.add(float(at), at, at, waiting=7 if at == count - 1 else 0)
    moments = timeline.seconds
    assert min(count, simulate.MOST_MOMENTS / 2) <= len(moments) <= simulate.MOST_MOMENTS
    assert len(moments) == len(timeline.wanted) == len(timeline.ready) == len(timeline.waiting)
    assert max(timeline.waiting) == 7
    assert len({later - earlier for earlier, later in pairwise(moments)}) <= 1


def test_rates_and_idle_hosts_are_known_to_a_backtest() -> None:
    """What waits, what comes and how busy hosts are: all that presets go by."""
    rate = Signal("rate", QueueSignal("queue", QueueCount.RATE_IN))
    host = Signal("host", HostSignal("cpu_percent"))
    up = Rule("up", "rate", TargetRule(0.5), priority=1)
    free = Rule("free", "host", StepRule(Comparator.GREATER_THAN, 0.0, 5))
    spec = EndpointSpec(1, 8, TEMPLATE, (rate, host), (up, free), 10.0)
    report = simulate.run(spec, [Request(float(n), 1.0) for n in range(200)], setting(slots=4), goal=5.0)
    assert report.most_replicas == 2
    assert report.timeline.wanted[-1] >= 1


BEGIN = datetime(2024, 1, 1, tzinfo=UTC)
WORK = [Request(0.0, 60.0), Request(0.0, 60.0), Request(300.0, 1.0)]


def part() -> simulate.Part:
    rule = Rule("r", "q", TargetRule(1.0, tolerance_up=0.0, tolerance_down=0.0), cooldown=0.0)
    signal = Signal("q", QueueSignal("queue", QueueCount.TOTAL))
    spec = EndpointSpec(0, 8, TEMPLATE, (signal,), (rule,), 5.0)
    return simulate.Part(spec, WORK, Setting(1, lambda _number: 10.0))


def test_alone_it_is_the_same_as_a_run_of_its_own() -> None:
    one = part()
    [shared] = simulate.run_shared([one], goal=5.0, begin=BEGIN, most=None)
    alone = simulate.run(one.spec, one.requests, one.setting, goal=5.0, begin=BEGIN)
    assert shared.gpu_hours == pytest.approx(alone.gpu_hours, abs=5.0 / 3600), "it ends within a tick"
    unlike: Any = {"gpu_hours": 0.0, "timeline": simulate.Timeline(), "windows": ()}
    assert replace(shared, **unlike) == replace(alone, **unlike)


def test_what_one_gives_back_is_the_others_at_that_moment() -> None:
    """Two GPUs for four pieces of work of a minute each: the second endpoint waits until the first lets go."""
    first, second = simulate.run_shared([part(), part()], goal=5.0, begin=BEGIN, most=2)
    alone, _ = simulate.run_shared([part(), part()], goal=5.0, begin=BEGIN, most=4)
    assert first == alone, "who comes first is not held up"
    assert first.pending_replica_hours == 0.0 < second.pending_replica_hours
    assert second.wait_p99_seconds > first.wait_p99_seconds + 60.0
    assert second.unserved_count == 0


def test_a_gpu_that_is_given_back_is_taken_at_once() -> None:
    """Not only when the other is evaluated next."""
    pool, setting = SimulatedPool(1), Setting(1, lambda _number: 10.0)
    first, second = World(setting, 1, pool), World(setting, 0, pool)
    second.scale(1)
    assert second.granted == 0
    first.scale(0)
    assert second.granted == 1


def test_it_ends_when_it_is_told_to() -> None:
    with pytest.raises(simulate.StoppedError):
        simulate.run_shared([part()], goal=5.0, begin=BEGIN, most=None, stopped=lambda: True)


def test_measured_arrivals_become_requests_whose_time_is_learnt() -> None:
    """Two a second for a minute, and six in hand at any time: three seconds each (Little's law)."""
    found = workload([RecordedReading(SPACING * n, 0, 6, 2.0, 2.0) for n in range(3)])
    assert len(found) == 6 + 120
    assert {one.service for one in found} == {3.0}
    assert [one.arrival for one in found] == sorted(one.arrival for one in found)


def test_fractions_of_requests_are_owed_to_the_next_step() -> None:
    """One and a half in each half minute are six in two minutes."""
    found = workload([RecordedReading(SPACING * n, 0, 0, 0.05, 0.05) for n in range(5)], service=1.0)
    assert len(found) == 6


def test_arrivals_without_rates_are_what_left_and_what_grew() -> None:
    """Four in hand that take two seconds each: two leave a second, and ten more are there after half a minute."""
    found = workload([RecordedReading(0, 0, 4), RecordedReading(30, 10, 4)], service=2.0)
    assert len(found) == 4 + 60 + 10


@pytest.mark.parametrize(
    ("readings", "service"),
    [
        ([], None),
        ([RecordedReading(0, 1, 1)], 1.0),
        ([RecordedReading(0, 1, 1), RecordedReading(30, 1, 1)], None),
        ([RecordedReading(0, 0, 0), RecordedReading(30, 0, 0)], 1.0),
    ],
)
def test_no_workload_is_made_up(readings: list[RecordedReading], service: float | None) -> None:
    with pytest.raises(NoWorkloadError):
        workload(readings, service)


def test_a_time_without_readings_is_left_out() -> None:
    """As after a restart: nobody knows what came, so it is neither nothing nor as much as before."""
    before = [RecordedReading(SPACING * n, 0, 2, 1.0, 1.0) for n in range(3)]
    after = [RecordedReading(LONGEST_GAP * 3 + SPACING * n, 0, 2, 1.0, 1.0) for n in range(3)]
    found = workload([*before, *after])
    assert len(found) == 2 + 60 + 60
    gaps = [other.arrival - one.arrival for one, other in pairwise(found[2:])]
    assert max(gaps) == pytest.approx(1.0), "time goes on where it stopped"


@pytest.mark.parametrize("kills", [False, True])
def test_windows_add_up_and_each_has_what_came_in_it(kills: bool) -> None:
    """Ten windows of 100 s; all of the fourth's requests are late, and a tenth of the last's is never served."""
    busy = [Request(300.0 + 0.1 * number, 5.0) for number in range(400)]
    requests = sorted(
        [*(Request(float(at), 1.0) for at in range(0, 1001, 10)), *busy], key=lambda one: one.arrival
    )
    spec = PRESETS["hpa"](Wish("queue", 1, 4, TEMPLATE, slots=4))
    report = simulate.run(spec, requests, setting(4, 30.0, kills=kills), goal=20.0)
    assert [one.request_count for one in report.windows] == [10, 10, 10, 410, 10, 10, 10, 10, 10, 11]
    assert sum(one.late_count for one in report.windows) == round(
        report.violation_percent * len(requests) / 100
    )
    assert [one.late_count for one in report.windows[:3]] == [0, 0, 0]
    assert report.windows[3].late_count > 300
    assert sum(one.gpu_hours for one in report.windows) == pytest.approx(report.gpu_hours)
    ticks = [105.0, 105.0, 90.0]  # seconds of a replica, up to the evaluations after 100, 200 and 300 s
    assert [3600 * one.gpu_hours for one in report.windows[:3]] == pytest.approx(ticks)


def test_what_is_never_served_is_late_in_its_window() -> None:
    requests = [Request(0.0, 1e9), *(Request(float(at), 1.0) for at in range(1, 101))]
    report = simulate.run(EndpointSpec(1, 1, TEMPLATE), requests, setting(), goal=5.0)
    assert [one.late_count for one in report.windows] == [9, *[10] * 8, 11]

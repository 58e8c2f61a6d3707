"""What the dashboard makes of the services' messages, and what idle reservations cost: a time that nobody counted costs nothing."""

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.states import marks
from gpuscale.dashboard import rows
from gpuscale.dashboard.facts import PERIOD, Count, Facts, FleetTally, GpuSummary, count

ONLINE, STALE = monitor_api.NodeState.NODE_STATE_ONLINE, monitor_api.NodeState.NODE_STATE_STALE
ACTIVE = allocator_api.Reservation.STATE_ACTIVE


def node(
    name: str, *gpus: types_api.Gpu, state: "monitor_api.NodeState.ValueType" = ONLINE
) -> monitor_api.Node:
    return monitor_api.Node(name=f"nodes/{name}", state=state, snapshot=types_api.Snapshot(gpus=gpus))


def gpu(uuid: str, index: int = 0, **reading: float) -> types_api.Gpu:
    read = types_api.GpuReading(**reading)
    return types_api.Gpu(
        uuid=uuid, index=index, model="H100", state=types_api.GpuState.GPU_STATE_OK, reading=read
    )


def held(uuid: str, holder: str, milli: int = 0, use: str = "UNKNOWN") -> allocator_api.Reservation:
    reserved = allocator_api.ReservedGpu(uuid=uuid, node="nodes/a", milli=milli)
    used = allocator_api.GpuUsage(uuid=uuid, state=allocator_api.GpuUsage.State.Value(f"STATE_{use}"))
    usage = allocator_api.ReservationUsage(gpus=[used])
    return allocator_api.Reservation(
        name="reservations/r", holder=holder, state=ACTIVE, gpus=[reserved], usage=usage
    )


def facts(*nodes: monitor_api.Node, reservations: tuple[allocator_api.Reservation, ...] = ()) -> Facts:
    return Facts(nodes={one.name: one for one in nodes}, reservations=reservations)


def test_gpus_come_by_node_and_index() -> None:
    known = facts(node("b", gpu("B0")), node("a", gpu("A1", 1), gpu("A0", 0)))
    assert [one.label for one in known.gpus()] == ["a/0", "a/1", "b/0"]


def test_shares_of_a_gpu_add_up_and_a_whole_one_is_a_thousand() -> None:
    known = facts(
        node("a", gpu("A"), gpu("B", 1)),
        reservations=(held("A", "x", 500), held("A", "y", 250), held("B", "z")),
    )
    assert [(one.holders, one.held_milli) for one in known.gpus()] == [(("x", "y"), 750), (("z",), 1000)]


def test_a_gpu_of_a_node_that_is_not_heard_of_shows_that() -> None:
    [one] = facts(node("a", gpu("A"), state=STALE)).gpus()
    assert one.state == "STALE"


def test_cordons_quarantines_and_trouble_are_shown_on_gpus_and_nodes() -> None:
    one = node("a", gpu("A"), gpu("B", 1), gpu("C", 2))
    for each in one.snapshot.gpus:
        each.name = f"nodes/a/gpus/{each.uuid.lower()}"
    one.snapshot.gpus[1].quarantine = "XID 79, since noon"
    one.snapshot.gpus[2].state = types_api.GpuState.GPU_STATE_LOST
    known = facts(one)
    known.cordons = [allocator_api.Cordon(name="nodes/a/gpus/a")]
    assert [gpu.state for gpu in known.gpus()] == ["OK,CORDONED", "QUARANTINED: XID 79, since noon", "LOST"]
    draining = allocator_api.Cordon(name="nodes/a")
    draining.drain_deadline.GetCurrentTime()
    shown = rows.node_row(one, marks([draining]))
    assert (shown["state"], shown["problem"]) == ("degraded,draining", "GPU 1: QUARANTINED; GPU 2: LOST")
    one.snapshot.gpu_problem = "NVML: Driver Not Loaded"
    assert rows.node_row(one, {})["problem"] == "NVML: Driver Not Loaded"


def test_what_was_not_read_is_unknown_and_not_zero() -> None:
    known = facts(node("a", gpu("A"), gpu("B", 1, utilization_percent=40)))
    first, second = known.gpus()
    assert (first.utilization, first.memory_percent, first.power) == (None, None, None)
    assert rows.GPUS.row(first)["util"] == "-"
    assert rows.GPUS.row(second)["util"] == "40 %"
    assert rows.fleet_figures(list(known.nodes.values()), known.gpus())["mean_utilization"] == "40 %"


def test_reserved_gpus_are_idle_where_the_allocator_says_so_whatever_their_utilization() -> None:
    read = [gpu(uuid, nth, utilization_percent=0) for nth, uuid in enumerate("ABC")]
    known = facts(
        node("a", *read),
        reservations=(
            held("A", "x", 500, "IDLE"),
            held("A", "y", 250, "BUSY"),
            held("B", "x"),
            held("C", "x", use="IDLE"),
        ),
    )
    shown = rows.reservation_figures(known.reservations, known.gpus())
    assert (shown["GPUs_reserved"], shown["GPUs_reserved_and_idle"]) == ("2.75", "1.5")


def test_only_news_makes_a_new_version() -> None:
    known = Facts()
    known.heard("nodes")
    assert known.version == 0
    known.lost("nodes", "nothing answers")
    known.lost("nodes", "nothing answers")
    assert (known.version, known.problems) == (1, {"nodes": "nothing answers"})
    known.heard("nodes")
    assert (known.version, known.problems) == (2, {})


def test_the_filter_needs_every_word() -> None:
    [one] = facts(node("a", gpu("A")), reservations=(held("A", "team/job"),)).gpus()
    assert rows.matches(rows.GPUS.row(one), "h100 JOB")
    assert not rows.matches(rows.GPUS.row(one), "h100 other")


def counted_gpu(held_milli: int, utilization: float | None) -> GpuSummary:
    reading = types_api.GpuReading(utilization_percent=utilization)
    return GpuSummary(
        *("n/0", "n", "GPU-0", 0, "H100", "OK"), simulated=False, reading=reading, held_milli=held_milli
    )


def test_a_share_counts_as_what_it_is_and_what_was_not_read_is_not_used() -> None:
    gpus = [counted_gpu(1000, 50.0), counted_gpu(500, 0.0), counted_gpu(1000, None), counted_gpu(0, 100.0)]
    assert count(gpus, 7.0) == Count(at=7.0, total=4, reserved=2.5, used=0.5)


def counted(*counts: tuple[float, float, float]) -> FleetTally:
    found = FleetTally()
    for at, reserved, used in counts:
        found.add(Count(at, 8, reserved, used))
    return found


def test_counts_of_a_step_of_the_asked_time_are_shown_as_their_mean() -> None:
    shown = counted((0, 2, 0), (10, 4, 2), (20, 6, 6), (120, 1, 1)).since(0, 100, 20)
    assert [(one.at, one.reserved, one.used) for one in shown] == [(0, 3, 1), (20, 6, 6)]


def test_unused_hours_are_reserved_minus_used_over_time() -> None:
    assert counted((0, 4, 1), (10, 4, 4), (20, 0, 0)).wasted_hours(0, 100) == pytest.approx(30 / 3600)


def test_a_time_that_was_not_counted_is_not_charged() -> None:
    assert counted((0, 1, 0), (3600, 1, 0)).wasted_hours(0, 9999) == pytest.approx(PERIOD / 3600)


def test_a_clock_that_was_put_back_leaves_no_line_that_runs_backwards() -> None:
    shown = counted((100, 1, 0), (50, 2, 0), (110, 3, 0)).since(0, 1000, 1)
    assert [one.at for one in shown] == [100, 110]

"""What the dashboard makes of the services' messages."""

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.client.states import marks
from gpuscale.dashboard import rows
from gpuscale.dashboard.facts import Facts

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
    shares = held("A", "x", 500), held("A", "y", 250), held("B", "z")
    known = facts(node("a", gpu("A"), gpu("B", 1)), reservations=shares)
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
    assert rows.NODES.row((one, marks(known.cordons)))["state"] == "degraded"
    draining = allocator_api.Cordon(name="nodes/a")
    draining.drain_deadline.GetCurrentTime()
    shown = rows.NODES.row((one, marks([draining])))
    assert (shown["state"], shown["problem"]) == ("degraded,draining", "GPU 1: QUARANTINED; GPU 2: LOST")
    one.snapshot.gpu_problem = "NVML: Driver Not Loaded"
    assert rows.NODES.row((one, {}))["problem"] == "NVML: Driver Not Loaded"


def test_what_was_not_read_is_unknown_and_not_zero() -> None:
    known = facts(node("a", gpu("A"), gpu("B", 1, utilization_percent=40)))
    first, second = known.gpus()
    assert (first.utilization, first.memory_percent, first.power) == (None, None, None)
    assert rows.GPUS.row(first)["util"] == "-"
    assert rows.GPUS.row(second)["util"] == "40 %"
    assert rows.fleet_figures(list(known.nodes.values()), known.gpus())["mean_utilization"] == "40 %"


def test_reserved_gpus_are_idle_where_the_allocator_says_so_whatever_their_utilization() -> None:
    read = [gpu(uuid, nth, utilization_percent=0) for nth, uuid in enumerate("ABC")]
    own = held("A", "x", 500, "IDLE"), held("A", "y", 250, "BUSY"), held("B", "x"), held("C", "x", use="IDLE")
    known = facts(node("a", *read), reservations=own)
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

"""Tables are sorted by what their cells mean."""

from datetime import UTC, datetime, timedelta

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import short_holder
from gpuscale.dashboard import humanize, rows
from gpuscale.dashboard.facts import Facts, GpuSummary


def sorted_cells(*cells: str, descending: bool = False) -> list[str]:
    found = rows.ordered([{"cell": cell} for cell in cells], "cell", descending=descending)
    return [str(row["cell"]) for row in found]


def test_numbers_are_sorted_by_value_and_before_words() -> None:
    assert sorted_cells("10 %", "vm/0", "9 %") == ["9 %", "10 %", "vm/0"]


def test_sizes_and_times_are_sorted_by_how_much_they_are() -> None:
    sizes = ["0 B / 80.0 GiB", "912.0 MiB / 80.0 GiB", "1.0 GiB / 80.0 GiB"]
    assert sorted_cells(*reversed(sizes)) == sizes
    assert sorted_cells("2 min 1 s", "59 s", "1 h 0 min") == ["59 s", "2 min 1 s", "1 h 0 min"]


def test_what_is_unknown_comes_last_whichever_way() -> None:
    assert sorted_cells("-", "2", "1") == ["1", "2", "-"]
    assert sorted_cells("-", "2", "1", descending=True) == ["2", "1", "-"]


def test_a_part_is_told_in_the_unit_of_the_whole_and_watts_of_a_fleet_in_kilowatts() -> None:
    assert humanize.part(27.25 * 2**40, 78.125 * 2**40) == "27.2 / 78.1 TiB"
    assert humanize.part(None, 2**30) == "- / 1.0 GiB"
    assert (humanize.power(537), humanize.power(309_527), humanize.power(None)) == ("537 W", "309.5 kW", "-")


def test_a_capability_set_has_its_own_bounds_or_those_of_its_endpoint() -> None:
    sets = [
        autoscaler_api.CapabilitySet(id="cpu", min_replicas=1, max_replicas=3),
        autoscaler_api.CapabilitySet(id="gpu", capabilities={"gpu": 2, "high_memory": -1}),
    ]
    ids = ("cpu", "gpu", "gone")
    endpoint = autoscaler_api.Endpoint(
        spec=autoscaler_api.EndpointSpec(max_replicas=9, capability_sets=sets),
        status={"capability_sets": [{"id": each, "desired_replicas": 2, "ready_workers": 4} for each in ids]},
    )
    shown = rows.capability_set_rows(endpoint)
    assert [(row["set"], row["capabilities"], row["bounds"]) for row in shown] == [
        ("cpu", "anything plain", "1 to 3"),
        ("gpu", "gpu=2,high_memory", "0 to 9"),
        ("gone", "-", "-"),
    ]
    assert [(row["desired"], row["ready"], row["workers"]) for row in shown] == [(2, 0, 4)] * 3
    assert all(row.keys() == rows.CAPABILITY_SETS.columns.keys() for row in shown)


@pytest.mark.parametrize(("passed", "shown"), [(10, "50 s"), (60, "up to 1 min"), (600, "up to 1 min")])
def test_time_left_counts_down_and_a_lease_that_should_have_ended_was_renewed(
    passed: int, shown: str
) -> None:
    now = datetime.now(UTC)
    held = allocator_api.Reservation(ttl={"seconds": 60}, remaining={"seconds": 60})
    assert rows.time_left(allocator_api.Reservation(), now) == "-"
    held.expire_time.FromDatetime(now + timedelta(seconds=60))
    assert rows.time_left(held, now + timedelta(seconds=passed)) == shown


def test_who_has_to_leave_is_told_so_why_and_until_when() -> None:
    now = datetime.now(UTC)
    held = allocator_api.Reservation(state=allocator_api.Reservation.STATE_ACTIVE, remaining={"seconds": 600})
    held.end_reason = "preempted for a request of ann with priority 5"
    held.notes.append("idle for 2 h")
    held.job.title = "night"
    held.expire_time.FromDatetime(now + timedelta(seconds=600))
    held.revoke_time.FromDatetime(now + timedelta(seconds=30))
    row = rows.reservation_row(held, {}, now)
    assert (row["state"], row["left"], row["title"]) == ("active,leaving", "30 s", "night")
    assert row["notes"] == "preempted for a request of ann with priority 5; idle for 2 h"
    assert rows.time_left(held, now + timedelta(seconds=31)) == "0 s"


def test_what_has_ended_is_not_used_by_who_has_its_gpus_now() -> None:
    gpus = {"u": GpuSummary("a", "u", 0, "H100", "ok", utilization=4.0)}
    held = allocator_api.Reservation(state=allocator_api.Reservation.STATE_ACTIVE, gpus=[{"uuid": "u"}])
    assert rows.reservation_row(held, gpus, datetime.now(UTC))["used"] == "4 % busy, - memory"
    held.state = allocator_api.Reservation.STATE_RELEASED
    assert rows.reservation_row(held, gpus, datetime.now(UTC))["used"] == "-"


def test_what_waits_is_counted_and_stands_first_in_the_order_of_the_queue() -> None:
    states, jobs = allocator_api.Reservation.State, allocator_api.Job
    found = [
        allocator_api.Reservation(name="held", state=states.STATE_ACTIVE),
        allocator_api.Reservation(name="second", state=states.STATE_WAITING, job=jobs(queue_position=1)),
        allocator_api.Reservation(name="first", state=states.STATE_WAITING, job=jobs(queue_position=0)),
    ]
    assert [one.name for one in sorted(found, key=rows.waits_longest)] == ["first", "second", "held"]
    for state, gpus in ((states.STATE_WAITING, "0 of 3"), (states.STATE_CANCELLED, "-")):
        assert (
            rows.RESERVATIONS.row(allocator_api.Reservation(asked_gpu_count=3, state=state))["gpus"] == gpus
        )
    figures = rows.reservation_figures(found, [])
    assert (figures["holding"], figures["waiting"]) == ("1", "2")


def test_a_replica_that_holds_a_gpu_has_the_name_that_commands_take() -> None:
    assert short_holder("endpoints/jobs/replicas/r1") == "jobs/r1"
    assert short_holder("lab/ana") == "lab/ana"


def test_a_gpu_of_an_event_or_replica_is_told_by_its_place_while_that_is_known() -> None:
    node = monitor_api.Node(name="nodes/a", snapshot={"gpus": [{"uuid": "GPU-1", "index": 3}]})
    told = [monitor_api.HealthEvent(name=uuid, node="nodes/a", uuid=uuid) for uuid in ("", "GPU-1", "GPU-2")]
    shown = rows.health_rows(Facts(nodes={"nodes/a": node}, events=told))
    assert [row["where"] for row in shown] == ["a", "a/3", "a GPU-2"]
    one = autoscaler_api.Replica(name="endpoints/e/replicas/r", node="nodes/a", gpu_uuids=["GPU-1", "GPU-2"])
    facts = Facts(nodes={"nodes/a": node}, replicas=[one])
    assert [row["gpus"] for row in rows.replica_rows(facts, "endpoints/e")] == ["a/3, GPU-2"]


def test_gpus_side_by_side_are_a_range() -> None:
    gpus = [("boreas", 0), ("atlas", 2), ("atlas", 0), ("atlas", 1), ("atlas", 5)]
    assert rows.places(gpus) == "atlas/0-2, atlas/5, boreas/0"
    assert rows.places([]) == ""

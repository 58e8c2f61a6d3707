"""What is asked for by time and by GPU: requests that say so, and notes where less is kept."""

import json
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.common.wire import to_datetime
from tests.contract.cli import canned_gateway as canned

FIRST = canned.UUIDS[0]
LISTS = ("decisions", "reservations", "replicas", "health")
SINCE, AT = "2026-02-28T00:00:00Z", "2026-03-01T03:00:00Z"


@pytest.mark.parametrize(
    "spelled",
    [FIRST, FIRST.lower(), f"host-1/{FIRST.lower()}", "host-1/0", f"nodes/host-1/gpus/{FIRST.lower()}"],
)
@pytest.mark.parametrize("command", ["events --kind reservation", *map("get {}".format, LISTS[1:])])
def test_a_gpu_has_any_of_its_spellings(ctl: Any, world: canned.World, command: str, spelled: str) -> None:
    ran = ctl(*command.split(), "--gpu", spelled, "--since", SINCE, "--until", AT)
    assert ran.code == 0, ran.err
    request = world.requests[-1]
    assert (request.uuid if command == "get health" else request.gpu_uuid) == FIRST
    begin, end = (to_datetime(one).isoformat() for one in (request.since, request.until))
    assert (begin, end) == ("2026-02-28T00:00:00+00:00", "2026-03-01T03:00:00+00:00")
    assert request.show_resolved if command == "get health" else request.show_ended


def test_no_decision_is_about_a_gpu(ctl: Any, world: canned.World) -> None:
    found = ctl("events", "--gpu", "host-1/0", "--since", "2023-01-01", "-o", "json").out
    assert {one["kind"] for one in json.loads(found)["events"]} == {"health", "reservation", "replica"}


@pytest.mark.parametrize(
    ("spelled", "code", "said"),
    [
        ("GPU-0000", 2, f"may be any of {canned.UUIDS[0]}, {canned.UUIDS[1]}"),
        ("host-1/7", 3, "GPU host-1/7 not found"),
        ("GPU-9", 3, "GPU GPU-9 not found"),
        (FIRST.replace("a", "f"), 0, ""),
    ],
)
def test_a_gpu_that_is_not_there(ctl: Any, world: canned.World, spelled: str, code: int, said: str) -> None:
    """What is gone is asked for by its whole UUID."""
    ran = ctl("get", "reservations", "--gpu", spelled)
    assert (ran.code, said in ran.err) == (code, True)
    if not code:
        assert world.requests[-1].gpu_uuid == spelled


def test_who_held_a_gpu_is_one_table(ctl: Any, world: canned.World) -> None:
    over = canned.allocator_api.Reservation()
    over.CopyFrom(canned.RESERVATION)
    over.state, over.owner, over.end_reason = over.STATE_EXPIRED, "ann", "not renewed"
    over.end_time.CopyFrom(Timestamp(seconds=canned.LONG_AGO.seconds + 3_725))
    world.things[over.name] = over
    kept = Timestamp(seconds=1_750_000_000)
    world.overrides["ListReservations"] = lambda r, c: canned.allocator_api.ListReservationsResponse(
        reservations=[over], kept_since=kept
    )
    ran = ctl("get", "reservations", "--gpu", "host-1/0", "--since", "2023-11-14")
    heading, row = ran.out.splitlines()
    assert heading.split() == ["NAME", "HOLDER", "OWNER", "STATE", "FROM", "UNTIL", "LASTED", "GPUS", "WHY"]
    assert row.split()[:4] == ["r1", "training", "ann", "EXPIRED"]
    assert row.split()[-4:] == ["1h2m", "host-1/0", "not", "renewed"]
    assert "reservations that ended before 2025-06-15" in ran.err
    assert "may be missing: they are kept no longer" in ran.err
    assert not ctl("get", "reservations", "--since", "2025-06-16").err, "all of that time is kept"


def test_why_an_endpoint_had_its_replicas_then(ctl: Any, world: canned.World) -> None:
    ran = ctl("explain", "endpoint", "jobs", "--at", AT)
    assert ran.code == 0, ran.err
    request = world.requests[-1]
    assert to_datetime(request.until).isoformat() == "2026-03-01T03:00:00+00:00"
    assert not request.HasField("since")
    assert (request.parent, request.page_size) == ("endpoints/jobs", 1)
    assert "NO_CAPACITY" in ran.out
    assert "evaluated now" not in ran.out
    world.overrides["ListDecisions"] = lambda r, c: canned.autoscaler_api.ListDecisionsResponse()
    assert "No decision until then." in ctl("explain", "endpoint", "jobs", "--at", AT).out


@pytest.mark.parametrize("command", ["events", "history node host-1", *map("get {}".format, LISTS)])
@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--since", "noon"], "Invalid value for '--since': 'noon' is not a time"),
        (["--until", "25:00"], "Invalid value for '--until': '25:00' is not a time"),
        (["--at", "soon"], "Invalid value for '--at': 'soon' is not a time"),
        (["--at", "1h", "--since", "2h"], "--at replaces --since and --until"),
        (["--since", "1h", "--until", "2h"], "must not be before --since"),
    ],
)
def test_an_error_names_the_option(ctl: Any, command: str, typed: list[str], said: str) -> None:
    ran = ctl(*command.split(), *typed)
    assert (ran.code, said in " ".join(ran.err.split())) == (2, True), ran.err

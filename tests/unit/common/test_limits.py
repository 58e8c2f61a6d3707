"""The audit log (every line is there or counted, and no call waits), and a token bucket for each caller."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

# The contract must be known: requests are read by it.
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as _autoscaler_api  # noqa: F401
from gpuscale.common.errors import FailedPreconditionError, UnauthenticatedError
from gpuscale.common.rpc import audit
from gpuscale.common.rpc import limits as limiting
from gpuscale.common.rpc.audit import (
    FILES_KEPT,
    LONGEST_RESOURCE,
    AuditLog,
    AuditOptions,
    granted_in,
    resource_of,
)
from gpuscale.common.rpc.limits import BURST_SECONDS, RateLimits, Refusals
from tests.support.waiting import eventually_sync

RESERVE = "/gpuscale.api.allocator.v1.AllocatorService/Reserve"
GET = "/gpuscale.api.allocator.v1.AllocatorService/GetReservation"
CREATE = "/gpuscale.api.autoscaler.v1.EndpointService/CreateEndpoint"

RESERVATION = allocator_api.Reservation(
    name="reservations/r",
    gpus=[allocator_api.ReservedGpu(uuid="GPU-1"), allocator_api.ReservedGpu(uuid="GPU-2")],
)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _moved(file: Path) -> None:
    file.rename(f"{file}-20260301")


@pytest.mark.parametrize("taken", [_moved, Path.unlink])
def test_an_audit_log_that_another_program_took_away_begins_anew(
    tmp_path: Path, taken: Callable[[Path], None]
) -> None:
    """As logrotate does: records went on into what it then compressed."""
    file = tmp_path / "audit.jsonl"
    log = AuditLog(AuditOptions(file, 1 << 20))
    log.start()
    log.write({"request_id": "a"})
    eventually_sync(lambda: file.read_text().count("\n") == 1)
    taken(file)
    log.write({"request_id": "b"})
    log.close()
    assert file.read_text() == '{"request_id": "b"}\n'


def test_lines_are_json_and_the_file_is_private(tmp_path: Path) -> None:
    log = AuditLog(AuditOptions(tmp_path / "audit.jsonl", 1 << 20))
    log.start()
    log.write({"who": "zoë", "resource": 'a"\nb'})
    log.write({"who": None})
    log.close()
    assert lines(tmp_path / "audit.jsonl") == [{"who": "zoë", "resource": 'a"\nb'}, {"who": None}]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_full_file_is_moved_and_only_so_many_are_kept(tmp_path: Path) -> None:
    log = AuditLog(AuditOptions(tmp_path / "audit.jsonl", 100))
    log.start()
    for number in range(100):
        log.write({"number": number, "padding": "x" * 40})
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) <= FILES_KEPT + 1
    assert all(file.stat().st_size <= 200 for file in files)
    assert lines(tmp_path / "audit.jsonl.1")[-1]["number"] == 99


def test_an_audit_log_goes_on_where_it_ended(tmp_path: Path) -> None:
    for number in range(2):
        log = AuditLog(AuditOptions(tmp_path / "audit.jsonl", 1 << 20))
        log.start()
        log.write({"number": number})
        log.close()
    assert [line["number"] for line in lines(tmp_path / "audit.jsonl")] == [0, 1]


def test_what_does_not_fit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_WAITING", 2)
    log = AuditLog(AuditOptions(tmp_path / "audit.jsonl", 1 << 20))
    for number in range(5):
        log.write({"number": number})
    log.start()
    log.close()
    assert lines(tmp_path / "audit.jsonl") == [{"number": 0, "dropped": 3}, {"number": 1}]


def test_a_file_that_cannot_be_written_is_said_at_the_start(tmp_path: Path) -> None:
    log = AuditLog(AuditOptions(tmp_path / "no" / "audit.jsonl", 1))
    with pytest.raises(FailedPreconditionError) as caught:
        log.start()
    assert caught.value.reason == "AUDIT_FILE"
    log.close()


@pytest.mark.parametrize(
    ("path", "request_", "resource"),
    [
        (GET, b"\n\x0ereservations/r", "reservations/r"),
        (GET, b"", None),
        (GET, b"\xff\xff no message", None),
        (GET, b"\n\xd0\x0f" + b"x" * 2000, "x" * LONGEST_RESOURCE),
        (CREATE, b"\n\x0d\n\x0bendpoints/e", "endpoints/e"),
        (RESERVE, b"\x12\x05alice", "alice"),
    ],
)
def test_the_resource_of_a_request(path: str, request_: bytes, resource: str | None) -> None:
    assert resource_of(path, request_) == resource


@pytest.mark.parametrize(
    ("path", "answer", "granted"),
    [
        (
            RESERVE,
            allocator_api.ReserveResponse(reservation=RESERVATION),
            {"reservations": ["reservations/r"], "gpus": ["GPU-1", "GPU-2"]},
        ),
        (
            f"{RESERVE.rpartition('/')[0]}/BatchReserve",
            allocator_api.BatchReserveResponse(reservations=[RESERVATION, RESERVATION]),
            {"reservations": ["reservations/r"] * 2, "gpus": ["GPU-1", "GPU-2"] * 2},
        ),
        (CREATE, allocator_api.ReserveResponse(), {}),
    ],
)
def test_what_an_answer_grants(path: str, answer: Message, granted: dict[str, list[str]]) -> None:
    assert granted_in(path, answer.SerializeToString()) == granted
    assert granted_in(path, b"\xff\xff no message") == {}


def test_standard_output_is_a_log_too(capfd: pytest.CaptureFixture[str]) -> None:
    log = AuditLog(AuditOptions(Path("-"), 1))
    log.start()
    for number in range(2):
        log.write({"number": number})
    log.close()
    written = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert written == [{"number": 0}, {"number": 1}]


def test_a_burst_passes_and_then_calls_come_at_the_rate() -> None:
    limits = RateLimits(10)
    passed = sum(limits.take("a", 0.0) == 0 for _ in range(100))
    assert passed == 10 * BURST_SECONDS
    wait = limits.take("a", 0.0)
    assert 0 < wait <= 0.1
    assert limits.take("a", wait) == 0


def test_callers_do_not_share() -> None:
    limits = RateLimits(0.5)
    assert limits.take("a", 0.0) == 0
    assert limits.take("a", 0.0) == 2.0
    assert limits.take("b", 0.0) == 0


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_caller_gets_more_than_the_rate_and_one_burst(pauses: list[float]) -> None:
    limits, now, passed = RateLimits(2), 0.0, 0
    for pause in pauses:
        now += pause
        passed += limits.take("a", now) == 0
    assert passed <= 2 * (now + BURST_SECONDS)


def test_callers_beyond_the_limit_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limiting, "MOST_CALLERS", 2)
    limits = RateLimits(0.5)
    for caller in ("a", "b", "a", "c"):
        limits.take(caller, 0.0)
    assert limits.take("a", 0.0) > 0  # b was silent longest
    assert limits.take("b", 0.0) == 0


def test_callers_without_an_identity_get_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        refusals.note("ipv4:10.0.0.9:1", UnauthenticatedError("no such token"), now)
    told = [line for one in caplog.records if isinstance(line := one.msg, dict)]
    assert [one["not_shown"] for one in told] == [0, 2]
    assert told[0].items() >= {"peer": "ipv4:10.0.0.9:1", "error": "no such token"}.items()

"""The audit log read back: every line once, newest first, in bounded pieces, over files that are full meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.audit import v1 as api
from gpuscale.api.types.v1 import Role
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc import audit_servicer
from gpuscale.common.rpc.audit import AuditLog, AuditOptions
from gpuscale.common.rpc.audit_servicer import AuditServicer

RESERVE = "/gpuscale.api.allocator.v1.AllocatorService/Reserve"


def record(number: int, **more: Any) -> dict[str, Any]:
    """What a server writes of a call; the calls are a second apart."""
    return {
        "time": f"2026-03-01T00:{number // 60:02}:{number % 60:02}.250+00:00", "who": "alice", "role": "operator",
        "by": "token", "from": "ipv4:10.0.0.9:1", "method": RESERVE, "request_id": f"r{number}",
        "resource": "training", "result": "OK", "seconds": 0.5, **more,
    }  # fmt: skip


def write(options: AuditOptions, numbers: range) -> None:
    log = AuditLog(options)
    log.start()
    for number in numbers:
        log.write(record(number))
    log.close()


def read(servicer: AuditServicer, request: api.ListAuditEventsRequest) -> api.ListAuditEventsResponse:
    context: Any = None
    return asyncio.run(servicer.ListAuditEvents(request, context))


def pages(servicer: AuditServicer, **asked: Any) -> Iterator[list[int]]:
    token = ""
    while True:
        page = read(servicer, api.ListAuditEventsRequest(page_token=token, **asked))
        yield [int(one.request_id[1:]) for one in page.audit_events]
        token = page.next_page_token
        if not token:
            return


def flat(found: Iterable[list[int]]) -> list[int]:
    return [number for page in found for number in page]


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AuditOptions:
    """Files of some four lines, of which one call reads some two."""
    monkeypatch.setattr(audit_servicer, "READ_BYTES", 600)
    return AuditOptions(tmp_path / "audit.jsonl", 1000)


def test_a_line_is_an_event(tmp_path: Path) -> None:
    options = AuditOptions(tmp_path / "audit.jsonl", 1 << 20)
    log = AuditLog(options)
    log.start()
    log.write(record(1, reservations=["reservations/r"], gpus=["GPU-1"], dropped=3))
    nobody = {"who": None, "role": None, "by": None, "resource": None, "request_id": None}
    log.write(record(2, **nobody, result="UNAUTHENTICATED", via="gate"))
    log.close()
    second, first = read(AuditServicer(options), api.ListAuditEventsRequest()).audit_events
    told = (
        first.caller, first.role, first.recognised_by, first.peer, first.method, first.request_id, first.code,
    )  # fmt: skip
    assert told == ("alice", Role.ROLE_OPERATOR, "token", "ipv4:10.0.0.9:1", RESERVE, "r1", "OK")
    assert (first.resource, [*first.reservations]) == ("training", ["reservations/r"])
    assert ([*first.gpu_uuids], first.duration.ToMilliseconds()) == (["GPU-1"], 500)
    assert first.end_time.ToJsonString() == "2026-03-01T00:00:01.250Z"
    assert first.dropped_count == 3
    assert (second.caller, second.role, second.code, second.via) == ("", 0, "UNAUTHENTICATED", "gate")


@pytest.mark.parametrize("page_size", [1, 3, 100])
def test_every_line_is_told_once_the_newest_first(options: AuditOptions, page_size: int) -> None:
    write(options, range(15))
    assert options.numbered(3).exists(), "the test is about several files"
    found = list(pages(AuditServicer(options), page_size=page_size))
    assert flat(found) == [*range(14, -1, -1)]
    assert all(len(page) <= min(page_size, 3) for page in found), "a call reads no more than it may"


def test_files_that_get_full_between_two_pages_hide_and_repeat_nothing(options: AuditOptions) -> None:
    write(options, range(10))
    found = list[int]()
    for page in pages(AuditServicer(options), page_size=1):
        found += page
        if len(found) == 2:
            write(options, range(10, 14))
    assert found == [*range(9, -1, -1)]


def test_what_is_no_longer_there_ends_the_list(options: AuditOptions) -> None:
    write(options, range(3))
    first = next(pages(servicer := AuditServicer(options), page_size=1))
    token = read(servicer, api.ListAuditEventsRequest(page_size=1)).next_page_token
    write(options, range(3, 40))
    assert first == [2]
    page = read(servicer, api.ListAuditEventsRequest(page_token=token))
    assert (len(page.audit_events), page.next_page_token) == (0, "")


def test_a_filter_and_a_time_are_looked_for_page_by_page(options: AuditOptions) -> None:
    write(options, range(15))
    servicer = AuditServicer(options)
    assert flat(pages(servicer, filter="request_id = r1 OR request_id = r7")) == [7, 1]
    asked = api.ListAuditEventsRequest()
    asked.since.FromJsonString("2026-03-01T00:00:03Z")
    asked.until.FromJsonString("2026-03-01T00:00:07Z")
    found = list(pages(servicer, since=asked.since, until=asked.until, filter="NOT request_id = r5"))
    assert flat(found) == [6, 4, 3]
    assert len(found) < len(list(pages(servicer))), "what is older is not read"


def test_half_a_line_and_what_is_none_are_left_out(options: AuditOptions) -> None:
    write(options, range(1))
    half = options.file.read_bytes()[:40]
    with options.file.open("ab") as file:
        file.write(half + b"\n[1]\n{}\n\n" + half)
    assert list(pages(AuditServicer(options))) == [[0]]
    assert list(pages(AuditServicer(AuditOptions(options.file.with_name("none"), 1)))) == [[]]


def test_the_loop_does_not_read(options: AuditOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    write(options, range(1))
    readers = list[threading.Thread]()
    event = audit_servicer._event

    def noted(*arguments: Any) -> Any:
        readers.append(threading.current_thread())
        return event(*arguments)

    monkeypatch.setattr(audit_servicer, "_event", noted)
    read(AuditServicer(options), api.ListAuditEventsRequest())
    assert len(readers) == 1
    assert readers[0] is not threading.current_thread()


def test_what_cannot_be_done_is_said(tmp_path: Path) -> None:
    servicer = AuditServicer(AuditOptions(tmp_path, 1))
    for request, field in (
        (api.ListAuditEventsRequest(order_by="caller"), "order_by"),
        (api.ListAuditEventsRequest(filter="nothing = 1"), "filter"),
        (api.ListAuditEventsRequest(page_size=-1), "page_size"),
    ):
        with pytest.raises(InvalidArgumentError) as wrong:
            read(servicer, request)
        assert wrong.value.violations[0].field == field
    for file, text in ((tmp_path, "Is a directory"), (Path("-"), "standard output")):
        with pytest.raises(FailedPreconditionError, match=text) as refused:
            read(AuditServicer(AuditOptions(file, 1)), api.ListAuditEventsRequest())
        assert refused.value.reason == "AUDIT_FILE"

"""AuditService: reads the audit log of its server back from its end, a bounded piece a call, in a thread."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import Any, BinaryIO, Final

from gpuscale.api.audit import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.filters import Test, compile_filter
from gpuscale.common.rpc.audit import FILES_KEPT, STANDARD_OUTPUT, AuditOptions
from gpuscale.common.security.auth import Context

READ_BYTES: Final = 1 << 20
"""Most of the log that one call reads: some 3,000 lines."""


def _event(line: bytes) -> api.AuditEvent | None:
    """What a line tells; None for half a line, as a process leaves one that is killed."""
    try:
        told: dict[str, Any] = json.loads(line)
        return api.AuditEvent(
            end_time=wire.to_timestamp(datetime.fromisoformat(told["time"])),
            caller=told["who"] or "",
            role=types_api.Role.Value(f"ROLE_{(told['role'] or 'unspecified').upper()}"),
            recognised_by=told["by"] or "",
            via=told.get("via", ""),
            peer=told["from"],
            method=told["method"],
            request_id=told["request_id"] or "",
            resource=told["resource"] or "",
            reservations=told.get("reservations", ()),
            gpu_uuids=told.get("gpus", ()),
            code=told["result"],
            duration=wire.to_duration(told["seconds"]),
            dropped_count=told.get("dropped", 0),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _lines_before(end: int, file: BinaryIO) -> tuple[list[tuple[int, bytes]], int]:
    """(the lines that end at most there, the last first, each with where it begins; where they begin). Half a line is none."""
    start = max(0, end - READ_BYTES)
    file.seek(start)
    read = file.read(end - start)
    cut = read.find(b"\n") + 1 if start else 0
    start, found = start + cut, list[tuple[int, bytes]]()
    at = start
    for line in read[cut : read.rfind(b"\n") + 1].splitlines(keepends=True):
        found.append((at, line))
        at += len(line)
    return found[::-1], start


class AuditServicer(api.AuditServiceServicer):
    """Reads the audit log back. A page token is a file, by its inode, which outlives its name, and a place in it."""

    def __init__(self, options: AuditOptions) -> None:
        self._options = options

    async def ListAuditEvents(
        self, request: api.ListAuditEventsRequest, context: Context
    ) -> api.ListAuditEventsResponse:
        if request.order_by.strip():
            raise InvalidArgumentError("audit events come newest first, in no other order", field="order_by")
        inode, _, place = wire.last_key(request.page_token).partition(":")
        if inode and not (inode.isdecimal() and place.isdecimal()):
            raise wire.forged_token()
        after = int(inode or 0), int(place or 0)
        if self._options.file == STANDARD_OUTPUT:
            message = "this server writes its audit log to standard output, and cannot read it"
            raise FailedPreconditionError(message, reason="AUDIT_FILE")
        keep, period = compile_filter(request.filter, api.AuditEvent), wire.asked_period(request)
        most = wire.page_limit(request.page_size)
        try:
            return await asyncio.to_thread(self._page, after, keep, period, most)
        except OSError as error:
            message = f"cannot read the audit log {self._options.file}: {error.strerror}"
            raise FailedPreconditionError(message, reason="AUDIT_FILE") from error

    def _page(
        self, after: tuple[int, int], keep: Test, period: wire.TimeRange, most: int
    ) -> api.ListAuditEventsResponse:
        """What is found in the piece before that file and place, or at the end."""
        found = list[api.AuditEvent]()
        with ExitStack() as stack:
            files = dict(self._open(stack))  # the newest first
            left = [*files]
            if any(after):
                left = left[left.index(after[0]) :] if after[0] in files else []
            ends = {one: os.fstat(files[one].fileno()).st_size for one in left} | dict([after])
            while left and not ends[left[0]]:
                del left[0]
            if not left:
                return api.ListAuditEventsResponse()
            lines, start = _lines_before(ends[left[0]], files[left[0]])
        older = len(left) > 1
        for at, event in ((at, _event(line)) for at, line in lines):
            if event is None:
                continue
            time = wire.to_datetime(event.end_time)
            if period.since is not None and time < period.since:
                start, older = 0, False
                break
            if (period.until is None or time <= period.until) and keep(event):
                found.append(event)
            if len(found) == most:
                start = at
                break
        token = wire.to_token(f"{left[0]}:{start}") if start or older else ""
        return api.ListAuditEventsResponse(audit_events=found, next_page_token=token)

    def _open(self, stack: ExitStack) -> Iterator[tuple[int, BinaryIO]]:
        """The files by inode. One that is full meanwhile gets the next name, and is met again."""
        for number in range(FILES_KEPT + 1):
            with suppress(FileNotFoundError):
                file = stack.enter_context(self._options.numbered(number).open("rb"))
                yield os.fstat(file.fileno()).st_ino, file

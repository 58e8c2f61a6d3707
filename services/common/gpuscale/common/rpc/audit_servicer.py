"""AuditService: reads its server's audit log backwards, a bounded part per call, in a thread."""

import asyncio
import json
import os
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
"""Maximum bytes that one call reads: some 3,000 lines."""


def _event(line: bytes) -> api.AuditEvent | None:
    """Parse a line; None for a truncated one, which a killed process leaves."""
    try:
        record: dict[str, Any] = json.loads(line)
        return api.AuditEvent(
            end_time=wire.to_timestamp(datetime.fromisoformat(record["time"])),
            caller=record["who"] or "",
            role=types_api.Role.Value(f"ROLE_{(record['role'] or 'unspecified').upper()}"),
            recognised_by=record["by"] or "",
            via=record.get("via", ""),
            peer=record["from"],
            method=record["method"],
            request_id=record["request_id"] or "",
            resource=record["resource"] or "",
            reservations=record.get("reservations", ()),
            gpu_uuids=record.get("gpus", ()),
            code=record["result"],
            duration=wire.to_duration(record["seconds"]),
            dropped_count=record.get("dropped", 0),
        )
    except (ValueError, KeyError, TypeError):
        return None


class AuditServicer(api.AuditServiceServicer):
    """Lists audit events, newest first. A page token is an inode, which survives rotation, and an offset."""

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
        """Events in the part of the log before `after` (inode and offset), or at its end."""
        found = list[api.AuditEvent]()
        with ExitStack() as stack:
            # By inode, newest first: one that is rotated meanwhile is found again.
            files: dict[int, BinaryIO] = {}
            for number in range(FILES_KEPT + 1):
                with suppress(FileNotFoundError):
                    opened = stack.enter_context(self._options.numbered(number).open("rb"))
                    files[os.fstat(opened.fileno()).st_ino] = opened
            left = [*files]
            if any(after):
                left = left[left.index(after[0]) :] if after[0] in files else []
            ends = {one: os.fstat(files[one].fileno()).st_size for one in left} | dict([after])
            while left and not ends[left[0]]:
                del left[0]
            if not left:
                return api.ListAuditEventsResponse()
            end, file = ends[left[0]], files[left[0]]
            start = max(0, end - READ_BYTES)
            file.seek(start)
            read = file.read(end - start)
        cut = read.find(b"\n") + 1 if start else 0
        at = start = start + cut
        lines: list[tuple[int, bytes]] = []  # complete ones, each with its offset
        for line in read[cut : read.rfind(b"\n") + 1].splitlines(keepends=True):
            lines.append((at, line))
            at += len(line)
        older = len(left) > 1
        for at, event in ((at, _event(line)) for at, line in reversed(lines)):
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

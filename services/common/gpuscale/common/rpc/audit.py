"""The audit log: who did what, from where, and how it ended, as one JSON object a line.

A thread writes it, so no call waits for a disk. A full file is rotated to `NAME.1`, the previous one to `NAME.2`, and so on
up to a limit. If the disk is slower than the calls, lines are dropped and counted in the next one. Files have mode 0600.
Only names of resources and GPUs are written from a call's content. `audit_servicer.py` reads the log.
"""

import json
import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TextIO

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger

LONGEST_RESOURCE: Final = 256
"""Maximum characters of a resource name in the log."""
_NAMES: Final = ("name", "parent", "node", "holder", "tenant")
COUNTED: Final = frozenset(
    {
        "RenewReservation",
        "KeepAlive",
        "CheckLease",
        "ReportMetrics",
        "Connect",
        "StreamTelemetry",
        "GetAuthority",
        "FollowFiles",
        "ListAuditEvents",
    }
)
"""Methods called every few seconds while something runs or is watched. They would flood the log, so it has only refusals of them;
`/metrics` counts them."""
STANDARD_OUTPUT: Final = Path("-")
MOST_GPUS: Final = 64
"""Maximum UUIDs of granted GPUs in one line."""
MOST_WAITING: Final = 10_000
"""Maximum lines waiting for the disk."""
FILES_KEPT: Final = 4
"""Rotated files that are kept."""

Record = Mapping[str, str | float | int | list[str] | None]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """File of the audit log (`-` for standard output), and its size limit in bytes."""

    file: Path
    max_bytes: int

    def numbered(self, number: int) -> Path:
        """The current file for 0, else a rotated one."""
        return self.file.with_name(f"{self.file.name}.{number}") if number else self.file


class AuditLog:
    """An audit log. Call `start` first and `close` last."""

    def __init__(self, options: AuditOptions) -> None:
        self._options = options
        self._waiting: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._file: TextIO | None = None
        self._writer = threading.Thread(target=self._write_all, name="audit log", daemon=True)

    def start(self) -> None:
        """Open the file and start the writer; raises FailedPreconditionError if it cannot be opened (reason AUDIT_FILE)."""
        try:
            self._file = self._current()
        except OSError as error:
            message = f"cannot write the audit log {self._options.file}: {error.strerror}"
            raise FailedPreconditionError(message, reason="AUDIT_FILE") from error
        self._writer.start()

    def write(self, record: Record) -> None:
        """Queue a record; never blocks."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write the queued records and close the file. Blocks; no-op before `start`."""
        if self._writer.is_alive():
            self._waiting.put(None)
            self._writer.join()

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            line = json.dumps({**record, "dropped": dropped} if dropped else record, ensure_ascii=False)
            try:
                file = self._file = self._current()
                file.write(f"{line}\n")
                if self._waiting.empty():
                    file.flush()
                if self._options.file != STANDARD_OUTPUT and file.tell() >= self._options.max_bytes:
                    self._file = None
                    file.close()
                    for number in range(FILES_KEPT - 1, -1, -1):
                        old = self._options.numbered(number)
                        if old.exists():
                            old.replace(self._options.numbered(number + 1))
            except OSError as error:
                self._dropped += dropped + 1
                _log.warning(
                    "cannot write the audit log", file=str(self._options.file), problem=error.strerror
                )
        if self._file is not None:
            self._file.close()

    def _current(self) -> TextIO:
        """The file; a new one where another program moved or removed it, as logrotate does."""
        file, path = self._file, self._options.file
        if path == STANDARD_OUTPUT:
            return file or os.fdopen(os.dup(1), "w", encoding="utf-8")
        if file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    return file
            self._file = None
            file.close()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


def _decoded(path: str, request: bytes) -> Message | None:
    try:
        return message_factory.GetMessageClass(wire.find_method(path).input_type).FromString(request)
    except DecodeError:
        return None


def reads_on(path: str, request: object) -> bool:
    """Whether a call only continues to follow a replica log, which happens each second; the first call is recorded."""
    if not (path.endswith("/ReadReplicaLog") and isinstance(request, bytes)):
        return False
    return bool(getattr(_decoded(path, request), "offset", 0))


def resource_of(path: str, request: bytes) -> str | None:
    """The resource named in a request or a message field of it; None without one."""
    message = _decoded(path, request)
    if message is None:
        return None
    set_fields: Mapping[str, object] = {field.name: value for field, value in message.ListFields()}
    found = [value for name in _NAMES if isinstance(value := set_fields.get(name), str)]
    for inner in set_fields.values():
        if isinstance(inner, Message):
            inside = ((field.name, value) for field, value in inner.ListFields())
            found += [value for name, value in inside if name in _NAMES and isinstance(value, str)]
    return found[0][:LONGEST_RESOURCE] if found else None


def granted_in(path: str, response: bytes) -> dict[str, list[str]]:
    """The reservations in a response, with the UUIDs of their GPUs; empty without any."""
    method = wire.find_method(path)
    fields = method.output_type.fields_by_name
    field = fields.get("reservation") or fields.get("reservations")
    if field is None:
        return {}
    try:
        message = message_factory.GetMessageClass(method.output_type).FromString(response)
    except DecodeError:
        return {}
    found = getattr(message, field.name)
    reservations = list(found) if field.is_repeated else [found]
    uuids = [gpu.uuid for one in reservations for gpu in one.gpus]
    return {"reservations": [one.name for one in reservations][:MOST_GPUS], "gpus": uuids[:MOST_GPUS]}

"""The calls of a server: how many may be open, how often each caller may call, an audit log, and counts.

`OpenCalls` are those being handled, and how they end before their time. `CallWatcher` looks at the calls that need a
caller (health checks do not): it limits their rate, notes them in the audit log and counts them.

The audit log says who did what, from where, and how it ended, as one JSON object a line. A thread of its own writes it, so
that no call waits for a disk. It is bounded twice: a full file is moved to `NAME.1` (the one there before to `NAME.2`, and
so on up to a number), and where the disk is slower than the calls, lines are dropped and counted in the next one. Files are
for their owner only (0600). Nothing of a request is written but names of resources.
"""

import asyncio
import json
import os
import queue
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.runtime.connections import add_connections
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.common.security.auth import Authenticator, Context, MethodInfo, Principal, Role

LONGEST_RESOURCE: Final = 256
"""Characters of a name that the audit log keeps."""
_REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
_NAMES: Final = ("name", "parent", "node", "holder", "tenant")

OVERLOADED_RETRY = 1.0
"""Seconds after which a caller that was turned away should try again."""

_Task = asyncio.Task[Any]


class OpenCalls:
    """The open calls. The number of unary calls is limited; streams do not count, because they stay open.

    Calls of public methods (health) are neither limited nor refused while the server stops.
    """

    def __init__(self, max_unary: int) -> None:
        self._max_unary = max_unary
        self._stopping: GpuscaleError | None = None
        self._ended: dict[_Task, GpuscaleError] = {}
        self.unary: set[_Task] = set()
        self.streams: set[_Task] = set()
        self.public: set[_Task] = set()

    def enter_unary(self, task: _Task) -> None:
        """Count a unary call.

        Raises:
            ResourceExhaustedError: there are too many (reason OVERLOADED).
            UnavailableError: the server stops (reason SHUTTING_DOWN).
        """
        self._refuse_when_stopping()
        if len(self.unary) >= self._max_unary:
            raise ResourceExhaustedError(
                f"{self._max_unary} calls are already under way",
                reason="OVERLOADED",
                retry_after=OVERLOADED_RETRY,
            )
        self.unary.add(task)

    def enter_stream(self, task: _Task) -> None:
        """Note an open stream.

        Raises:
            UnavailableError: the server stops (reason SHUTTING_DOWN).
        """
        self._refuse_when_stopping()
        self.streams.add(task)

    def leave(self, task: _Task) -> None:
        """A call is over, or was refused."""
        self.unary.discard(task)
        self.streams.discard(task)
        self.public.discard(task)
        self._ended.pop(task, None)

    def end(self, tasks: Iterable[_Task], error: GpuscaleError) -> None:
        """Cancel calls that are open, so that each is answered with `error`."""
        for task in tuple(tasks):
            self._ended[task] = error
            task.cancel()

    def why_cancelled(self, task: _Task) -> GpuscaleError | None:
        """The error that answers a call which `end` cancelled; None if something else cancelled it."""
        return self._ended.get(task)

    def stop(self) -> GpuscaleError:
        """Refuse every call from now on; returns the error that callers get."""
        self._stopping = UnavailableError("the server is shutting down", reason="SHUTTING_DOWN")
        return self._stopping

    def _refuse_when_stopping(self) -> None:
        if self._stopping is not None:
            raise UnavailableError(self._stopping.message, reason=self._stopping.reason)


BURST_SECONDS: Final = 2.0
"""A bucket holds the calls of so many seconds, and one at least."""
MOST_CALLERS: Final = 10_000
"""Callers that are remembered; of more, the one that has been silent longest begins with a full bucket."""


class RateLimits:
    """The buckets of all callers.

    Args:
        calls_per_second: how many calls each may make, in the long run.
    """

    def __init__(self, calls_per_second: float) -> None:
        self._rate = calls_per_second
        self._most = max(1.0, calls_per_second * BURST_SECONDS)
        self._buckets: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # by caller: what is in it, and when

    def take(self, caller: str, now: float) -> float:
        """Take one call out of the bucket of a caller.

        Returns:
            0 where there was one; else the seconds until there is.
        """
        left, seen = self._buckets.pop(caller, (self._most, now))
        left = min(self._most, left + (now - seen) * self._rate)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left), now
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate


MOST_WAITING: Final = 10_000
"""Lines that may wait for the disk."""
FILES_KEPT: Final = 4
"""Full files that are kept beside the one that is written."""

Record = Mapping[str, str | float | int | None]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Where the audit log is, and how large one file of it may become, in bytes."""

    file: Path
    max_bytes: int


class AuditLog:
    """One audit log, from `start` to `close`.

    Raises:
        FailedPreconditionError: the file cannot be opened (reason AUDIT_FILE); only by `start`.
    """

    def __init__(self, options: AuditOptions) -> None:
        self._options = options
        self._waiting: queue.Queue[Record | None] = queue.Queue(MOST_WAITING)
        self._dropped = 0
        self._file: TextIO | None = None
        self._writer = threading.Thread(target=self._write_all, name="audit log", daemon=True)

    def start(self) -> None:
        """Open the file, and begin to write."""
        try:
            self._file = self._open()
        except OSError as error:
            message = f"cannot write the audit log {self._options.file}: {error.strerror}"
            raise FailedPreconditionError(message, reason="AUDIT_FILE") from error
        self._writer.start()

    def write(self, record: Record) -> None:
        """Queue a record to be written; never waits."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what is queued and close the file. Blocks; does nothing if the log never started."""
        if self._writer.is_alive():
            self._waiting.put(None)
            self._writer.join()

    def _write_all(self) -> None:
        while (record := self._waiting.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            line = json.dumps({**record, "dropped": dropped} if dropped else record, ensure_ascii=False)
            try:
                self._write_line(line)
            except OSError as error:
                self._dropped += dropped + 1
                _log.warning(
                    "cannot write the audit log", file=str(self._options.file), problem=error.strerror
                )
        if self._file is not None:
            self._file.close()

    def _write_line(self, line: str) -> None:
        file = self._file or self._open()
        self._file = file
        file.write(f"{line}\n")
        if self._waiting.empty():
            file.flush()
        if file.tell() >= self._options.max_bytes:
            self._file = None
            file.close()
            self._rotate()

    def _rotate(self) -> None:
        for number in range(FILES_KEPT - 1, -1, -1):
            old = self._numbered(number)
            if old.exists():
                old.replace(self._numbered(number + 1))

    def _numbered(self, number: int) -> Path:
        file = self._options.file
        return file.with_name(f"{file.name}.{number}") if number else file

    def _open(self) -> TextIO:
        descriptor = os.open(self._options.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        return os.fdopen(descriptor, "a", encoding="utf-8")


class CallMeter:
    """Counts of calls, by method and status.

    Args:
        service: begins the names of the series, such as `gpuscale_gateway_calls_total`.
        authenticator: whose tokens the page tells of: when each ends, and when it was last used here.
    """

    def __init__(self, service: str, authenticator: Authenticator) -> None:
        self.open = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.limited = 0
        self._service = service
        self._authenticator = authenticator

    async def render(self) -> AsyncGenerator[bytes]:
        """The page of `/metrics`: calls, and what was done about connections."""
        page, prefix = MetricsPage(), f"gpuscale_{self._service}"
        calls = Family(f"{prefix}_calls_total", "counter", "Calls that have ended, by method and status.")
        times = Family(f"{prefix}_call_seconds_total", "counter", "Time that calls took, streams included.")
        page.add(Family(f"{prefix}_calls_open", "gauge", "Calls that are under way."), "", self.open)
        limited = Family(f"{prefix}_rate_limited_total", "counter", "Calls turned away for coming too often.")
        page.add(limited, "", self.limited)
        add_connections(page, self._service)
        for (path, code), count in sorted(self.ended.items()):
            page.add(calls, labels({"method": path.removeprefix("/"), "code": code}), count)
        for path, seconds in sorted(self.seconds.items()):
            page.add(times, labels({"method": path.removeprefix("/")}), round(seconds, 6))
        expires = Family(f"{prefix}_token_expires_timestamp_seconds", "gauge", "When a token ends.")
        last_use = Family(
            f"{prefix}_token_last_use_timestamp_seconds", "gauge", "When a token was last used here."
        )
        for token, used in self._authenticator.secrets():
            named = labels({"name": token.principal.name, "label": token.label})
            if token.expires is not None:
                page.add(expires, named, int(token.expires.timestamp()))
            if used is not None:
                page.add(last_use, named, round(used, 3))
        for chunk in page.chunks():
            yield chunk


class CallWatcher:
    """Limits, audits and counts the calls of one server.

    Args:
        limits: how often each caller may call; None for as often as it likes.
        audit: where changes and refusals are noted; None for nowhere.
        meter: where calls are counted; None for nowhere.
    """

    def __init__(
        self, limits: RateLimits | None = None, audit: AuditLog | None = None, meter: CallMeter | None = None
    ) -> None:
        self._limits = limits
        self._audit = audit
        self._meter = meter

    def admit(self, principal: Principal) -> None:
        """Count a call of a caller.

        Raises:
            ResourceExhaustedError: it calls too often (reason RATE_LIMITED), with the time to wait.
        """
        if self._limits is None:
            return
        wait = self._limits.take(f"{principal.kind}:{principal.name}", time.monotonic())
        if wait:
            if self._meter is not None:
                self._meter.limited += 1
            raise ResourceExhaustedError(
                f"{principal.name} calls too often", reason="RATE_LIMITED", retry_after=wait
            )

    def begun(self) -> None:
        """A call has begun."""
        if self._meter is not None:
            self._meter.open += 1

    def ended(
        self,
        info: MethodInfo,
        principal: Principal | None,
        context: Context,
        request: object,
        code: grpc.StatusCode,
        seconds: float,
    ) -> None:
        """A call has ended.

        Args:
            info: its method.
            principal: who called; None for one that was not let in.
            context: of the call.
            request: the bytes of the request, where there is one.
            code: how it ended.
            seconds: how long it took.
        """
        if self._meter is not None:
            self._meter.open -= 1
            self._meter.ended[info.path, code.name] += 1
            self._meter.seconds[info.path] += seconds
        if self._audit is None or not (code in _REFUSALS or (info.role or Role.VIEWER) > Role.VIEWER):
            return
        self._audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "who": principal.name if principal else None,
                "role": principal.role.name.lower() if principal else None,
                "by": principal.kind if principal else None,
                "from": context.peer(),
                "method": info.path,
                "resource": resource_of(info.path, request) if isinstance(request, bytes) else None,
                "result": code.name,
                "seconds": round(seconds, 4),
            }
        )


def resource_of(path: str, request: bytes) -> str | None:
    """The resource that a request names, itself or in a message field; None if there is none, or it cannot be read."""
    method = descriptor_pool.Default().FindMethodByName(path.removeprefix("/").replace("/", "."))
    try:
        message = message_factory.GetMessageClass(method.input_type).FromString(request)
    except DecodeError:
        return None
    found = _name_in(message)
    return None if found is None else found[:LONGEST_RESOURCE]


def _name_in(message: Message) -> str | None:
    """The first name in a message, or in its message fields."""
    set_fields: Mapping[str, object] = {field.name: value for field, value in message.ListFields()}
    for name in _NAMES:
        value = set_fields.get(name)
        if isinstance(value, str):
            return value
    for inner in set_fields.values():
        if isinstance(inner, Message):
            value = next((value for field, value in inner.ListFields() if field.name in _NAMES), None)
            if isinstance(value, str):
                return value
    return None

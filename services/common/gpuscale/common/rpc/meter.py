"""Metrics of programs, and the watcher of calls.

`CallWatcher` limits the rate of calls, writes the audit log and counts calls, except those that need no caller (health checks).
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NoReturn

import grpc
import psutil

from gpuscale.common.errors import GpuscaleError, ResourceExhaustedError
from gpuscale.common.rpc.audit import COUNTED, AuditLog, granted_in, reads_on, resource_of
from gpuscale.common.rpc.limits import Connections, RateLimits
from gpuscale.common.runtime.lifecycle import descriptor_limit
from gpuscale.common.runtime.logs import call_id
from gpuscale.common.runtime.metrics_text import Family, Histogram, MetricsPage, labels
from gpuscale.common.security.auth import Authenticator, Context, MethodInfo, Principal, Role

LAG_PERIOD: Final = 1.0
"""Seconds between two measurements of the event loop lag."""
counted_elsewhere: ContextVar[bool] = ContextVar("gpuscale_counted_elsewhere", default=False)
"""Whether another process of the service counts and audits the current call."""
_REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
Collector = Callable[[MetricsPage], Awaitable[None]]
"""Adds the series of a part of a service to a page."""


class ProgramMeter:
    """The metrics of any program: process, event loop, and those of its parts. `service` is in the names of series."""

    def __init__(self, service: str, lag_period: float = LAG_PERIOD) -> None:
        self.lag = Histogram()
        self._lag_period = lag_period
        self.prefix = f"gpuscale_{service}"
        self._service = service
        self._collectors: list[Collector] = []

    async def watch_loop(self) -> NoReturn:
        """Measure the lag of the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._lag_period
            await asyncio.sleep(self._lag_period)
            self.lag.observe(max(0.0, loop.time() - due))

    @contextmanager
    def showing(self, collector: Collector) -> Generator[None]:
        """Include the series of `collector` during the block."""
        self._collectors.append(collector)
        try:
            yield
        finally:
            self._collectors.remove(collector)

    async def render(self) -> AsyncGenerator[bytes]:
        """The page of `/metrics`, in chunks."""
        page = MetricsPage()
        add_process(page)
        add_connections(page, self._service)
        await self.add(page)
        for chunk in page.chunks():
            yield chunk

    async def add(self, page: MetricsPage) -> None:
        """Add all series except those of the process and its connections."""
        lag = Family(f"{self.prefix}_loop_lag_seconds", "histogram", "How late the event loop wakes up.")
        page.add_histogram(lag, {}, self.lag)
        for collector in tuple(self._collectors):
            await collector(page)


class CallMeter(ProgramMeter):
    """The metrics of a service, with its calls and its tokens: their expiry and last use."""

    def __init__(self, service: str, authenticator: Authenticator, lag_period: float = LAG_PERIOD) -> None:
        super().__init__(service, lag_period)
        self.open = 0
        self.ended: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.failed: Counter[tuple[str, str]] = Counter()
        self.limited = 0
        self.terms: int | None = None  # begun; None for a service that never leads
        self.epoch: int | None = None
        self._authenticator = authenticator

    @contextmanager
    def leading(self, epoch: int) -> Generator[None]:
        """Report that this process leads during the block; `epoch` is the number of its term, 0 without a database."""
        self.terms, self.epoch = (self.terms or 0) + 1, epoch
        try:
            yield
        finally:
            self.epoch = None

    async def add(self, page: MetricsPage) -> None:
        """Add all series except those of the process and its connections."""
        prefix = self.prefix
        page.add(Family(f"{prefix}_calls_open", "gauge", "Calls that are under way."), "", self.open)
        limited = Family(f"{prefix}_rate_limited_total", "counter", "Calls that the rate limit refused.")
        page.add(limited, "", self.limited)
        calls = Family(f"{prefix}_calls_total", "counter", "Calls that have ended, by method and status.")
        for (path, code), count in sorted(self.ended.items()):
            page.add(calls, labels({"method": path.removeprefix("/"), "code": code}), count)
        times = Family(f"{prefix}_call_seconds", "histogram", "Time that calls took, streams included.")
        for path, histogram in sorted(self.seconds.items()):
            page.add_histogram(times, {"method": path.removeprefix("/")}, histogram)
        failed = Family(f"{prefix}_calls_failed_total", "counter", "Calls that have failed, by reason.")
        for (path, reason), count in sorted(self.failed.items()):
            page.add(failed, labels({"method": path.removeprefix("/"), "reason": reason}), count)
        if self.terms is not None:
            leads = Family(f"{prefix}_leads", "gauge", "1 while this process leads or is alone.")
            page.add(leads, "", int(self.epoch is not None))
            page.add(Family(f"{prefix}_epoch", "gauge", "Number of its term as the leader."), "", self.epoch)
            page.add(Family(f"{prefix}_terms_total", "counter", "Terms in which it has led."), "", self.terms)
        expires = Family(f"{prefix}_token_expires_timestamp_seconds", "gauge", "When a token expires.")
        last_use = Family(
            f"{prefix}_token_last_use_timestamp_seconds", "gauge", "When a token was last used here."
        )
        for token, used in self._authenticator.secrets():
            named = labels({"name": token.principal.name, "label": token.label})
            if token.expires is not None:
                page.add(expires, named, int(token.expires.timestamp()))
            if used is not None:
                page.add(last_use, named, round(used, 3))
        await super().add(page)


class CallWatcher:
    """Limits, audits and counts the calls of a server, as far as `limits`, `audit` and `meter` are given."""

    def __init__(
        self, limits: RateLimits | None = None, audit: AuditLog | None = None, meter: CallMeter | None = None
    ) -> None:
        self._limits = limits
        self._audit = audit
        self._meter = meter

    def admit(self, principal: Principal) -> None:
        """Apply the rate limit to a call; raises ResourceExhaustedError (RATE_LIMITED) with the time to wait."""
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

    def failed(self, info: MethodInfo | None, error: GpuscaleError) -> None:
        """A call failed with the error sent to its caller."""
        if self._meter is not None and info is not None:
            self._meter.failed[info.path, error.reason] += 1

    def ended(
        self,
        info: MethodInfo,
        principal: Principal | None,
        context: Context,
        request: object,
        answer: object,
        code: grpc.StatusCode,
        seconds: float,
    ) -> None:
        """A call has ended, after `seconds`. A rejected one has no `principal`; streams have no bytes."""
        if self._meter is not None:
            self._meter.open -= 1
        if counted_elsewhere.get():
            return
        if self._meter is not None:
            self._meter.ended[info.path, code.name] += 1
            self._meter.seconds[info.path].observe(seconds)
        changes = info.role is not Role.VIEWER and info.path.rpartition("/")[2] not in COUNTED
        if self._audit is None or not (changes or code in _REFUSALS):
            return
        if code is grpc.StatusCode.OK and reads_on(info.path, request):
            return
        self._audit.write(
            {
                "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "who": principal.name if principal else None,
                "role": principal.role.name.lower() if principal else None,
                "by": principal.kind if principal else None,
                **({"via": principal.via} if principal and principal.via else {}),
                "from": context.peer(),
                "method": info.path,
                "request_id": call_id.get() or None,
                "resource": resource_of(info.path, request) if isinstance(request, bytes) else None,
                **(granted_in(info.path, answer) if isinstance(answer, bytes) else {}),
                "result": code.name,
                "seconds": round(seconds, 4),
            }
        )


_CPU = Family("process_cpu_seconds_total", "counter", "CPU time of this process, user and system.")
_RESIDENT = Family("process_resident_memory_bytes", "gauge", "Resident memory of this process.")
_OPEN_FDS = Family("process_open_fds", "gauge", "File descriptors that this process has open.")
_MAX_FDS = Family("process_max_fds", "gauge", "File descriptors that this process may have open.")
_START = Family("process_start_time_seconds", "gauge", "Unix time at which this process started.")


def add_process(page: MetricsPage) -> None:
    """Add the resource usage of this process."""
    page.add(_CPU, "", round(time.process_time(), 6))
    page.add(_MAX_FDS, "", descriptor_limit())
    try:
        process = psutil.Process()
        resident, open_files, started = (process.memory_info().rss, process.num_fds(), process.create_time())
    except (psutil.Error, OSError):
        return
    page.add(_RESIDENT, "", resident)
    page.add(_OPEN_FDS, "", open_files)
    page.add(_START, "", round(started, 2))


def add_connections(page: MetricsPage, service: str) -> None:
    """Add the numbers of cut connections and descriptor shortages."""
    prefix = f"gpuscale_{service}"
    cut = Family(f"{prefix}_connections_cut_total", "counter", "Connections cut for lack of an identity.")
    shortages = "Checks that found no free file descriptor (EMFILE)."
    page.add(cut, "", Connections.cut)
    page.add(Family(f"{prefix}_descriptor_shortages_total", "counter", shortages), "", Connections.short)


_BEGINS = Family(
    "gpuscale_certificate_begins_timestamp_seconds", "gauge", "When a certificate becomes valid."
)
_EXPIRES = Family("gpuscale_certificate_expires_timestamp_seconds", "gauge", "When a certificate expires.")


def certificates_text(files: Mapping[str, Path]) -> bytes:
    """Series of certificate expiry, by setting with the file; for a bundle, of the first to expire."""
    page = MetricsPage()
    for name, file in files.items():
        from gpuscale.common.security.certificates import first_to_end  # loads cryptography: 16 MB

        try:
            shown = first_to_end(file.read_bytes())
        except (OSError, ValueError):
            continue
        page.add(_BEGINS, labels({"file": name}), int(shown.begins))
        page.add(_EXPIRES, labels({"file": name}), int(shown.ends))
    return b"".join(page.chunks())

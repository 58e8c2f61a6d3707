"""What a server takes on: how many calls may be open, how often each caller may call, which connections last, and counts.

`OpenCalls` are those being handled, and how they end before their time. `CallWatcher` looks at the calls that need a
caller (health checks do not): it limits their rate, notes them in the audit log and counts them.

A connection costs a descriptor, whether anybody calls over it or not. One over which no caller has been recognised is cut
after `PATIENCE` seconds, whatever else it does: half a request, HTTP/2 pings, calls without a token. Where there are more of
these than their share of the descriptors, the oldest are cut at once. Servers (gRPC's core, uvicorn) keep their sockets to
themselves, so that connections are found by looking at the descriptors of this process. That takes no descriptor, and works
when there are none left.
"""

import asyncio
import ipaddress
import os
import socket
import stat
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, ClassVar, Final
from urllib.parse import unquote

import grpc

from gpuscale.common.errors import (
    GpuscaleError,
    ResourceExhaustedError,
    UnavailableError,
)
from gpuscale.common.rpc.audit import AuditLog, resource_of
from gpuscale.common.runtime.lifecycle import descriptor_limit
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.common.security.auth import Authenticator, Context, MethodInfo, Principal, Role

_REFUSALS: Final = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED})
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


LOOK_PERIOD: Final = 5.0
"""Seconds between two looks."""
PATIENCE: Final = 40.0
"""Seconds that a connection may last without an identity; it is cut at the next look."""
SHARE: Final = 0.25
"""The part of all descriptors that connections without an identity may have."""
MOST_UNKNOWN: Final = 4096
"""How many of these there may be, however many descriptors there are."""
_GAP: Final = 1024
"""Unused numbers after which no descriptor is expected: the lowest free number is given out first."""


_log = get_logger(__name__)


class Connections:
    """The connections that others made to one port of this process.

    Attributes:
        cut: connections that were cut, at any port of this process.
        short: looks at which there was no descriptor left (EMFILE), likewise.
    """

    cut: ClassVar[int] = 0
    short: ClassVar[int] = 0

    def __init__(self) -> None:
        self._vouched: dict[str, int] = {}
        self._known: dict[int, str | None] = {}
        self._since: dict[int, float] = {}
        self._is_short = False

    def vouch(self, peer: str) -> None:
        """A caller was recognised on the connection from `peer`, as gRPC writes it, or HOST:PORT."""
        if peer not in self._vouched:
            self._vouched[peer] = 1

    def begin(self, peer: str) -> None:
        """A request of the connection from `peer` has arrived in full: it may last until `end`."""
        self._vouched[peer] = self._vouched.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        """A request has been answered."""
        left = self._vouched.get(peer, 0) - 1
        if left > 0:
            self._vouched[peer] = left
        else:
            self._vouched.pop(peer, None)

    async def watch(self, port: int) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            await asyncio.to_thread(self.look, port, time.monotonic())

    def look(self, port: int, now: float) -> None:
        """Cut what has lasted for too long without an identity, and what is beyond the share of such."""
        short = _shortage()
        # First: the connections of these are all there, or have ended.
        raw = {said: _key(said) for said in tuple(self._vouched)}
        there = {inode: (fd, peer) for fd, inode, peer in self._connections(port)}
        peers = {peer for _, peer in there.values()}
        vouched = set(raw.values())
        for said, key in raw.items():
            if key not in peers:
                self._vouched.pop(said, None)
        self._since = {
            inode: self._since.get(inode, now) for inode, (_, peer) in there.items() if peer not in vouched
        }
        oldest = sorted(self._since, key=self._since.__getitem__)
        beyond = max(0, len(oldest) - min(MOST_UNKNOWN, int(descriptor_limit() * SHARE)))
        for nth, inode in enumerate(oldest):
            if nth < beyond or now - self._since[inode] >= PATIENCE:
                Connections.cut += _cut(there[inode][0], inode)
        self._note(short, len(oldest))

    def _connections(self, port: int) -> Iterator[tuple[int, int, str]]:
        """Number, inode and peer of each connection to the port."""
        known: dict[int, str | None] = {}
        for fd, inode in _sockets():
            peer = self._known[inode] if inode in self._known else _peer(fd, port)
            known[inode] = peer
            if peer is not None:
                yield fd, inode, peer
        self._known = known

    def _note(self, short: str, unknown: int) -> None:
        """Count a shortage of descriptors, and log the first look of it."""
        Connections.short += bool(short)
        if short and not self._is_short:
            _log.error(
                "no file descriptor is left: new connections and files have to wait",
                problem=short,
                limit=descriptor_limit(),
                connections=sum(peer is not None for peer in self._known.values()),
                without_identity=unknown,
                times=self.short,
            )
        self._is_short = bool(short)


def add_connections(page: MetricsPage, service: str) -> None:
    """Add what was done about connections to the metrics of a service."""
    prefix = f"gpuscale_{service}"
    cut = Family(f"{prefix}_connections_cut_total", "counter", "Connections cut for showing no identity.")
    shortages = "Looks at which no file descriptor was left (EMFILE)."
    page.add(cut, "", Connections.cut)
    page.add(Family(f"{prefix}_descriptor_shortages_total", "counter", shortages), "", Connections.short)


def _shortage() -> str:
    """What the system says where no descriptor is left (EMFILE, ENFILE); empty where there is one."""
    try:
        os.close(os.dup(2))
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def _sockets() -> Iterator[tuple[int, int]]:
    """Number and inode of each socket of this process."""
    fd = last = 3
    while fd < min(descriptor_limit(), last + _GAP):
        with suppress(OSError):
            found = os.fstat(fd)
            last = fd
            if stat.S_ISSOCK(found.st_mode):
                yield fd, found.st_ino
        fd += 1


def _peer(fd: int, port: int) -> str | None:
    """Who connected to the port; None for a socket that is no such connection."""
    try:
        opened = socket.socket(fileno=fd)
    except OSError:  # closed meanwhile
        return None
    try:
        if opened.family not in {socket.AF_INET, socket.AF_INET6} or opened.getsockname()[1] != port:
            return None
        host, peer_port = opened.getpeername()[:2]
        return f"{_plain(host)}:{peer_port}"
    except OSError:  # it listens, or is gone
        return None
    finally:
        opened.detach()


def _cut(fd: int, inode: int) -> bool:
    """End a connection, as if its peer had; whoever serves it closes it."""
    with suppress(OSError):
        if os.fstat(fd).st_ino != inode:
            return False
        opened = socket.socket(fileno=fd)
        try:
            opened.shutdown(socket.SHUT_RDWR)
        finally:
            opened.detach()
        return True
    return False


def _key(peer: str) -> str:
    """A peer as sockets name it, of how gRPC and servers of HTTP do."""
    host, _, port = unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:")).rpartition(":")
    return f"{_plain(host)}:{port}"


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)

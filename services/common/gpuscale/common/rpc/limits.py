"""Limits of a server: call rates, and connections without an identity.

Each connection costs a descriptor. A connection without an authenticated caller is cut after `PATIENCE` seconds, whatever it
sends: half a request, HTTP/2 pings, calls without a token. If such connections exceed their share of the descriptors, those
who have the most lose some at once: the network its oldest, a local user the newest of its connections to a unix socket with a
path, where nobody is authenticated and which are not cut for their age. gRPC's core and uvicorn do not expose their sockets,
so connections are found among the descriptors of this process, even when none is left.
"""

import asyncio
import ipaddress
import os
import socket
import stat
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Container, Iterator
from contextlib import suppress
from functools import lru_cache
from typing import ClassVar, Final
from urllib.parse import unquote

from gpuscale.common.errors import UnauthenticatedError
from gpuscale.common.runtime.lifecycle import descriptor_limit
from gpuscale.common.runtime.logs import get_logger

BURST_SECONDS: Final = 2.0
"""A bucket holds the calls of this many seconds, at least one."""
MOST_CALLERS: Final = 10_000
"""Maximum number of buckets; the least recently used is dropped."""


class RateLimits:
    """Token buckets by caller, each of whom may make `calls_per_second` in the long run."""

    def __init__(self, calls_per_second: float) -> None:
        self._rate = calls_per_second
        self._most = max(1.0, calls_per_second * BURST_SECONDS)
        self._buckets = OrderedDict[str, tuple[float, float]]()  # by caller: calls left, and at what time

    def take(self, caller: str, now: float) -> float:
        """Take one call from the caller's bucket; returns 0, or the seconds until one is available."""
        left, seen = self._buckets.pop(caller, (self._most, now))
        left = min(self._most, left + (now - seen) * self._rate)
        allowed = left >= 1
        self._buckets[caller] = (left - 1 if allowed else left), now
        if len(self._buckets) > MOST_CALLERS:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) / self._rate


REFUSALS_PERIOD: Final = 60.0
"""Minimum seconds between two log lines about callers without a valid identity."""


class Refusals:
    """Logs callers without a valid identity, at most once a minute, with the number of those not shown."""

    def __init__(self) -> None:
        self._next = float("-inf")
        self._not_shown = 0

    def note(self, peer: str, error: UnauthenticatedError, now: float) -> None:
        """Log a rejected caller."""
        if now < self._next:
            self._not_shown += 1
            return
        not_shown, self._not_shown, self._next = self._not_shown, 0, now + REFUSALS_PERIOD
        _log.warning(
            "a caller has no valid identity",
            peer=peer,
            reason=error.reason,
            error=error.message,
            not_shown=not_shown,
        )


LOOK_PERIOD: Final = 5.0
"""Seconds between two checks of connections."""
PATIENCE: Final = 40.0
"""Seconds after which a connection without an identity is cut at the next check."""
SHARE: Final = 0.25
"""Maximum share of the descriptors for connections without an identity."""
MOST_UNKNOWN: Final = 4096
"""Maximum number of connections without an identity."""
_GAP: Final = 1024
"""Free numbers after which no more descriptors are expected: the lowest free number is assigned first."""
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid of the peer."""
_BY_PATH: Final = "by its path, user "
"""Peer of a unix socket with a path, followed by its uid. gRPC gives all of them one name, so none counts as authenticated, and only
the share limits them."""


_log = get_logger(__name__)


class Connections:
    """Incoming connections to ports of this process and to its unix sockets.

    Attributes:
        vouched: peers (as gRPC writes them, or HOST:PORT) with an authenticated caller, and their open requests, or 1.
            Whoever authenticates a caller adds its peer.
        cut: number of connections cut in this process.
        short: number of checks without a free descriptor (EMFILE) in this process.
    """

    cut: ClassVar[int] = 0
    short: ClassVar[int] = 0

    def __init__(self) -> None:
        self.vouched: dict[str, int] = {}
        self._known: dict[int, str | None] = {}
        self._since: dict[int, float] = {}
        self._is_short = False

    def begin(self, peer: str) -> None:
        """A full request has arrived from `peer`, whose connection is kept until `end`."""
        self.vouched[peer] = self.vouched.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        """A request from `peer` was answered."""
        left = self.vouched.get(peer, 0) - 1
        if left > 0:
            self.vouched[peer] = left
        else:
            self.vouched.pop(peer, None)

    async def watch(self, *ports: int) -> None:
        """Check every few seconds until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            await asyncio.to_thread(self.look, ports, time.monotonic())

    def look(self, ports: Container[int], now: float) -> None:
        """Cut connections without an identity that are too old or exceed their share."""
        # First: then each of these connections is found below, or has ended.
        raw = {peer: _key(peer) for peer in tuple(self.vouched)}
        sockets, known = tuple(_sockets()), self._known
        self._known = {inode: known[inode] if inode in known else _peer(fd, ports) for fd, inode in sockets}
        there = {inode: (fd, peer) for fd, inode in sockets if (peer := self._known[inode]) is not None}
        peers = {peer for _, peer in there.values()}
        vouched = set(raw.values())
        for name, key in raw.items():
            if key not in peers:
                self.vouched.pop(name, None)
        self._since = {
            inode: self._since.get(inode, now) for inode, (_, peer) in there.items() if peer not in vouched
        }
        oldest = sorted(self._since, key=self._since.__getitem__)
        self._note_shortage(len(oldest))  # before cutting frees some
        share = min(MOST_UNKNOWN, int(descriptor_limit() * SHARE))
        by_path = {inode: there[inode][1] for inode in oldest if there[inode][1].startswith(_BY_PATH)}
        held, nth = Counter[str](), dict[int, int]()
        for inode in (*by_path, *(one for one in reversed(oldest) if one not in by_path)):
            whose = by_path.get(inode, "")
            nth[inode] = held[whose]
            held[whose] += 1
        beyond = sorted(nth, key=nth.__getitem__)[share:]  # ordered round-robin over the owners
        late = (one for one in oldest if one not in by_path and now - self._since[one] >= PATIENCE)
        for inode in {*beyond, *late}:
            fd = there[inode][0]
            with suppress(OSError):
                if os.fstat(fd).st_ino == inode:
                    opened = socket.socket(fileno=fd)
                    try:
                        opened.shutdown(socket.SHUT_RDWR)  # its server then closes it
                    finally:
                        opened.detach()
                    Connections.cut += 1

    def _note_shortage(self, unknown: int) -> None:
        """Count a check without a free descriptor (EMFILE, ENFILE), and log the first in a row."""
        short = ""
        try:
            os.close(os.dup(2))
        except OSError as error:
            short = error.strerror or type(error).__name__
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


def _sockets() -> Iterator[tuple[int, int]]:
    """Descriptor and inode of each socket; probes numbers if no descriptor is left to list them."""
    try:
        with os.scandir("/proc/self/fd") as entries:
            listed = [int(entry.name) for entry in entries]
    except OSError:
        listed, number = list[int](), 3
        while number < min(descriptor_limit(), (listed or [3])[-1] + _GAP):
            with suppress(OSError):
                os.fstat(number)
                listed.append(number)
            number += 1
    for fd in listed:
        with suppress(OSError):
            found = os.fstat(fd)
            if stat.S_ISSOCK(found.st_mode):
                yield fd, found.st_ino


def _peer(fd: int, ports: Container[int]) -> str | None:
    """Name of the peer of an incoming connection; None for any other socket."""
    try:
        opened = socket.socket(fileno=fd)
    except OSError:  # closed meanwhile
        return None
    try:
        if opened.family == socket.AF_UNIX:
            # Only accepted sockets have a name, bytes for an abstract one; outgoing ones have none.
            named, _ = opened.getsockname(), opened.getpeername()
            if not named:
                return None
            pid, uid, _ = _CREDENTIALS.unpack(
                opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if not isinstance(named, bytes):
                return f"{_BY_PATH}{uid}"
            return f"process {pid}" if pid != os.getpid() else None
        if opened.family not in {socket.AF_INET, socket.AF_INET6} or opened.getsockname()[1] not in ports:
            return None
        host, peer_port = opened.getpeername()[:2]
        return f"{_plain(host)}:{peer_port}"
    except OSError:  # a listening socket, or closed
        return None
    finally:
        opened.detach()


def _key(peer: str) -> str:
    """Normalize a peer of gRPC or an HTTP server to HOST:PORT."""
    host, _, port = unquote(peer.removeprefix("ipv4:").removeprefix("ipv6:")).rpartition(":")
    return f"{_plain(host)}:{port}"


@lru_cache(8192)  # of each connection, with every look
def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)

"""What a server takes from whom: how often each caller may call, and which connections last.

A connection costs a descriptor, whether anybody calls over it or not. One over which no caller has been recognised is cut
after `PATIENCE` seconds, whatever else it does: half a request, HTTP/2 pings, calls without a token. Where there are more of
these than their share of the descriptors, who has the most loses some at once: the network its oldest, a user of this host
the newest of its connections to a socket with a path, which last and which nobody recognises. Servers (gRPC's core, uvicorn)
keep their sockets to themselves, so that connections are found by looking at the descriptors of this process, also when there
are none left.
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
from typing import ClassVar, Final
from urllib.parse import unquote

from gpuscale.common.errors import UnauthenticatedError
from gpuscale.common.runtime.lifecycle import descriptor_limit
from gpuscale.common.runtime.logs import get_logger

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


REFUSALS_PERIOD: Final = 60.0
"""Seconds between two lines about callers without a valid identity."""


class Refusals:
    """Logs callers that show no valid identity: the first at once, then at most one each minute, with the number of the others."""

    def __init__(self) -> None:
        self._next = float("-inf")
        self._not_shown = 0

    def note(self, peer: str, error: UnauthenticatedError, now: float) -> None:
        """A caller was turned away."""
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
"""Seconds between two looks."""
PATIENCE: Final = 40.0
"""Seconds that a connection may last without an identity; it is cut at the next look."""
SHARE: Final = 0.25
"""The part of all descriptors that connections without an identity may have."""
MOST_UNKNOWN: Final = 4096
"""How many of these there may be, however many descriptors there are."""
_GAP: Final = 1024
"""Unused numbers after which no descriptor is expected: the lowest free number is given out first."""
_CREDENTIALS: Final = struct.Struct("3i")
"""`struct ucred`: pid, uid and gid of who connected."""
_BY_PATH: Final = "by its path, user "
"""Who connected to a socket with a path, and the uid. gRPC calls all of them alike, so that none is recognised: only the share
bounds them."""


_log = get_logger(__name__)


class Connections:
    """The connections that others made to ports of this process, and to its internal socket.

    Attributes:
        vouched: by peer, as gRPC writes it or HOST:PORT, where a caller was recognised: its requests under way, or 1. Who
            recognises a caller adds its peer.
        cut: connections that were cut, at any port of this process.
        short: looks at which there was no descriptor left (EMFILE), likewise.
    """

    cut: ClassVar[int] = 0
    short: ClassVar[int] = 0

    def __init__(self) -> None:
        self.vouched: dict[str, int] = {}
        self._known: dict[int, str | None] = {}
        self._since: dict[int, float] = {}
        self._is_short = False

    def begin(self, peer: str) -> None:
        """A request of the connection from `peer` has arrived in full: it may last until `end`."""
        self.vouched[peer] = self.vouched.get(peer, 0) + 1

    def end(self, peer: str) -> None:
        """A request has been answered."""
        left = self.vouched.get(peer, 0) - 1
        if left > 0:
            self.vouched[peer] = left
        else:
            self.vouched.pop(peer, None)

    async def watch(self, *ports: int) -> None:
        """Look every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_PERIOD)
            await asyncio.to_thread(self.look, ports, time.monotonic())

    def look(self, ports: Container[int], now: float) -> None:
        """Cut what has lasted for too long without an identity, and what is beyond the share of such."""
        # First: the connections of these are all there, or have ended.
        raw = {said: _key(said) for said in tuple(self.vouched)}
        sockets, known = tuple(_sockets()), self._known
        self._known = {inode: known[inode] if inode in known else _peer(fd, ports) for fd, inode in sockets}
        there = {inode: (fd, peer) for fd, inode in sockets if (peer := self._known[inode]) is not None}
        peers = {peer for _, peer in there.values()}
        vouched = set(raw.values())
        for said, key in raw.items():
            if key not in peers:
                self.vouched.pop(said, None)
        self._since = {
            inode: self._since.get(inode, now) for inode, (_, peer) in there.items() if peer not in vouched
        }
        oldest = sorted(self._since, key=self._since.__getitem__)
        self._note_shortage(len(oldest))  # before anything is cut
        share = min(MOST_UNKNOWN, int(descriptor_limit() * SHARE))
        by_path = {inode: there[inode][1] for inode in oldest if there[inode][1].startswith(_BY_PATH)}
        held, nth = Counter[str](), dict[int, int]()
        for inode in (*by_path, *(one for one in reversed(oldest) if one not in by_path)):
            whose = by_path.get(inode, "")
            nth[inode] = held[whose]
            held[whose] += 1
        beyond = sorted(nth, key=nth.__getitem__)[share:]  # first everybody's first, then everybody's second
        late = (one for one in oldest if one not in by_path and now - self._since[one] >= PATIENCE)
        for inode in {*beyond, *late}:
            Connections.cut += _cut(there[inode][0], inode)

    def _note_shortage(self, unknown: int) -> None:
        """Count a look at which no descriptor is left (EMFILE, ENFILE), and log the first of them."""
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
    """Number and inode of each socket of this process; by the kernel's list of descriptors, or without one where none is left."""
    try:
        with os.scandir("/proc/self/fd") as entries:
            listed = [int(entry.name) for entry in entries]
    except OSError:
        listed = list(_used())
    for fd in listed:
        with suppress(OSError):
            found = os.fstat(fd)
            if stat.S_ISSOCK(found.st_mode):
                yield fd, found.st_ino


def _used() -> Iterator[int]:
    fd = last = 3
    while fd < min(descriptor_limit(), last + _GAP):
        with suppress(OSError):
            os.fstat(fd)
            last = fd
            yield fd
        fd += 1


def _peer(fd: int, ports: Container[int]) -> str | None:
    """Who connected to a port, or which other process to the internal socket; None for any other socket."""
    try:
        opened = socket.socket(fileno=fd)
    except OSError:  # closed meanwhile
        return None
    try:
        if opened.family == socket.AF_UNIX:
            # Only what this process accepted has a name, abstract ones as bytes: what it connected has none of its own.
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

"""The connections of a server: those that show no identity end soon, and never take all file descriptors.

A connection costs a descriptor, whether anybody calls over it or not. One over which no caller has been recognised is cut
after `PATIENCE` seconds, whatever else it does: half a request, HTTP/2 pings, calls without a token. Where there are more of
these than their share of the descriptors, the oldest are cut at once.

Servers (gRPC's core, uvicorn) keep their sockets to themselves, so that connections are found by looking at the descriptors of
this process. That takes no descriptor, and works when there are none left.
"""

import asyncio
import ipaddress
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar, Final
from urllib.parse import unquote

from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.metrics_text import Family, MetricsPage

PERIOD: Final = 5.0
"""Seconds between two looks."""
PATIENCE: Final = 40.0
"""Seconds that a connection may last without an identity; it is cut at the next look."""
SHARE: Final = 0.25
"""The part of all descriptors that connections without an identity may have."""
MOST: Final = 4096
"""How many of these there may be, however many descriptors there are."""
LARGEST_LIMIT: Final = 1 << 20
"""Descriptors that are asked for at most: some programs, and children of ours, walk through all that there may be."""
_GAP: Final = 1024
"""Unused numbers after which no descriptor is expected: the lowest free number is given out first."""

_log = get_logger(__name__)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as its hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LARGEST_LIMIT if hard == resource.RLIM_INFINITY else min(hard, LARGEST_LIMIT)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
            await asyncio.sleep(PERIOD)
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
        beyond = max(0, len(oldest) - min(MOST, int(descriptor_limit() * SHARE)))
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


def descriptor_limit() -> int:
    """How many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return LARGEST_LIMIT if soft == resource.RLIM_INFINITY else soft


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

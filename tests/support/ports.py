"""TCP ports on the loopback address."""

import os
import secrets
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count

PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections, which take a port that nobody listens on, and above those
that Ray keeps for its workers: it refuses to start with a port of its own among them."""
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OWN = PORTS[_WORKER :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))]
"""Those that no other process of this run gives."""
_numbers = count(secrets.randbelow(len(_OWN)))


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listened on a moment ago, and that is given only once in this run.

    Another program may still take it before the caller binds; servers that can bind port 0 themselves should.
    """
    for number in _numbers:
        port = _OWN[number % len(_OWN)]
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("count ends never")


@contextmanager
def silent_port() -> Generator[int]:
    """A port on 127.0.0.1 that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def listens(port: int) -> bool:
    """True if something accepts connections on this port of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0

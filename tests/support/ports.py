"""TCP ports on the loopback address."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listened on a moment ago.

    Another program may still take it before the caller binds; servers that can bind port 0 themselves should.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        address: tuple[str, int] = probe.getsockname()
        return address[1]


@contextmanager
def silent_port() -> Iterator[int]:
    """A port on 127.0.0.1 that refuses connections, and that nobody else gets meanwhile."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as kept:
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def listens(port: int) -> bool:
    """True if something accepts connections on this port of 127.0.0.1."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0

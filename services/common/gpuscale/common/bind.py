"""Addresses to listen on: what they say, and why one could not be bound."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host and port; `host` is without brackets."""

    host: str
    port: int

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it. A name other than localhost may resolve to anything."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(listen: str) -> ListenAddress:
    """Read HOST:PORT or [IPV6]:PORT.

    Raises:
        InvalidArgumentError: it is neither.
    """
    host, colon, port = listen.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    valid_port = port.isascii() and port.isdigit() and int(port) <= _MAX_PORT
    if not (colon and host and valid_port) or (":" in host) != bracketed:
        raise InvalidArgumentError(f"{listen!r} is no address to listen on: HOST:PORT is", field="listen")
    return ListenAddress(host, int(port))


def bind_error(address: ListenAddress) -> FailedPreconditionError:
    """Why gRPC could not bind an address: gRPC itself does not say, so the address is tried once more."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return FailedPreconditionError(f"another program listens on {address}", reason="ADDRESS_IN_USE")
        return FailedPreconditionError(f"cannot listen on {address}: {error.strerror}", reason="BIND_FAILED")
    return FailedPreconditionError(f"cannot listen on {address}", reason="BIND_FAILED")

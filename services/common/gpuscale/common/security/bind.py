"""Addresses to listen on: what they say, and why one could not be bound."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.runtime.logs import get_logger

_MAX_PORT = 65_535
_log = get_logger(__name__)


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


def check_exposure(address: ListenAddress, *, tls: bool, insecure_allow_remote: bool) -> None:
    """Refuse to serve other hosts in plain text, unless that was asked for.

    Raises:
        FailedPreconditionError: it was not (reason INSECURE_BIND).
    """
    if tls or address.loopback:
        return
    if not insecure_allow_remote:
        raise FailedPreconditionError(
            f"{address} can be reached from other hosts: configure TLS, or set insecure_allow_remote",
            reason="INSECURE_BIND",
        )
    _log.warning(
        "serving other hosts in plain text: anyone on the network can listen in", listen=str(address)
    )


def bind_error(address: ListenAddress) -> FailedPreconditionError:
    """Why an address could not be bound: gRPC itself does not say, so the address is tried once more."""
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

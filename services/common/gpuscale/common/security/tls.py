"""TLS of servers, of gRPC and of `/metrics`: certificates from files, read again when they change."""

import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.followed import Followed, cause

_ROUNDS: Final = 4  # more than a handshake takes


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext) -> ssl.SSLObject:
    """A handshake in memory; the client's side of it.

    Raises:
        ssl.SSLError: it fails; `SSLCertVerificationError` where one side refuses the certificate of the other.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    for _ in range(_ROUNDS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return sides[0]


def end_of(cert_file: Path, key_file: Path) -> datetime | None:
    """When a certificate expires; None if it has expired or is not valid yet.

    Raises:
        OSError: the files cannot be used.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(cert_file)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is what is trusted
    try:
        shown = shake_hands(client, server).getpeercert()
    except ssl.SSLCertVerificationError:
        return None
    end = (shown or {}).get("notAfter")
    return datetime.fromtimestamp(ssl.cert_time_to_seconds(end), UTC) if isinstance(end, str) else None


SOON = timedelta(days=2)
"""A certificate that ends within this is warned of, at each start and each change."""

CLIENT_PERIOD: Final = 1.0
"""Least seconds between two looks at the TLS files of a client."""

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of a server's TLS, all PEM. With `client_ca_file`, clients must show a certificate of that authority."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def files(self) -> Iterator[Path]:
        """Every file that is configured."""
        yield self.cert_file
        yield self.key_file
        if self.client_ca_file is not None:
            yield self.client_ca_file


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: new connections use what the files hold now, open ones live on.

    Raises:
        FailedPreconditionError: a file cannot be read, or certificate and key do not fit (reason TLS_FILES).
    """
    files = _follow(tls, _configuration)
    newer: Any = files.newer  # None while the one in use stays: gRPC's stub omits that case
    return grpc.dynamic_ssl_server_credentials(
        files.current, newer, require_client_authentication=tls.client_ca_file is not None
    )


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """A context for asyncio servers that follows the files, the client authority included.

    Raises:
        FailedPreconditionError: as `server_credentials`.
    """
    files = _follow(tls, _context)

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext) -> None:
        """In each handshake, give the connection the newest certificate."""
        connection.context = files.newer() or files.current

    context = files.current
    context.sni_callback = choose
    return context


def follow_client(ca_file: Path, cert_file: Path | None, key_file: Path | None) -> Followed[ssl.SSLContext]:
    """The TLS files of a client; what does not fit together yet is no change.

    Raises:
        FailedPreconditionError: a file cannot be read, or certificate and key do not fit (reason TLS_FILES).
    """
    files = [file for file in (ca_file, cert_file, key_file) if file is not None]

    def load() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
        return context

    try:
        return Followed("TLS files of a client", files, load, CLIENT_PERIOD)
    except OSError as error:
        message = f"TLS files cannot be used: {cause(error)}"
        raise FailedPreconditionError(message, reason="TLS_FILES") from error


def _follow(tls: ServerTls, load: Callable[[ServerTls], T]) -> Followed[T]:
    try:
        return Followed("TLS files", tuple(tls.files()), partial(load, tls))
    except OSError as error:
        message = f"TLS files cannot be used: {cause(error)}"
        raise FailedPreconditionError(message, reason="TLS_FILES") from error


def _context(tls: ServerTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(tls.cert_file, tls.key_file)
    if tls.client_ca_file is not None:
        context.load_verify_locations(tls.client_ca_file)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    """The files as gRPC takes them, checked; warns of a certificate that clients refuse now or soon."""
    _context(tls)
    file, end = str(tls.cert_file), end_of(tls.cert_file, tls.key_file)
    if end is None:
        _log.warning("the certificate has expired or is not valid yet: clients refuse it", file=file)
    elif (left := end - datetime.now(UTC)) < SOON:
        _log.warning("the certificate ends soon", file=file, days_left=left.days, ends=end.isoformat())
    client_ca = None if tls.client_ca_file is None else tls.client_ca_file.read_bytes()
    pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)

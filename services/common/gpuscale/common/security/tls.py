"""TLS of servers (gRPC and `/metrics`) and clients, from files that are reloaded when they change."""

import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.followed import Followed, cause

SOON = timedelta(days=2)
"""At a start or change, a certificate that expires this soon is logged as a warning."""

CLIENT_PERIOD: Final = 1.0
"""Minimum seconds between two checks of the TLS files of a client."""

_log = get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's TLS files, all PEM. With `client_ca_file`, clients need a certificate of that authority."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def files(self) -> Iterator[Path]:
        """The configured files."""
        yield self.cert_file
        yield self.key_file
        if self.client_ca_file is not None:
            yield self.client_ca_file


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Credentials that follow the files: new connections use their current content.

    Raises FailedPreconditionError: a file cannot be read, or certificate and key do not match (reason TLS_FILES).
    """

    def load() -> grpc.ServerCertificateConfiguration:
        """Check the files and load them; warns of a certificate that is or soon will be invalid."""
        _context(tls)
        from cryptography import x509  # 16 MB

        with suppress(ValueError):  # OpenSSL reads more than cryptography
            own = x509.load_pem_x509_certificate(tls.cert_file.read_bytes())
            file, now, end = str(tls.cert_file), datetime.now(UTC), own.not_valid_after_utc
            if not own.not_valid_before_utc <= now < end:
                _log.warning("the certificate has expired or is not valid yet: clients reject it", file=file)
            elif (left := end - now) < SOON:
                days, ends = left.days, end.isoformat()
                _log.warning("the certificate ends soon", file=file, days_left=days, ends=ends)
        client_ca = None if tls.client_ca_file is None else tls.client_ca_file.read_bytes()
        pair = (tls.key_file.read_bytes(), tls.cert_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)

    files = _follow("TLS files", tls.files(), load)
    newer: Any = files.newer  # may return None, which gRPC's stub omits
    return grpc.dynamic_ssl_server_credentials(
        files.current, newer, require_client_authentication=tls.client_ca_file is not None
    )


def server_context(tls: ServerTls) -> ssl.SSLContext:
    """A context for asyncio servers that follows the files. Raises as `server_credentials`."""
    files = _follow("TLS files", tls.files(), partial(_context, tls))

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _: ssl.SSLContext) -> None:
        """Use the current files in each handshake."""
        connection.context = files.newer() or files.current

    context = files.current
    context.sni_callback = choose
    return context


def follow_client(ca_file: Path, cert_file: Path | None, key_file: Path | None) -> Followed[ssl.SSLContext]:
    """Follow the TLS files of a client. Raises as `server_credentials`."""
    files = [file for file in (ca_file, cert_file, key_file) if file is not None]

    def load() -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
        return context

    return _follow("TLS files of a client", files, load, CLIENT_PERIOD)


def _follow(what: str, files: Iterable[Path], load: Callable[[], T], period: float = 0.0) -> Followed[T]:
    try:
        return Followed(what, tuple(files), load, period)
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

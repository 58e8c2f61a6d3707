"""TLS of servers, of gRPC and of `/metrics`: certificates from files, read again when they change."""

import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import grpc

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger

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
    """When a certificate ends; None where that is over, or it has not begun.

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


SOON = timedelta(days=14)
"""A certificate that ends within this is warned of, at each start and each change."""

_log = get_logger(__name__)

_Signature = tuple[tuple[int, int, int], ...]


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
    files = _CertificateFiles(tls)
    return grpc.dynamic_ssl_server_credentials(
        files.current, files.newer, require_client_authentication=tls.client_ca_file is not None
    )


class _CertificateFiles:
    """The certificate in use, and the check for a newer one that core makes at each handshake (in its own thread)."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        try:
            self._seen = _signature(self._tls)
            self.current = self._read()
            self._tell_end()
        except OSError as error:  # ssl.SSLError is one of them
            message = f"TLS files cannot be used: {_cause(error)}"
            raise FailedPreconditionError(message, reason="TLS_FILES") from error

    def newer(self) -> Any:
        """The configuration of files that changed; None while the one in use stays (gRPC's stub omits that case)."""
        with self._lock:
            try:
                signature = _signature(self._tls)
                if signature == self._seen:
                    return None
                self._seen = signature
                self.current = self._read()
                self._tell_end()
            except OSError as error:
                _log.warning("new TLS files cannot be used, the old certificate stays", problem=_cause(error))
                return None
            _log.info("TLS certificate replaced", file=str(self._tls.cert_file))
            return self.current

    def _tell_end(self) -> None:
        """Warn of a certificate that clients refuse, or will before long."""
        file, end = str(self._tls.cert_file), end_of(self._tls.cert_file, self._tls.key_file)
        if end is None:
            _log.warning("the certificate has expired or is not valid yet: clients refuse it", file=file)
        elif (left := end - datetime.now(UTC)) < SOON:
            _log.warning("the certificate ends soon", file=file, days_left=left.days, ends=end.isoformat())

    def _read(self) -> grpc.ServerCertificateConfiguration:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        client_ca = None
        if self._tls.client_ca_file is not None:
            context.load_verify_locations(self._tls.client_ca_file)
            client_ca = self._tls.client_ca_file.read_bytes()
        pair = (self._tls.key_file.read_bytes(), self._tls.cert_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)


def _signature(tls: ServerTls) -> _Signature:
    stats = [path.stat() for path in tls.files()]
    return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)


def _cause(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


class FollowedCertificate:
    """A TLS context whose new connections use what the files hold now, the authority of clients' certificates too.

    Raises:
        FailedPreconditionError: a file cannot be read, or certificate and key do not fit (reason TLS_FILES).
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        try:
            self._seen = _signature(self._tls)
            self.context = self._newest = self._load()
        except OSError as error:  # ssl.SSLError is one of them
            raise FailedPreconditionError(f"TLS files cannot be used: {error}", reason="TLS_FILES") from error
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called in each handshake: give the connection the newest certificate."""
        del name, context
        try:
            signature = _signature(self._tls)
            if signature != self._seen:
                self._seen = signature
                self._newest = self._load()
                _log.info("TLS certificate replaced", file=str(self._tls.cert_file))
        except OSError as error:
            _log.warning("new TLS files cannot be used, the old certificate stays", problem=_cause(error))
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        if self._tls.client_ca_file is not None:
            context.load_verify_locations(self._tls.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

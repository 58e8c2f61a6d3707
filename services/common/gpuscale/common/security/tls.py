"""TLS of servers: certificates from files, read again when they change."""

import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.certificate_dates import end_of

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
            self._seen = self._signature()
            self.current = self._read()
            self._tell_end()
        except OSError as error:  # ssl.SSLError is one of them
            message = f"TLS files cannot be used: {_cause(error)}"
            raise FailedPreconditionError(message, reason="TLS_FILES") from error

    def newer(self) -> Any:
        """The configuration of files that changed; None while the one in use stays (gRPC's stub omits that case)."""
        with self._lock:
            try:
                signature = self._signature()
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

    def _signature(self) -> _Signature:
        stats = [path.stat() for path in self._tls.files()]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

    def _read(self) -> grpc.ServerCertificateConfiguration:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        client_ca = None
        if self._tls.client_ca_file is not None:
            context.load_verify_locations(self._tls.client_ca_file)
            client_ca = self._tls.client_ca_file.read_bytes()
        pair = (self._tls.key_file.read_bytes(), self._tls.cert_file.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=client_ca)


def _cause(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)

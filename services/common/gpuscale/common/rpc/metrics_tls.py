"""TLS of `/metrics`: the server's certificate from files, read again when they change."""

import ssl

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.security.tls import ServerTls

_log = get_logger(__name__)


class FollowedCertificate:
    """A TLS context whose new connections use what the files hold now.

    The authority of clients' certificates is read once: OpenSSL keeps that of the context a connection began with.

    Raises:
        FailedPreconditionError: a file cannot be read, or certificate and key do not fit (reason TLS_FILES).
    """

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        try:
            self._seen = self._signature()
            self.context = self._newest = self._load()
            if tls.client_ca_file is not None:
                self.context.load_verify_locations(tls.client_ca_file)
                self.context.verify_mode = ssl.CERT_REQUIRED
        except OSError as error:  # ssl.SSLError is one of them
            raise FailedPreconditionError(f"TLS files cannot be used: {error}", reason="TLS_FILES") from error
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, context: ssl.SSLContext
    ) -> None:
        """Called in each handshake: give the connection the newest certificate."""
        del name, context
        try:
            signature = self._signature()
            if signature != self._seen:
                self._seen = signature
                self._newest = self._load()
        except OSError as error:
            _log.warning("new TLS files cannot be used, the old certificate stays", problem=str(error))
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self._tls.cert_file, self._tls.key_file)
        return context

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in (self._tls.cert_file, self._tls.key_file)]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in stats)

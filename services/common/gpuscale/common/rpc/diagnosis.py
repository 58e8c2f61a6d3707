"""Explains why a server does not answer: gRPC reports any TLS problem as UNAVAILABLE, so we do a handshake of our own.

Only the handshake is sent, never a token. The verification codes are OpenSSL's (`x509_vfy.h`).
"""

import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpuscale.common.errors import GpuscaleError, UnavailableError
from gpuscale.common.rpc.channel import ClientTls
from gpuscale.common.rpc.wrapped_channel import NEVER_SENT

PATIENCE = 2.0
"""Maximum seconds of a step."""
STEPS = 3
"""Connect, handshake, and the verdict of the server on our certificate."""
_ROUNDS = 4  # more than a handshake needs
LEAST = 0.02
"""Minimum seconds for a step to be worth a try."""

Explain = Callable[[UnavailableError], GpuscaleError]
"""Returns a better error if it finds one. Blocks."""


class _Cause(NamedTuple):
    text: str
    reason: str


_AUTHORITY = _Cause(
    "the certificate of {address} was not issued by the authority in {ca}", reason="UNKNOWN_AUTHORITY"
)
_VERIFICATION: Mapping[int, _Cause] = {
    9: _Cause("the certificate of {address} is not valid yet", reason="CERTIFICATE_EXPIRED"),
    10: _Cause(
        "the certificate of {address} has expired: it must be renewed there", reason="CERTIFICATE_EXPIRED"
    ),
    18: _Cause(
        "the certificate of {address} is self-signed and not the one in {ca}", reason="UNKNOWN_AUTHORITY"
    ),
    **dict.fromkeys((19, 20, 21), _AUTHORITY),
    62: _Cause("the certificate of {address} is for another host name", reason="OTHER_HOST"),
    64: _Cause("the certificate of {address} is for another IP address", reason="OTHER_HOST"),
}
_OURS: Mapping[int, _Cause] = {
    9: _Cause(
        "{address} refuses the client certificate {cert}: it is not valid yet", reason="CLIENT_CERTIFICATE"
    ),
    10: _Cause(
        "{address} refuses the client certificate {cert}: it has expired", reason="CLIENT_CERTIFICATE"
    ),
    **dict.fromkeys(
        (19, 20),
        _Cause(
            "{address} refuses the client certificate {cert}: it was not issued by {ca}",
            reason="CLIENT_CERTIFICATE",
        ),
    ),
}
_UNWANTED = _Cause(
    "{address} refuses the client certificate {cert}: it requires one issued by the authority in its --tls-client-ca-file",
    reason="CLIENT_CERTIFICATE",
)
_WANTED = _Cause(
    "{address} wants a client certificate: --cert-file and --key-file", reason="CLIENT_CERTIFICATE"
)
_NOT_TLS = _Cause(
    "{address} does not speak TLS: leave the CA file out, or switch TLS on there", reason="PLAINTEXT_SERVER"
)
_TLS = _Cause("{address} speaks TLS: name its authority with --ca-file", reason="TLS_SERVER")

_UNREACHED: Sequence[tuple[str, str]] = (
    ("connection refused", "connection refused"),
    ("resol", "no host has that name"),
    ("lookup", "no host has that name"),
    ("http/2", "what listens there speaks no gRPC"),
    ("reset", "it closes the connection at once"),
    ("broken pipe", "it closes the connection at once"),
    ("closed", "it closes the connection at once"),
    ("unreachable", "no route to it"),
    ("no route", "no route to it"),
    ("no such file", "there is no such socket"),
    ("permission denied", "its socket is not for this user"),
    ("timed out", "it did not answer in time"),
    ("timeout", "it did not answer in time"),
)
"""Substrings of gRPC's lower-cased messages on failed connection attempts, and what they mean."""
_LOST = (
    "socket closed",
    "connection reset",
    "broken pipe",
    "goaway",
    "ping timeout",
    "keepalive",
    "endpoint closing",
    "transport closed",
    "cancelling all calls",
)
"""Substrings of gRPC's lower-cased messages on lost connections."""


def worded(address: str, error: UnavailableError) -> UnavailableError:
    """Reword gRPC's own errors: nothing answers (NO_ANSWER), or the connection was lost."""
    said = error.message.lower()
    why = next((words for sign, words in _UNREACHED if sign in said), "no connection")
    if error.message.startswith(NEVER_SENT):
        text = f"nothing answers at {address} ({why})"
        return UnavailableError(text, reason="NO_ANSWER", metadata={"address": address})
    if said.startswith("received http2 header with status"):
        return UnavailableError(f"no gpuscale server answers behind {address}: {error.message}")
    if any(sign in said for sign in _LOST):
        return UnavailableError(
            f"the connection to {address} was lost during the call, which may have been executed",
            metadata={"address": address},
        )
    return error


def explained(address: str, tls: ClientTls | None, error: UnavailableError, limit: float) -> GpuscaleError:
    """The error with its cause, if that can be found within `limit` seconds. Blocks for seconds."""
    if error.reason != UnavailableError.default_reason:  # from a service, not from gRPC
        return error
    found = error if address.startswith("unix") else _diagnosed(address, tls, error, limit)
    return worded(address, error) if found is error else found


def _diagnosed(address: str, tls: ClientTls | None, error: UnavailableError, limit: float) -> GpuscaleError:
    """The TLS problem as an error; `error` itself if none is found."""
    if "," in address:  # the first with a finding
        each = address.split(",")
        causes = (_diagnosed(part.strip(), tls, error, limit / len(each)) for part in each)
        return next((cause for cause in causes if cause is not error), error)
    patience = min(PATIENCE, limit / STEPS)
    if patience < LEAST:
        return error
    try:
        cause = _cause(address, tls, patience)
    except OSError:  # nothing listens, or unreadable files: gRPC says so too
        return error
    if cause is None:
        return error
    ca = (tls.ca_file if tls else None) or "the system's store"
    text = cause.text.format(address=address, ca=ca, cert=tls.cert_file if tls else None)
    return UnavailableError(text, reason=cause.reason, metadata={"address": address})


def _cause(address: str, tls: ClientTls | None, patience: float) -> _Cause | None:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (host and port.isdecimal()):
        return None
    with socket.create_connection((host, int(port)), patience) as connection:
        if tls is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            context.set_alpn_protocols(["h2"])
            try:
                context.wrap_socket(connection).close()
            except OSError:
                return None
            return _TLS
        context = ssl.create_default_context(cafile=tls.ca_file)
        context.set_alpn_protocols(["h2"])
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
        try:
            secured = context.wrap_socket(connection, server_hostname=host, suppress_ragged_eofs=False)
        except ssl.SSLCertVerificationError as error:
            text = f"the certificate of {{address}} cannot be trusted: {error.verify_message}"
            return _VERIFICATION.get(error.verify_code, _Cause(text, reason="UNKNOWN_AUTHORITY"))
        except TimeoutError:
            return None
        except (ssl.SSLError, ConnectionError):
            return _NOT_TLS
        with secured:
            try:
                greeted = bool(secured.recv(1))
            except TimeoutError:
                return None
            except (ssl.SSLError, ConnectionError):
                greeted = False
    if greeted:
        return None
    # The server closes after a bad certificate, which Debian's Python 3.11.2 reports as a plain EOF.
    return _WANTED if tls.cert_file is None else _OURS.get(_own_fault(tls, tls.cert_file), _UNWANTED)


def _own_fault(tls: ClientTls, cert_file: Path) -> int:
    """OpenSSL's code for the problem with our certificate, by the authority we trust; 0 for none.

    The server does not tell, so we do a handshake with a server in memory.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, tls.key_file)
    server.verify_mode = ssl.CERT_REQUIRED
    if tls.ca_file is not None:
        server.load_verify_locations(tls.ca_file)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_mode = ssl.CERT_NONE
    client.load_cert_chain(cert_file, tls.key_file)
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True))
    try:
        for side in sides * _ROUNDS:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_code
    return 0

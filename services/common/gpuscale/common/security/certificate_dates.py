"""When a certificate ends, found out with the standard library alone: it is shown to a caller in memory that trusts it."""

import ssl
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

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

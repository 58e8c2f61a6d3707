"""How a client finds its server and says who it is."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscale.client.async_calls import AsyncCalls
from gpuscale.client.client import AsyncClient, Client
from gpuscale.client.sync_calls import SyncCalls
from gpuscale.common.channel import RPC_TIMEOUT, ClientTls, open_channel, open_sync_channel
from gpuscale.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from pydantic import SecretStr
else:

    class SecretStr:
        """The part of pydantic's class that a channel needs; the client does not need pydantic."""

        def __init__(self, secret: str) -> None:
            self._secret = secret

        def get_secret_value(self) -> str:
            """The secret."""
            return self._secret


DEFAULT_ADDRESS = "127.0.0.1:7070"


def connect(
    address: str | None = None,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout: float = RPC_TIMEOUT,
) -> Client:
    """A sync client of a gateway, or of a single service. No call is made yet.

    Args:
        address: HOST:PORT; GPUSCALE_ADDRESS or 127.0.0.1:7070 when not given.
        token: the bearer token to send; what the file named by GPUSCALE_TOKEN_FILE holds when not given.
        tls: files of TLS; plaintext when not given.
        timeout: seconds for each unary call that names no timeout itself.

    Raises:
        FailedPreconditionError: the token file or a file of TLS cannot be read (TOKEN_FILE, TLS_FILES), or the token
            would travel in plain text (INSECURE_TRANSPORT).
    """
    address = address or default_address()
    channel = open_sync_channel(address, tls=tls, token=_token(token))
    return Client(SyncCalls(channel, timeout), address)


def connect_async(
    address: str | None = None,
    *,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout: float = RPC_TIMEOUT,
) -> AsyncClient:
    """`connect`, for the running event loop.

    Raises:
        FailedPreconditionError: the token file or a file of TLS cannot be read (TOKEN_FILE, TLS_FILES), or the token
            would travel in plain text (INSECURE_TRANSPORT).
    """
    address = address or default_address()
    channel = open_channel(address, tls=tls, token=_token(token))
    return AsyncClient(AsyncCalls(channel, timeout), address)


def default_address() -> str:
    """GPUSCALE_ADDRESS, or where `gpuscalectl up` listens."""
    return os.environ.get("GPUSCALE_ADDRESS") or DEFAULT_ADDRESS


def read_token(path: Path) -> str:
    """The bearer token in a file.

    Raises:
        FailedPreconditionError: it cannot be read (reason TOKEN_FILE).
    """
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error would show bytes of the file.
        message = f"cannot read the token file {path}: {type(error).__name__}"
        raise FailedPreconditionError(message, reason="TOKEN_FILE") from None


def _token(given: str | None) -> SecretStr | None:
    path = os.environ.get("GPUSCALE_TOKEN_FILE")
    token = given or (read_token(Path(path)) if path else None)
    return SecretStr(token) if token else None

"""How a client finds its server and says who it is."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpuscale.client.asks import as_seconds
from gpuscale.client.async_calls import AsyncCalls
from gpuscale.client.client import AsyncClient, Client
from gpuscale.client.contexts import Context, find_context
from gpuscale.client.sync_calls import SyncCalls
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc.channel import RPC_TIMEOUT, ClientTls, open_channel, open_sync_channel
from gpuscale.common.rpc.diagnosis import explained
from gpuscale.common.sizes import to_seconds

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
    context: str | None = None,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout: float | str = RPC_TIMEOUT,
    dial_timeout: float | str | None = None,
    node: str | None = None,
) -> Client:
    """A sync client of a gateway, or of a single service. No call is made yet.

    What is not given comes from the environment: GPUSCALE_ADDRESS, GPUSCALE_TOKEN_FILE, GPUSCALE_CA_FILE,
    GPUSCALE_CERT_FILE and GPUSCALE_KEY_FILE. What is not there either comes from the context (`gpuscale.client.contexts`):
    the one that is named, or else, where no address was given in either way, the current one.

    Args:
        address: HOST:PORT, or several with commas between of which one leads; 127.0.0.1:7070 where nothing says another.
        context: name of the context.
        token: the bearer token to send, instead of a file with one.
        tls: files of TLS; plain text where nothing says an authority.
        timeout: for each unary call that names no timeout itself: seconds, or a text such as `5s`.
        dial_timeout: that one attempt to connect may take; 5 s when not given.
        node: id of the node that this host is; what GPUSCALE_NODE says, or else is found out, when not given.

    Raises:
        FailedPreconditionError: a file cannot be read (CONTEXTS, TOKEN_FILE, TLS_FILES), there is no such context
            (CONTEXTS), or the token would travel in plain text (INSECURE_TRANSPORT).
        InvalidArgumentError: the address is none; the message says what is wrong with it.
    """
    way = _way(address, context, token, tls)
    channel = open_sync_channel(
        way.address, tls=way.tls, token=way.token, dial_timeout=as_seconds("dial_timeout", dial_timeout)
    )
    return Client(
        SyncCalls(channel, to_seconds(timeout), partial(explained, way.address, way.tls)), way.address, node
    )


def connect_async(
    address: str | None = None,
    *,
    context: str | None = None,
    token: str | None = None,
    tls: ClientTls | None = None,
    timeout: float | str = RPC_TIMEOUT,
    node: str | None = None,
) -> AsyncClient:
    """`connect`, for the running event loop.

    Raises:
        FailedPreconditionError: as `connect`.
    """
    way = _way(address, context, token, tls)
    channel = open_channel(way.address, tls=way.tls, token=way.token)
    return AsyncClient(
        AsyncCalls(channel, to_seconds(timeout), partial(explained, way.address, way.tls)), way.address, node
    )


@dataclass(frozen=True)
class _Way:
    """How a server is reached."""

    address: str
    token: SecretStr | None
    tls: ClientTls | None


def _way(address: str | None, context: str | None, token: str | None, tls: ClientTls | None) -> _Way:
    address = address or os.environ.get("GPUSCALE_ADDRESS")
    # The token of the current context is not for just any server that somebody names.
    found = find_context(context) if context or not address else Context()
    path = _file("TOKEN_FILE") or found.token_file
    secret = token or (read_token(path) if path else None)
    return _Way(
        address or found.address or DEFAULT_ADDRESS,
        SecretStr(secret) if secret else None,
        tls or _tls_of_environment() or found.tls,
    )


def _tls_of_environment() -> ClientTls | None:
    ca_file = _file("CA_FILE")
    return ClientTls(ca_file, _file("CERT_FILE"), _file("KEY_FILE")) if ca_file else None


def _file(name: str) -> Path | None:
    path = os.environ.get(f"GPUSCALE_{name}")
    return Path(path) if path else None


def read_token(path: Path) -> str:
    """The bearer token in a file.

    Raises:
        FailedPreconditionError: it cannot be read, or is empty (reason TOKEN_FILE).
    """
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error would show bytes of the file.
        message = f"cannot read the token file {path}: {type(error).__name__}"
        raise FailedPreconditionError(message, reason="TOKEN_FILE") from None
    if not token:  # calls without one would be refused, in words that do not say why
        raise FailedPreconditionError(f"the token file {path} is empty", reason="TOKEN_FILE")
    return token

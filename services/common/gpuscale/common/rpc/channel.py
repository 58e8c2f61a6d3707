"""Channels to gpuscale servers: keepalive, reconnecting with jitter, TLS and tokens. Imports gRPC and nothing heavier.

A channel reconnects by itself, 0.5 s after the first failure and at most every 10 s, each time with 20 % of jitter (gRPC
core adds it). It has connections of its own, so that closing one channel never hurts another. Several addresses, with
commas between, are one service: calls go to the one that leads (`gpuscale.common.rpc.wrapped_channel`).

The usual variables of a proxy (`https_proxy` and its kin) count for nothing. The variable GPUSCALE_HTTP_PROXY, a URL
http://HOST:PORT, names a proxy that tunnels connections with TLS; those without TLS never go through one.

The channel arguments are gRPC core's (`grpc_types.h`). A message of 4 MiB and metadata of 16 KiB are what gRPC admits by
default, stated so that both sides agree.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import grpc

from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc.wrapped_channel import (
    MakeMethod,
    SyncWrappedChannel,
    WrappedChannel,
    following,
    sync_following,
    with_header,
)

if TYPE_CHECKING:
    from pydantic import SecretStr

    Token = SecretStr | grpc.AuthMetadataPlugin
    """The same for all calls; or, over TLS, what gRPC asks for each call in a thread of its own."""

ChannelArguments = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
MAX_METADATA_BYTES: Final = 16 * 1024
MAX_STREAMS_PER_CONNECTION: Final = 1_000

COMMON_ARGUMENTS: Final[ChannelArguments] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
"""Of servers and channels alike."""
CHANNEL_ARGUMENTS: Final[ChannelArguments] = (
    *COMMON_ARGUMENTS,
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # calls bear tokens: they go through no proxy that just happens to be set
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: ping on while a stream is silent
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # the least time that one attempt to connect may take
)
URGENT_ARGUMENTS: ChannelArguments = (
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
"""Instead of some of these: TCP itself tries again after twice as long each time, so that a link of 30 s is found after 51."""
AGENT_SOCKET: Final = Path("/run/gpuscale/agent.sock")
"""Where this host's agent admits work in the shipped set-ups. Nobody but root and the agent can put a socket there."""
_OTHER_WAYS: Final = ("unix:", "unix-abstract:", "dns:///", "ipv4:", "ipv6:")
_USUAL_PORT: Final = 7070
_HIGHEST_PORT: Final = 65_535
PROXY_VARIABLE: Final = "GPUSCALE_HTTP_PROXY"
RPC_TIMEOUT: Final = 10.0
"""Seconds that a unary call gets where nothing else is said; pass it as `timeout`."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """A client's TLS files, all PEM. Without `ca_file` the system's authorities are trusted."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


def open_channel(
    address: str, *, tls: ClientTls | None = None, token: Token | None = None
) -> grpc.aio.Channel:
    """An asyncio channel to HOST:PORT or unix:/path; the caller closes it. Connects at the first call.

    Args:
        address: where the server listens; or where several do, with commas between, of which one leads.
        tls: switches TLS on.
        token: sent with every call; over TLS, to this host, or through a unix socket only.

    Raises:
        FailedPreconditionError: the token would travel in plain text (INSECURE_TRANSPORT), or a file cannot be read
            (TLS_FILES).
        InvalidArgumentError: an address is malformed, or named twice; or the token has characters that none has.
    """
    addresses = split_addresses(address)
    if len(addresses) > 1:
        return following(addresses, [open_channel(each, tls=tls, token=token) for each in addresses])
    header = _header(token, address, tls)
    if tls is None:
        channel = grpc.aio.insecure_channel(address, options=_arguments(tls))
    else:
        channel = grpc.aio.secure_channel(address, _credentials(tls, token), options=_arguments(tls))
    return channel if header is None else WrappedChannel([channel], header)


def open_sync_channel(
    address: str,
    *,
    tls: ClientTls | None = None,
    token: Token | None = None,
    dial_timeout: float | None = None,
    urgent: bool = False,
) -> grpc.Channel:
    """`open_channel` for code without an event loop; one attempt to connect takes `dial_timeout` seconds at most.

    An `urgent` one is for those who must be heard as soon as a lost network is back.
    """
    addresses = split_addresses(address)
    if len(addresses) > 1:
        opened = [
            open_sync_channel(each, tls=tls, token=token, dial_timeout=dial_timeout, urgent=urgent)
            for each in addresses
        ]
        return sync_following(addresses, opened)
    header = _header(token, address, tls)
    arguments = _arguments(tls, dial_timeout, URGENT_ARGUMENTS if urgent else ())
    if tls is None:
        channel = grpc.insecure_channel(address, options=arguments)
    else:
        channel = grpc.secure_channel(address, _credentials(tls, token), options=arguments)
    return channel if header is None else SyncWrappedChannel([channel], header)


def _arguments(
    tls: ClientTls | None, dial_timeout: float | None = None, own: ChannelArguments = ()
) -> ChannelArguments:
    """The arguments of a channel, with the proxy if one was asked for."""
    arguments = dict[str, int | str]((*CHANNEL_ARGUMENTS, *own))
    if dial_timeout is not None:
        arguments["grpc.min_reconnect_backoff_ms"] = max(1, round(dial_timeout * 1000))
    proxy = os.environ.get(PROXY_VARIABLE)
    if tls is not None and proxy:
        del arguments["grpc.enable_http_proxy"]
        arguments["grpc.http_proxy"] = proxy
    return tuple(arguments.items())


def _header(token: Token | None, address: str, tls: ClientTls | None) -> MakeMethod | None:
    """What sends a token that is the same for all calls."""
    if token is None:
        return None
    if tls is None and (isinstance(token, grpc.AuthMetadataPlugin) or not is_local(address)):
        raise FailedPreconditionError(
            f"a token would travel to {address} in plain text: configure TLS", reason="INSECURE_TRANSPORT"
        )
    if isinstance(token, grpc.AuthMetadataPlugin):
        return None
    secret = token.get_secret_value()
    if not re.fullmatch(r"[!-~]+", secret):
        raise InvalidArgumentError(
            "a token holds no blanks, line ends or characters beyond ASCII", field="token"
        )
    return with_header("authorization", f"Bearer {secret}")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses in `HOST:PORT,HOST:PORT`, or the single address.

    Raises:
        InvalidArgumentError: one is no address, or of several one is empty or stands there twice.
    """
    addresses = tuple(part.strip() for part in text.split(","))
    if len(addresses) > 1 and ("" in addresses or len(set(addresses)) < len(addresses)):
        raise InvalidArgumentError(
            f"{text!r} must name different addresses, with commas between", field="address"
        )
    for address in addresses:
        problem = _problem(address)
        if problem:
            raise InvalidArgumentError(f"the address {address!r} {problem}")
    return addresses


def _problem(address: str) -> str:
    """What is wrong with an address to connect to; empty if nothing is."""
    if address.startswith(_OTHER_WAYS):
        return ""
    scheme, found, rest = address.partition("://")
    if found:
        return f"has {scheme}:// before it: write {rest.rstrip('/')}"
    host, colon, port = address.rpartition(":")
    if not colon or address.endswith("]"):
        return f"has no port: write HOST:PORT, such as {address or '127.0.0.1'}:{_USUAL_PORT}"
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        return f"is ambiguous: write an IPv6 address in brackets, such as [::1]:{_USUAL_PORT}"
    if not (re.fullmatch("[0-9]+", port) and 0 < int(port) <= _HIGHEST_PORT):
        return f"has the port {port!r}: a port is a number from 1 to {_HIGHEST_PORT}"
    return "" if host else f"has no host: write HOST:PORT, such as 127.0.0.1:{port}"


def is_local(address: str) -> bool:
    """Whether an address is certainly on this host."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _credentials(tls: ClientTls, token: Token | None) -> grpc.ChannelCredentials:
    credentials = grpc.ssl_channel_credentials(_read(tls.ca_file), _read(tls.key_file), _read(tls.cert_file))
    if not isinstance(token, grpc.AuthMetadataPlugin):
        return credentials
    _never_closed()
    return grpc.composite_channel_credentials(credentials, grpc.metadata_call_credentials(token))


@cache
def _never_closed() -> grpc.Channel:
    """A channel that keeps gRPC's threads.

    Without it, who closes the last one waits for them with Python's own lock held, while one of them may wait for that lock to
    let go of a plugin: both wait for ever (pull request 42247 of grpc/grpc).
    """
    return grpc.insecure_channel("unix:/nobody")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"TLS file {path} cannot be read: {error.strerror}"
        raise FailedPreconditionError(message, reason="TLS_FILES") from error

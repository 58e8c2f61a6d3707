"""Channels to gpuscale servers: keepalive, reconnecting with jitter, TLS and tokens. Imports gRPC and nothing heavier.

A channel reconnects 0.5 s after the first failure, later at most every 10 s, with the 20 % jitter of gRPC core. Channels do
not share connections, so closing one never affects another. Comma-separated addresses are one service: calls go to its
leader (`gpuscale.common.rpc.wrapped_channel`).

The usual proxy variables (`https_proxy` and so on) are ignored. GPUSCALE_HTTP_PROXY, http://HOST:PORT, sets a proxy for
connections with TLS; those without TLS never use one.

The channel arguments are those of gRPC core (`grpc_types.h`). The limits of 4 MiB per message and 16 KiB of metadata are
gRPC's defaults, set explicitly so that both sides agree.
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
from gpuscale.common.rpc import wrapped_channel

if TYPE_CHECKING:
    from pydantic import SecretStr

    Token = SecretStr | grpc.AuthMetadataPlugin
    """A fixed token; or, over TLS, a plugin that gRPC asks for each call in a thread."""

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
"""For servers and channels."""
CHANNEL_ARGUMENTS: Final[ChannelArguments] = (
    *COMMON_ARGUMENTS,
    ("grpc.http2.ping_timeout_ms", 10_000),  # with core's, a frozen server is left after 80 s, not 30
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # calls carry tokens: use no proxy that happens to be set
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # 0: no limit, for silent streams
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # also the timeout of one attempt to connect
)
URGENT_ARGUMENTS: ChannelArguments = (
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
"""Overrides for urgent channels: with TCP's own backoff, a link that was down for 30 s would be noticed after 51 s."""
FOLLOWING_ARGUMENTS: ChannelArguments = (
    # Core sends no two pings within a second, and gives one that it delayed no keepalive timeout.
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
)
"""Overrides for several addresses: streams leave a leader that is silent for as long as its lease lasts (3 s)."""
AGENT_SOCKET: Final = Path("/run/gpuscale/agent.sock")
"""Socket where this host's agent admits work in the shipped setups. Only root and the agent can create it."""
_OTHER_WAYS: Final = ("unix:", "unix-abstract:", "dns:///", "ipv4:", "ipv6:")
_LONGEST_SOCKET_PATH: Final = 107
"""Most bytes of the path of a unix socket on Linux (`sun_path` of unix(7), less its end)."""
_USUAL_PORT: Final = 7070
_HIGHEST_PORT: Final = 65_535
PROXY_VARIABLE: Final = "GPUSCALE_HTTP_PROXY"
RPC_TIMEOUT: Final = 10.0
"""Default `timeout` of unary calls, in seconds."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """A client's TLS files, all PEM. Without `ca_file` those of the system are trusted."""

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None


def open_channel(
    address: str, *, tls: ClientTls | None = None, token: Token | None = None, urgent: bool = False
) -> grpc.aio.Channel:
    """An asyncio channel to HOST:PORT or unix:/path; the caller closes it. Connects at the first call.

    Of several comma-separated addresses, one leads. The token goes with every call; only over TLS, to this host, or through a
    unix socket. An `urgent` channel reconnects quickly when a lost network or server is back.

    Raises:
        FailedPreconditionError: the token would travel in plain text (INSECURE_TRANSPORT), or a file cannot be read
            (TLS_FILES).
        InvalidArgumentError: an address is malformed or listed twice, or the token has invalid characters.
    """
    addresses = split_addresses(address)

    def open_one(one: str, *, follows: bool = False) -> grpc.aio.Channel:
        arguments = _arguments(tls, None, urgent=urgent, follows=follows)
        header = _header(token, one, tls)
        if tls is None:
            channel = grpc.aio.insecure_channel(one, options=arguments)
        else:
            channel = grpc.aio.secure_channel(one, _credentials(tls, token), options=arguments)
        return channel if header is None else wrapped_channel.WrappedChannel([channel], header)

    return open_one(addresses[0]) if len(addresses) == 1 else wrapped_channel.following(addresses, open_one)


def open_sync_channel(
    address: str,
    *,
    tls: ClientTls | None = None,
    token: Token | None = None,
    dial_timeout: float | None = None,
    urgent: bool = False,
) -> grpc.Channel:
    """`open_channel` for code without an event loop; `dial_timeout` limits one attempt to connect, in seconds."""
    addresses = split_addresses(address)
    arguments = _arguments(tls, dial_timeout, urgent=urgent, follows=len(addresses) > 1)

    def open_one(one: str) -> grpc.Channel:
        header = _header(token, one, tls)
        if tls is None:
            channel = grpc.insecure_channel(one, options=arguments)
        else:
            channel = grpc.secure_channel(one, _credentials(tls, token), options=arguments)
        return channel if header is None else wrapped_channel.SyncWrappedChannel([channel], header)

    opened = [open_one(one) for one in addresses]
    return wrapped_channel.sync_following(addresses, opened) if len(opened) > 1 else opened[0]


def _arguments(
    tls: ClientTls | None, dial_timeout: float | None, *, urgent: bool, follows: bool
) -> ChannelArguments:
    """The arguments of a channel, with the proxy if configured."""
    own = (*(URGENT_ARGUMENTS if urgent else ()), *(FOLLOWING_ARGUMENTS if follows else ()))
    arguments = dict[str, int | str]((*CHANNEL_ARGUMENTS, *own))
    if dial_timeout is not None:
        arguments["grpc.min_reconnect_backoff_ms"] = max(1, round(dial_timeout * 1000))
    proxy = os.environ.get(PROXY_VARIABLE)
    if tls is not None and proxy:
        del arguments["grpc.enable_http_proxy"]
        arguments["grpc.http_proxy"] = proxy
    return tuple(arguments.items())


def _header(token: Token | None, address: str, tls: ClientTls | None) -> wrapped_channel.MakeMethod | None:
    """A wrapper that sends a fixed token; None for no token or a plugin."""
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
    return wrapped_channel.with_header("authorization", f"Bearer {secret}")


def split_addresses(text: str) -> tuple[str, ...]:
    """The addresses in `HOST:PORT,HOST:PORT`. Raises InvalidArgumentError: one is malformed, empty or listed twice."""
    addresses = tuple(part.strip() for part in text.split(","))
    if len(addresses) > 1 and ("" in addresses or len(set(addresses)) < len(addresses)):
        raise InvalidArgumentError(
            f"{text!r} must name different addresses, with commas between", field="address"
        )
    for address in addresses:
        if address.startswith(_OTHER_WAYS):
            if address.startswith("unix:") and (why := socket_problem(address[5:].removeprefix("//"))):
                raise InvalidArgumentError(f"the address {address!r} {why}")
            continue
        problem = ""
        scheme, found, rest = address.partition("://")
        host, colon, port = address.rpartition(":")
        if found:
            problem = f"has {scheme}:// before it: write {rest.rstrip('/')}"
        elif not colon or address.endswith("]"):
            problem = f"has no port: write HOST:PORT, such as {address or '127.0.0.1'}:{_USUAL_PORT}"
        elif ":" in host and not (host.startswith("[") and host.endswith("]")):
            problem = f"is ambiguous: write an IPv6 address in brackets, such as [::1]:{_USUAL_PORT}"
        elif not (re.fullmatch("[0-9]+", port) and 0 < int(port) <= _HIGHEST_PORT):
            problem = f"has the port {port!r}: a port is a number from 1 to {_HIGHEST_PORT}"
        elif not host:
            problem = f"has no host: write HOST:PORT, such as 127.0.0.1:{port}"
        if problem:
            raise InvalidArgumentError(f"the address {address!r} {problem}")
    return addresses


def socket_problem(path: Path | str) -> str:
    """What is wrong with the path of a unix socket; empty if nothing is."""
    size = len(os.fsencode(path))
    return (
        f"has {size} bytes: the path of a unix socket has at most {_LONGEST_SOCKET_PATH}"
        if size > _LONGEST_SOCKET_PATH
        else ""
    )


def is_local(address: str) -> bool:
    """Whether an address is known to be on this host."""
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
    """A channel that keeps gRPC's threads alive.

    Closing the last channel waits for them with the GIL held, while one may need the GIL to release a plugin: a deadlock
    (pull request 42247 of grpc/grpc).
    """
    return grpc.insecure_channel("unix:/nobody")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        message = f"TLS file {path} cannot be read: {error.strerror}"
        raise FailedPreconditionError(message, reason="TLS_FILES") from error
    if b"-----BEGIN " not in content:
        raise FailedPreconditionError(f"TLS file {path} is not PEM", reason="TLS_FILES")
    return content

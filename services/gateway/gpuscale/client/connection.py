"""How a client finds its server and authenticates.

Contexts are named servers in one file of the user:

    current_context = "lab"

    [contexts.lab]
    address = "gpu-gateway:7070"
    token_file = "~/.config/gpuscale/lab.token"
    ca_file = "~/.config/gpuscale/lab-ca.pem"

The file is `gpuscale/contexts.toml` in $XDG_CONFIG_HOME or ~/.config, or the one in GPUSCALE_CONTEXTS. It holds file names, never
secrets.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from gpuscale.client.asks import as_seconds
from gpuscale.client.calls import AsyncCalls, SyncCalls
from gpuscale.client.client import AsyncClient, Client
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.rpc import diagnosis
from gpuscale.common.rpc.channel import RPC_TIMEOUT, ClientTls, open_channel, open_sync_channel
from gpuscale.common.secrets import SecretStr
from gpuscale.common.sizes import to_seconds

DEFAULT_ADDRESS = "127.0.0.1:7070"
FILE_VARIABLE = "GPUSCALE_CONTEXTS"
NAME_VARIABLE = "GPUSCALE_CONTEXT"

if TYPE_CHECKING:
    from gpuscale.client.kept_login import KeptLogin


def connect(
    address: str | None = None,
    *,
    context: str | None = None,
    token: str | Path | None = None,
    tls: ClientTls | None = None,
    timeout: float | str = RPC_TIMEOUT,
    dial_timeout: float | str | None = None,
    node: str | None = None,
) -> Client:
    """Open a sync client of a gateway, or of a single service. Makes no call.

    Missing arguments come from the environment: GPUSCALE_ADDRESS, GPUSCALE_TOKEN_FILE, GPUSCALE_CA_FILE, GPUSCALE_CERT_FILE and
    GPUSCALE_KEY_FILE; then from the context (`gpuscale.client.connection`): the one named, or, if no address is given either
    way, the current one.

    Args:
        address: HOST:PORT, or several separated by commas, one of which leads; 127.0.0.1:7070 by default.
        context: name of the context; an empty string for the current one, whatever the address.
        token: the bearer token to send, or a file with it; an empty string for none, whatever the environment says. A login at
            an OIDC provider is refreshed over TLS, which takes `gpuscale[oidc]`.
        tls: TLS files; no TLS unless an authority is given somewhere.
        timeout: default timeout of unary calls: seconds, or a text such as `5s`.
        dial_timeout: time limit of one attempt to connect; 5 s by default.
        node: id of this host's node; by default from GPUSCALE_NODE, or found out by the fleet.

    Raises:
        FailedPreconditionError: a file cannot be read (CONTEXTS, TOKEN_FILE, TLS_FILES), no such context (CONTEXTS), or the
            token would be sent in plain text (INSECURE_TRANSPORT).
        InvalidArgumentError: invalid address.
    """
    target = _target(address, context, token, tls)
    channel = open_sync_channel(
        target.address,
        tls=target.tls,
        token=target.token,
        dial_timeout=as_seconds("dial_timeout", dial_timeout),
    )
    calls = SyncCalls(channel, to_seconds(timeout), target.explained)
    return Client(calls, target.address, node, target.tls.ca_file if target.tls else None)


def connect_async(
    address: str | None = None,
    *,
    context: str | None = None,
    token: str | Path | None = None,
    tls: ClientTls | None = None,
    timeout: float | str = RPC_TIMEOUT,
    node: str | None = None,
) -> AsyncClient:
    """`connect` for async code. Raises FailedPreconditionError: see `connect`."""
    target = _target(address, context, token, tls)
    channel = open_channel(target.address, tls=target.tls, token=target.token)
    blocking = partial(connect, address, context=context, token=token, tls=tls, timeout=timeout, node=node)
    return AsyncClient(
        AsyncCalls(channel, to_seconds(timeout), target.explained), target.address, node, blocking
    )


@dataclass(frozen=True)
class _Target:
    address: str
    token: "SecretStr | KeptLogin | None"
    tls: ClientTls | None

    def explained(self, error: UnavailableError, limit: float) -> GpuscaleError:
        """Why the server does not answer. Blocks for at most `limit` seconds."""
        if self.token is not None and not isinstance(self.token, SecretStr) and self.token.lacked(error):
            return self.token.problem or error
        return diagnosis.explained(self.address, self.tls, error, limit)


def _target(
    address: str | None, context: str | None, token: str | Path | None, tls: ClientTls | None
) -> _Target:
    address = address or os.environ.get("GPUSCALE_ADDRESS")
    # Never send the current context's token to an explicitly named server.
    found = Context() if context is None and address else find_context(context)
    ca_file = _file("CA_FILE")
    named = ClientTls(ca_file, _file("CERT_FILE"), _file("KEY_FILE")) if ca_file else found.tls
    tls = tls or named
    path = token if isinstance(token, Path) else _file("TOKEN_FILE") or found.token_file
    address = address or found.address or DEFAULT_ADDRESS
    if isinstance(token, str) or path is None:
        return _Target(address, SecretStr(str(token)) if token else None, tls)
    if tls is not None and (login := path.with_suffix(".login")).exists():
        from gpuscale.client.kept_login import KeptLogin

        return _Target(address, KeptLogin(path, login), tls)
    return _Target(address, SecretStr(read_token(path)), tls)


def _file(name: str) -> Path | None:
    path = os.environ.get(f"GPUSCALE_{name}")
    return Path(path) if path else None


def read_token(path: Path) -> str:
    """The bearer token in a file. Raises FailedPreconditionError: the file cannot be read, or is empty (reason TOKEN_FILE)."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        # The message of a decoding error would show bytes of the file.
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        message = f"cannot read the token file {path}: {why}"
        raise FailedPreconditionError(message, reason="TOKEN_FILE") from None
    if not token:  # otherwise calls would fail without a hint at the file
        raise FailedPreconditionError(f"the token file {path} is empty", reason="TOKEN_FILE")
    return token


@dataclass(frozen=True, slots=True)
class Context:
    """A named server.

    Attributes:
        address: HOST:PORT; empty for the default.
        token_file: file with the bearer token.
        ca_file: certificate authority of the server, PEM; turns TLS on.
        cert_file: client certificate, PEM.
        key_file: its key, PEM.
    """

    address: str = ""
    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @property
    def tls(self) -> ClientTls | None:
        """TLS files; None without TLS."""
        return ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts, and the name of the current one; empty for none."""

    current: str
    by_name: Mapping[str, Context]


def contexts_file() -> Path:
    """The path of the contexts file, which may not exist."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config"
    return Path(base) / "gpuscale" / "contexts.toml"


def read_contexts(path: Path) -> Contexts:
    """The contexts of a file; none if it does not exist. Raises FailedPreconditionError: the file cannot be used (reason CONTEXTS)."""
    try:
        with path.open("rb") as file:
            found: dict[str, object] = tomllib.load(file)
        return _contexts(found)
    except FileNotFoundError:
        return Contexts("", {})
    except OSError as error:
        raise FailedPreconditionError(f"cannot read {path}: {error.strerror}", reason="CONTEXTS") from error
    except ValueError as error:  # from tomllib and the checks below
        raise FailedPreconditionError(f"{path}: {error}", reason="CONTEXTS") from error


def find_context(name: str | None = None) -> Context:
    """The context of that name; without a name that of GPUSCALE_CONTEXT, the current one, or an empty one.

    Raises FailedPreconditionError: no such context, or the file cannot be used (reason CONTEXTS).
    """
    path = contexts_file()
    contexts = read_contexts(path)
    wanted = name or os.environ.get(NAME_VARIABLE) or contexts.current
    if not wanted:
        return Context()
    if wanted not in contexts.by_name:
        known = f"; choose from {', '.join(sorted(contexts.by_name))}" if contexts.by_name else ""
        raise FailedPreconditionError(f"{path} has no context {wanted}{known}", reason="CONTEXTS")
    return contexts.by_name[wanted]


def _contexts(found: Mapping[str, object]) -> Contexts:
    unknown = sorted(found.keys() - {"current_context", "contexts"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]}")
    current, tables = found.get("current_context", ""), found.get("contexts", {})
    if not isinstance(current, str) or not _is_table(tables):
        raise ValueError("current_context must be a string, and contexts must be tables")
    known = {field.name for field in fields(Context)}
    by_name: dict[str, Context] = {}
    for name, table in tables.items():
        if not _is_table(table):
            raise ValueError(f"contexts.{name} must be a table")
        values: dict[str, str] = {}
        for key, value in table.items():
            if key not in known:
                raise ValueError(f"unknown key contexts.{name}.{key}")
            if not isinstance(value, str):
                raise ValueError(f"contexts.{name}.{key} must be a string")  # noqa: TRY004
            values[key] = value
        address = values.pop("address", "")
        try:
            files = {key: Path(value).expanduser() for key, value in values.items() if value}
        except RuntimeError as error:  # of ~nobody
            raise ValueError(f"contexts.{name}: this home directory does not exist") from error
        by_name[name] = Context(address=address, **files)
    return Contexts(current, by_name)


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)

"""Contexts: servers by name, in one file of the user's.

    current_context = "lab"

    [contexts.lab]
    address = "gpu-gateway:7070"
    token_file = "~/.config/gpuscale/lab.token"
    ca_file = "~/.config/gpuscale/lab-ca.pem"

The file is `gpuscale/contexts.toml` in $XDG_CONFIG_HOME or ~/.config, or the one that GPUSCALE_CONTEXTS names. It holds
names of files, never a secret.
"""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeGuard

from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc.channel import ClientTls

FILE_VARIABLE = "GPUSCALE_CONTEXTS"
NAME_VARIABLE = "GPUSCALE_CONTEXT"


@dataclass(frozen=True, slots=True)
class Context:
    """How one server is reached.

    Attributes:
        address: HOST:PORT; empty for the default.
        token_file: file with the bearer token to send.
        ca_file: authority of the server, PEM; switches TLS on.
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
        """Files of TLS; None for plain text."""
        return ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None


@dataclass(frozen=True, slots=True)
class Contexts:
    """All contexts, and the name of the one that counts where none is named; empty for none."""

    current: str
    by_name: Mapping[str, Context]


def contexts_file() -> Path:
    """Where the contexts are; the file need not exist."""
    named = os.environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or f"{os.environ.get('HOME', '')}/.config"
    return Path(base) / "gpuscale" / "contexts.toml"


def read_contexts(path: Path) -> Contexts:
    """The contexts of a file; none where there is no file.

    Raises:
        FailedPreconditionError: the file cannot be used (reason CONTEXTS).
    """
    try:
        with path.open("rb") as file:
            found: dict[str, object] = tomllib.load(file)
        return _contexts(found)
    except FileNotFoundError:
        return Contexts("", {})
    except OSError as error:
        raise FailedPreconditionError(f"cannot read {path}: {error.strerror}", reason="CONTEXTS") from error
    except ValueError as error:  # what tomllib and the checks below raise
        raise FailedPreconditionError(f"{path}: {error}", reason="CONTEXTS") from error


def find_context(name: str | None = None) -> Context:
    """The context of that name; when absent the one that GPUSCALE_CONTEXT names, or the current one, or an empty one.

    Raises:
        FailedPreconditionError: there is none of that name, or the file cannot be used (reason CONTEXTS).
    """
    path = contexts_file()
    contexts = read_contexts(path)
    wanted = name or os.environ.get(NAME_VARIABLE) or contexts.current
    if not wanted:
        return Context()
    if wanted not in contexts.by_name:
        known = ", ".join(sorted(contexts.by_name)) or "none"
        raise FailedPreconditionError(f"{path} has no context {wanted}, but {known}", reason="CONTEXTS")
    return contexts.by_name[wanted]


def _contexts(found: Mapping[str, object]) -> Contexts:
    unknown = sorted(found.keys() - {"current_context", "contexts"})
    if unknown:
        raise ValueError(f"unknown key {unknown[0]}")
    current, tables = found.get("current_context", ""), found.get("contexts", {})
    if not isinstance(current, str) or not _is_table(tables):
        raise ValueError("current_context is a name, and contexts are tables")
    return Contexts(current, {name: _context(name, table) for name, table in tables.items()})


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)


def _context(name: str, table: object) -> Context:
    known = {field.name for field in fields(Context)}
    if not _is_table(table):
        raise ValueError(f"contexts.{name} is no table")
    values: dict[str, str] = {}
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"unknown key contexts.{name}.{key}")
        if not isinstance(value, str):
            raise ValueError(f"contexts.{name}.{key} is no text")  # noqa: TRY004
        values[key] = value
    try:
        files = {key: Path(value).expanduser() for key, value in values.items() if key != "address" and value}
    except RuntimeError as error:  # of ~nobody
        raise ValueError(f"contexts.{name}: there is no such home directory") from error
    return Context(address=values.get("address", ""), **files)

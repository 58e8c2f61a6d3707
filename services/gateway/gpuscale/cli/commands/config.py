"""`gpuscalectl config`: named servers in the user's contexts file (see `gpuscale.client.connection`)."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import tomlkit

from gpuscale.cli.console.command import Session, command, context_names
from gpuscale.cli.console.errors import writing
from gpuscale.cli.grammar.selecting import near
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.rpc.channel import split_addresses
from gpuscale.common.secrets import write_private

if TYPE_CHECKING:
    from gpuscale.client.connection import Context

_COLUMNS = ("current", "name", "address", "ca_file", "token_file")
CONTEXT = click.argument("name", metavar="CONTEXT", shell_complete=context_names)


@command("config get-contexts")
def get_contexts(session: Session) -> None:
    """List the contexts, and which one is current."""
    _, current, by_name = read_all()
    rows: list[dict[str, object]] = [
        {"name": name, "current": "*" if name == current else "", **_texts(one)}
        for name, one in by_name.items()
    ]
    session.output.write_records("contexts", rows, _COLUMNS)
    session.output.note_none(
        rows, "none; add one with: gpuscalectl config set-context NAME --address HOST:PORT"
    )


@command("config current-context")
def current_context(session: Session) -> None:
    """Print the name of the current context."""
    path, current, _ = read_all()
    if not current:
        raise NotFoundError(f"{path} has no current context")
    session.output.write_said(current, {"name": current}, current)


@command("config use-context lab")
@CONTEXT
def use_context(session: Session, name: str) -> None:
    """Make a context the current one."""
    path, _, by_name = read_all()
    _known(path, name, by_name)
    write_all(path, name, by_name)
    session.output.write_said(f"{name} is the current context", {"name": name}, name)


@command("config set-context lab --address gpu-gateway:7070 --ca-file ca.pem --token-file lab.token")
@CONTEXT
def set_context(session: Session, name: str) -> None:
    """Add or change a context, which stores --address, --token-file, --ca-file, --cert-file and --key-file.

    Options left out stay unchanged. The first context becomes the current one.
    """
    from gpuscale.client.connection import Context

    path, current, by_name = read_all()
    before = by_name.get(name, Context())
    given = {f"{one}_file": getattr(session, f"{one}_file") for one in ("token", "ca", "cert", "key")}
    files = {name: path.expanduser().absolute() for name, path in given.items() if path is not None}
    changed = replace(before, address=session.address or before.address, **files)
    if not changed.address:
        raise InvalidArgumentError(f"{name} needs an address: pass --address HOST:PORT")
    split_addresses(changed.address)
    write_all(path, current or name, {**by_name, name: changed})
    action = "changed" if name in by_name else "added"
    session.output.write_said(
        f"{name} {action}; the current context is {current or name}", {"name": name}, name
    )


@command("config delete-context lab")
@CONTEXT
def delete_context(session: Session, name: str) -> None:
    """Delete a context."""
    path, current, by_name = read_all()
    _known(path, name, by_name)
    left = {key: one for key, one in by_name.items() if key != name}
    write_all(path, "" if current == name else current, left)
    session.output.write_said(f"{name} deleted", {"name": name}, name)


@command("config view")
def view(session: Session) -> None:
    """Print the path and content of the contexts file. It holds file names, never secrets."""
    path, current, by_name = read_all()
    contexts = {name: _texts(one) for name, one in by_name.items()}
    session.output.write_data({"file": str(path), "current_context": current, "contexts": contexts})


def read_all() -> "tuple[Path, str, Mapping[str, Context]]":
    """The file, the name of the current context, and the contexts by name."""
    from gpuscale.client.connection import contexts_file, read_contexts

    path = contexts_file()
    found = read_contexts(path)
    return path, found.current, found.by_name


def _known(path: Path, name: str, by_name: Mapping[str, object]) -> None:
    if name not in by_name:
        raise NotFoundError(f"{path} has no context {name}{near(name, by_name)}")


def _texts(context: "Context") -> dict[str, str]:
    return {key: str(value) for key, value in asdict(context).items() if value is not None}


def write_all(path: Path, current: str, by_name: "Mapping[str, Context]") -> None:
    """Replace the file atomically, readable only by the user."""
    contexts = {name: _texts(one) for name, one in sorted(by_name.items())}
    text = tomlkit.dumps({"current_context": current, "contexts": contexts})
    with writing(path, reason="CONTEXTS"):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, text.encode())

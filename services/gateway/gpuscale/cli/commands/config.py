"""`gpuscalectl config`: servers by name, in the user's file of contexts (`gpuscale.client.connection` says what it holds)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.private_files import write_private
from gpuscale.cli.console.output import Format, write_lines
from gpuscale.cli.console.session import note, session_of
from gpuscale.common.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from gpuscale.client.connection import Context

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

ContextName = Annotated[str, typer.Argument(metavar="CONTEXT", show_default=False)]
_COLUMNS = (
    ("CURRENT", "current"),
    ("NAME", "name"),
    ("ADDRESS", "address"),
    ("CA-FILE", "ca_file"),
    ("TOKEN-FILE", "token_file"),
)


@app.command("get-contexts")
def get_contexts(context: typer.Context) -> None:
    """List the contexts; the current one counts where none is named."""
    _, current, by_name = _read()
    rows: list[dict[str, object]] = [
        {"name": name, "current": "*" if name == current else "", **_texts(one)}
        for name, one in by_name.items()
    ]
    session_of(context).output.write_records("contexts", rows, _COLUMNS)
    if not rows and session_of(context).output.human:
        note("none; add one with: gpuscalectl config set-context NAME --address HOST:PORT")


@app.command("current-context")
def current_context(context: typer.Context) -> None:
    """Print the name of the current context."""
    path, current, _ = _read()
    if not current:
        raise NotFoundError(f"{path} has no current context")
    _said(context, current, current)


@app.command("use-context")
def use_context(context: typer.Context, name: ContextName) -> None:
    """Make a context the current one."""
    path, _, by_name = _read()
    _known(path, name, by_name)
    _write(path, name, by_name)
    _said(context, name, f"{name} is the current context")


@app.command("set-context")
def set_context(context: typer.Context, name: ContextName) -> None:
    """Add a context, or change it: --address, --token-file, --ca-file, --cert-file and --key-file are what it keeps.

    What is not given stays as it is. The first one becomes the current one.
    """
    from gpuscale.client.connection import Context

    path, current, by_name = _read()
    session = session_of(context)
    before = by_name.get(name, Context())
    changed = Context(
        address=session.address or before.address,
        token_file=_absolute(session.token_file) or before.token_file,
        ca_file=_absolute(session.ca_file) or before.ca_file,
        cert_file=_absolute(session.cert_file) or before.cert_file,
        key_file=_absolute(session.key_file) or before.key_file,
    )
    if not changed.address:
        raise InvalidArgumentError(f"{name} needs an address: pass --address HOST:PORT")
    _write(path, current or name, {**by_name, name: changed})
    _said(
        context,
        name,
        f"{name} {'changed' if name in by_name else 'added'}; the current context is {current or name}",
    )


@app.command("delete-context")
def delete_context(context: typer.Context, name: ContextName) -> None:
    """Take a context out of the file."""
    path, current, by_name = _read()
    _known(path, name, by_name)
    _write(
        path, "" if current == name else current, {key: one for key, one in by_name.items() if key != name}
    )
    _said(context, name, f"{name} deleted")


@app.command("view")
def view(context: typer.Context) -> None:
    """Print where the file is, and what it says. It holds names of files, never a secret."""
    path, current, by_name = _read()
    data = {
        "file": str(path),
        "current_context": current,
        "contexts": {name: _texts(one) for name, one in by_name.items()},
    }
    session_of(context).output.write_data(data)


def _said(context: typer.Context, name: str, words: str) -> None:
    output = session_of(context).output
    if output.human:
        write_lines([words])
    elif output.format is Format.NAME:
        write_lines([name])
    else:
        output.write_data({"name": name})


def _read() -> "tuple[Path, str, Mapping[str, Context]]":
    """(file, name of the current context, the contexts)."""
    from gpuscale.client.connection import contexts_file, read_contexts

    path = contexts_file()
    found = read_contexts(path)
    return path, found.current, found.by_name


def _known(path: Path, name: str, by_name: Mapping[str, object]) -> None:
    from gpuscale.cli.grammar.field_names import near

    if name not in by_name:
        raise NotFoundError(f"{path} has no context {name}{near(name, by_name)}")


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _texts(context: "Context") -> dict[str, str]:
    """What a context says, without what it does not."""
    files = {
        "token_file": context.token_file,
        "ca_file": context.ca_file,
        "cert_file": context.cert_file,
        "key_file": context.key_file,
    }
    return {"address": context.address, **{key: str(path) for key, path in files.items() if path is not None}}


def _write(path: Path, current: str, by_name: "Mapping[str, Context]") -> None:
    """Replace the file at once, so that nobody ever reads half of one; only the user may read it.

    Raises:
        InvalidArgumentError: it cannot be written, or a value has a character that TOML does not admit.
    """
    lines = [f"current_context = {_quoted(current)}", ""]
    for name, one in sorted(by_name.items()):
        values = [f"{key} = {_quoted(value)}" for key, value in _texts(one).items()]
        lines += [f"[contexts.{_quoted(name)}]", *values, ""]
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, "\n".join(lines).encode())
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from error


def _quoted(text: str) -> str:
    """A basic string of TOML, which are those of JSON but for the characters that are refused here."""
    if any(ord(one) < ord(" ") or ord(one) == 0x7F for one in text):
        raise InvalidArgumentError(f"{text!r} has a control character")
    return json.dumps(text, ensure_ascii=False)

"""`gpuscalectl token create|list|revoke`: the tokens file of a server, on the server's host.

A token is shown once, when it is made; the file has its digest. A running server reads the file again within a second.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gpuscale.cli.grammar.options import Name, duration
from gpuscale.cli.console.output import Format
from gpuscale.cli.console.session import note, session_of
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

TOKEN_BYTES = 32
"""Random bytes of a token."""
_COLUMNS = (("NAME", "name"), ("ROLE", "role"), ("STATE", "state"), ("EXPIRES", "expires"))

TokensFile = Annotated[
    Path,
    typer.Option(
        envvar="GPUSCALE_TOKENS_FILE",
        metavar="FILE",
        help="The tokens file of the server, TOML.",
        show_default=False,
    ),
]


class RoleName(StrEnum):
    """What the bearer of a token may do."""

    VIEWER = "viewer"
    AGENT = "agent"
    OPERATOR = "operator"
    ADMIN = "admin"


@app.command()
def create(
    context: typer.Context,
    name: Name,
    tokens_file: TokensFile,
    role: Annotated[RoleName, typer.Option(help="What its bearer may do.")] = RoleName.VIEWER,
    expires_in: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="How long it is good for, such as 90d."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put the token there, for its bearer alone (0600).")
    ] = None,
) -> None:
    """Make a token. It is written once, to standard output or to a file; the tokens file keeps its digest."""
    import hashlib
    import secrets
    from datetime import UTC, datetime, timedelta

    from gpuscale.cli.token_file import with_token
    from gpuscale.common.names import is_id

    if not is_id(name):
        raise InvalidArgumentError(
            f"{name!r} is no name: small letters, digits, '.', '_' and '-'", field="name"
        )
    token = secrets.token_urlsafe(TOKEN_BYTES)
    digest = hashlib.sha256(token.encode()).hexdigest()
    expires = None if expires_in is None else datetime.now(UTC) + timedelta(seconds=expires_in)
    changed = with_token(_text(tokens_file, new=True), name, role, digest, expires)
    if write is not None:
        _write(write, f"{token}\n")
    _write(tokens_file, changed)
    note(f"{name} may call as {role}; this is the only time that its token is shown")
    output = session_of(context).output
    if write is not None or output.format is Format.NAME:
        output.write_records("tokens", [{"name": name, "role": role}], _COLUMNS[:2])
    elif output.human:
        sys.stdout.write(f"{token}\n")
    else:
        output.write_data({"name": name, "role": str(role), "token": token})


@app.command(name="list")
def list_(context: typer.Context, tokens_file: TokensFile) -> None:
    """Show whose tokens there are, and how long they are good for."""
    from datetime import UTC, datetime

    from gpuscale.cli.token_file import read

    records: list[dict[str, object]] = []
    for name, token in sorted(read(_text(tokens_file)).items()):
        expires = token.get("expires")
        over = isinstance(expires, datetime) and expires <= datetime.now(UTC)
        shown = expires.isoformat(timespec="seconds") if isinstance(expires, datetime) else "never"
        state = "EXPIRED" if over else "ACTIVE"
        records.append({"name": name, "role": token.get("role", ""), "state": state, "expires": shown})
    session_of(context).output.write_records("tokens", records, _COLUMNS)


@app.command()
def revoke(context: typer.Context, name: Name, tokens_file: TokensFile) -> None:
    """Take a token out of the file: within a second nobody is let in with it, and open streams end within a minute."""
    from gpuscale.cli.token_file import without_token

    _write(tokens_file, without_token(_text(tokens_file), name))
    session_of(context).output.write_records("revoked", [{"name": name}], _COLUMNS[:1])


def _text(file: Path, *, new: bool = False) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if new:
            return ""
        raise FailedPreconditionError(f"there is no {file}", reason="TOKENS_FILE") from None
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read {file}: {type(error).__name__}"
        raise FailedPreconditionError(message, reason="TOKENS_FILE") from None


def _write(file: Path, text: str) -> None:
    """Put a file in place at once and for its owner only, so that no server ever reads half of it."""
    from gpuscale.cli.commands.private_files import write_private

    try:
        write_private(file, text.encode())
    except OSError as error:
        raise FailedPreconditionError(
            f"cannot write {file}: {error.strerror}", reason="TOKENS_FILE"
        ) from error

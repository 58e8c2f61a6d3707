"""`gpuscalectl token create|list|revoke`: the tokens file of a server, on the server's host.

A token is shown once, when it is made; the file has its digest. A running server reads the file again within a second.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import Format
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import Name, duration
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.common.security.auth import Limits

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

LONGEST_TENANT = 253
TOKEN_BYTES = 32
"""Random bytes of a token."""
_COLUMNS = (
    ("NAME", "name"),
    ("ROLE", "role"),
    ("STATE", "state"),
    ("EXPIRES", "expires"),
    ("TENANTS", "tenants"),
    ("MAX PRIORITY", "maxPriority"),
)

TokensFile = Annotated[
    Path,
    typer.Option(
        envvar="GPUSCALE_TOKENS_FILE",
        metavar="FILE",
        help="The tokens file of the server, TOML.",
        show_default=False,
    ),
]


Tenants = Annotated[
    list[str] | None,
    typer.Option(
        "--tenant",
        metavar="TENANT",
        help="Whose quota its bearer may use, the default one first; may be repeated. Without any: its own name.",
    ),
]
MaxPriority = Annotated[
    int, typer.Option(min=-1000, max=1000, help="The highest priority that its bearer may ask for.")
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
    tenant: Tenants = None,
    max_priority: MaxPriority = 0,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Put the token there, for its bearer alone (0600).")
    ] = None,
) -> None:
    """Make a token. It is written once, to standard output or to a file; the tokens file keeps its digest."""
    import hashlib
    import secrets
    from datetime import UTC, datetime, timedelta

    from gpuscale.cli.commands.token_file import with_token
    from gpuscale.common.names import is_id
    from gpuscale.common.security.auth import RESERVED_NAMES

    if not is_id(name):
        raise InvalidArgumentError(
            f"{name!r} is no name: small letters, digits, '.', '_' and '-'", field="name"
        )
    if name in RESERVED_NAMES:
        raise InvalidArgumentError(
            f"{name} stands for callers without a token: choose another name", field="name"
        )
    token = secrets.token_urlsafe(TOKEN_BYTES)
    digest = hashlib.sha256(token.encode()).hexdigest()
    expires = None if expires_in is None else datetime.now(UTC) + timedelta(seconds=expires_in)
    limits = _limits(tenant, max_priority)
    changed = with_token(_text(tokens_file, new=True), name, role, digest, expires, limits)
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

    from gpuscale.cli.commands.token_file import read

    records: list[dict[str, object]] = []
    for name, token in sorted(read(_text(tokens_file)).items()):
        expires = token.get("expires")
        over = isinstance(expires, datetime) and expires <= datetime.now(UTC)
        shown = expires.isoformat(timespec="seconds") if isinstance(expires, datetime) else "never"
        state = "EXPIRED" if over else "ACTIVE"
        records.append(
            {
                "name": name,
                "role": token.get("role", ""),
                "state": state,
                "expires": shown,
                "tenants": token.get("tenants", [name]),
                "maxPriority": token.get("max_priority", 0),
            }
        )
    session_of(context).output.write_records("tokens", records, _COLUMNS)


@app.command()
def limit(
    context: typer.Context,
    name: Name,
    tokens_file: TokensFile,
    tenant: Tenants = None,
    max_priority: MaxPriority = 0,
    certificate: Annotated[
        bool, typer.Option("--certificate", help="Of the caller whom a client certificate names so.")
    ] = False,
) -> None:
    """Set whose quotas the bearer of a token may use, and up to which priority; what is not given is the default again.

    A running server takes it up within a second. Admins may use every quota and every priority.
    """
    from gpuscale.cli.commands.token_file import Kind, with_limits

    limits = _limits(tenant, max_priority)
    kind: Kind = "certificates" if certificate else "tokens"
    _write(tokens_file, with_limits(_text(tokens_file), kind, name, limits))
    record = {"name": name, "tenants": list(limits.tenants) or [name], "maxPriority": max_priority}
    session_of(context).output.write_records("limits", [record], (_COLUMNS[0], *_COLUMNS[-2:]))


def _limits(tenants: list[str] | None, max_priority: int) -> "Limits":
    from gpuscale.common.security.auth import Limits

    for one in tenants or ():
        if not (one.isprintable() and one.strip() == one and 0 < len(one) <= LONGEST_TENANT):
            raise InvalidArgumentError(
                f"--tenant: {one!r} must be 1-{LONGEST_TENANT} printable characters without spaces at the ends"
            )
    return Limits(tuple(dict.fromkeys(tenants or ())), max_priority)


@app.command()
def revoke(context: typer.Context, name: Name, tokens_file: TokensFile) -> None:
    """Take a token out of the file: within a second nobody is let in with it, and open streams end within a minute."""
    from gpuscale.cli.commands.token_file import without_token

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

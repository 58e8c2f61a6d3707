"""`gpuscalectl token`: the tokens file of a server, on the server's host.

A token is shown once, when it is made; the file has its digest, never the token (`gpuscale.common.security.auth`). A running
server reads the file again within a second. Comments, order and all other lines of the file stay.
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, TypeGuard

import click

from gpuscale.cli.commands.private_files import write_private
from gpuscale.cli.console.command import FILE, command, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.parameters import DURATION, option, repeated
from gpuscale.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from gpuscale.common.security.auth import RESERVED_NAMES, Limits

Kind = Literal["tokens", "certificates"]
ROLES = ("viewer", "agent", "operator", "admin")
LONGEST_TENANT = 253
TOKEN_BYTES = 32
"""Random bytes of a token."""
_LIMIT_KEYS = {"tenants", "max_priority"}
_COLUMNS = (
    ("NAME", "name"),
    ("ROLE", "role"),
    ("STATE", "state"),
    ("EXPIRES", "expires"),
    ("TENANTS", "tenants"),
    ("MAX PRIORITY", "maxPriority"),
)
TOKENS_FILE = option(
    "--tokens-file",
    type=FILE,
    required=True,
    envvar="GPUSCALE_TOKENS_FILE",
    help="The tokens file of the server, TOML; $GPUSCALE_TOKENS_FILE.",
)
TENANTS = repeated(
    "--tenant",
    "tenants",
    metavar="TENANT",
    help="Tenant whose quota its bearer may use, the default one first; * for all. Without it: the tenant of its own name.",
)
MAX_PRIORITY = option(
    "--max-priority",
    type=click.IntRange(-1000, 1000),
    default=0,
    metavar="N",
    help="Highest priority that its bearer may ask for.",
)
ROLE = option("--role", type=click.Choice(ROLES), default="viewer", help="What its bearer may do.")


@command("token create ci --role operator --expires-in 90d --tokens-file tokens.toml --write ci.token")
@one_name()
@TOKENS_FILE
@ROLE
@option("--expires-in", type=DURATION, help="How long it is valid, such as 90d.")
@TENANTS
@MAX_PRIORITY
@option("--write", type=FILE, help="Write the token to this file, readable by its owner only.")
def create(
    session: Session,
    name: str,
    tokens_file: Path,
    role: str,
    expires_in: float | None,
    tenants: tuple[str, ...],
    max_priority: int,
    write: Path | None,
) -> None:
    """Create a token. It is written once, to standard output or a file; the tokens file keeps its digest."""
    import hashlib
    import secrets

    from gpuscale.common.names import is_id

    if not is_id(name):
        raise InvalidArgumentError(
            f"{name!r} is not a valid name: use lower-case letters, digits, '.', '_' and '-'", field="name"
        )
    if name in RESERVED_NAMES:
        raise InvalidArgumentError(
            f"{name} stands for callers without a token: choose another name", field="name"
        )
    token = secrets.token_urlsafe(TOKEN_BYTES)
    digest = hashlib.sha256(token.encode()).hexdigest()
    expires = None if expires_in is None else datetime.now(UTC) + timedelta(seconds=expires_in)
    limits = _limits(tenants, max_priority)
    changed = with_token(_text(tokens_file, new=True), name, role, digest, expires, limits)
    if write is not None:
        _write(write, f"{token}\n")
    _write(tokens_file, changed)
    note(f"{name} may call as {role}; the token is not shown again")
    output = session.output
    if write is not None or output.format is Format.NAME:
        output.write_records("tokens", [{"name": name, "role": role}], _COLUMNS[:2])
    elif output.human:
        sys.stdout.write(f"{token}\n")
    else:
        output.write_data({"name": name, "role": role, "token": token})


@command("token list --tokens-file tokens.toml")
@TOKENS_FILE
def list_tokens(session: Session, tokens_file: Path) -> None:
    """List tokens, and how long they are valid."""
    records: list[dict[str, object]] = []
    for name, token in sorted(read(_text(tokens_file)).items()):
        expires = token.get("expires")
        over = isinstance(expires, datetime) and expires <= datetime.now(UTC)
        records.append(
            {
                "name": name,
                "role": token.get("role", ""),
                "state": "EXPIRED" if over else "ACTIVE",
                "expires": expires.isoformat(timespec="seconds")
                if isinstance(expires, datetime)
                else "never",
                "tenants": token.get("tenants", [name]),
                "maxPriority": token.get("max_priority", 0),
            }
        )
    session.output.write_records("tokens", records, _COLUMNS)


@command("token limit ci --tenant ml --tenant vision --max-priority 10 --tokens-file tokens.toml")
@one_name()
@TOKENS_FILE
@TENANTS
@MAX_PRIORITY
@option("--certificate", is_flag=True, help="Limit the caller whom a client certificate names so.")
def limit(
    session: Session,
    name: str,
    tokens_file: Path,
    tenants: tuple[str, ...],
    max_priority: int,
    certificate: bool,
) -> None:
    """Set whose quotas the bearer of a token may use, and its highest priority; options left out return to their default.

    A running server applies it within a second. Admins may use every quota and every priority.
    """
    limits = _limits(tenants, max_priority)
    kind: Kind = "certificates" if certificate else "tokens"
    _write(tokens_file, with_limits(_text(tokens_file), kind, name, limits))
    record = {"name": name, "tenants": list(limits.tenants) or [name], "maxPriority": max_priority}
    session.output.write_records("limits", [record], (_COLUMNS[0], *_COLUMNS[-2:]))


@command("token revoke ci --tokens-file tokens.toml")
@one_name()
@TOKENS_FILE
def revoke(session: Session, name: str, tokens_file: Path) -> None:
    """Revoke a token: within a second it lets nobody in, and open streams end within a minute."""
    _write(tokens_file, without_token(_text(tokens_file), name))
    session.output.write_records("revoked", [{"name": name}], _COLUMNS[:1])


def _limits(tenants: tuple[str, ...], max_priority: int) -> Limits:
    for one in tenants:
        if not (one.isprintable() and one.strip() == one and 0 < len(one) <= LONGEST_TENANT):
            raise InvalidArgumentError(
                f"--tenant: {one!r} must be 1-{LONGEST_TENANT} printable characters without spaces at the ends"
            )
    return Limits(tuple(dict.fromkeys(tenants)), max_priority)


def _text(file: Path, *, new: bool = False) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        if new:
            return ""
        raise _unusable(f"{file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(f"cannot read {file}: {type(error).__name__}") from None


def _write(file: Path, text: str) -> None:
    """Replace a file at once, readable by its owner only, so that no server ever reads half of it."""
    try:
        write_private(file, text.encode())
    except OSError as error:
        raise _unusable(f"cannot write {file}: {error.strerror}") from error


def _unusable(message: str) -> FailedPreconditionError:
    return FailedPreconditionError(message, reason="TOKENS_FILE")


def read(text: str, kind: Kind = "tokens") -> Mapping[str, Mapping[str, object]]:
    """The tokens of a file, or its entries about certificates, by name.

    Raises:
        FailedPreconditionError: it is not a tokens file (reason TOKENS_FILE).
    """
    try:
        found: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unusable(f"the tokens file is not TOML: {error}") from error
    tokens = found.get(kind, {})
    if not _is_tables(tokens):
        raise _unusable(f"the tokens file needs tables [{kind}.NAME]")
    return tokens


def _is_tables(value: object) -> TypeGuard[Mapping[str, Mapping[str, object]]]:
    return _is_table(value) and all(map(_is_table, value.values()))


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)


def with_token(text: str, name: str, role: str, sha256: str, expires: datetime | None, limits: Limits) -> str:
    """The text of the file with one more token.

    Raises:
        AlreadyExistsError: it has a token of that name.
        FailedPreconditionError: it is not a tokens file (reason TOKENS_FILE).
    """
    if name in read(text):
        raise AlreadyExistsError(f"token {name} already exists; revoke it first", metadata={"name": name})
    lines = [_heading(name), f'role = "{role}"', f'sha256 = "{sha256}"']
    if expires is not None:
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    lines += _limit_lines(limits)
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(lines) + "\n"


def with_limits(text: str, kind: Kind, name: str, limits: Limits) -> str:
    """The text of the file with other limits of a token, or of the caller whom a client certificate names.

    Raises:
        NotFoundError: it has no such token.
        FailedPreconditionError: it is not a tokens file, or does not write tokens as tables (reason TOKENS_FILE).
    """
    before = read(text, kind)
    if name not in before and kind == "tokens":
        raise NotFoundError(f"token {name} not found", metadata={"name": name})
    if name not in before:
        text = f"{text.rstrip()}\n\n{_heading(name, kind)}\n"
    after: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = _is_heading(line, kind, name)
            after += [line, *(_limit_lines(limits) if inside else ())]
        elif not (inside and line.split("=")[0].strip() in _LIMIT_KEYS):
            after.append(line)
    changed = "\n".join(after) + "\n"
    said = tomllib.loads("\n".join(_limit_lines(limits)))
    kept = {key: value for key, value in before.get(name, {}).items() if key not in _LIMIT_KEYS}
    if _or_none(changed, kind) != {**before, name: {**kept, **said}}:
        raise _unusable(
            f"{name} is not a table {_heading(name, kind)} with a line for each key: change it by hand"
        )
    return changed


def _or_none(text: str, kind: Kind) -> Mapping[str, Mapping[str, object]] | None:
    try:
        return read(text, kind)
    except FailedPreconditionError:
        return None


def _limit_lines(limits: Limits) -> list[str]:
    lines: list[str] = []
    if limits.tenants:  # JSON writes a list of texts as TOML does
        lines.append(f"tenants = {json.dumps(limits.tenants, ensure_ascii=False)}")
    if limits.max_priority:
        lines.append(f"max_priority = {limits.max_priority}")
    return lines


def without_token(text: str, name: str) -> str:
    """The text of the file without a token.

    Raises:
        NotFoundError: it has no such token.
        FailedPreconditionError: it is not a tokens file, or does not write tokens as tables (reason TOKENS_FILE).
    """
    before = read(text)
    if name not in before:
        raise NotFoundError(f"token {name} not found", metadata={"name": name})
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = _is_heading(line, "tokens", name)
        if not inside or line.lstrip().startswith("#"):
            kept.append(line)
    after = "".join(kept)
    if read(after) != {key: value for key, value in before.items() if key != name}:
        raise _unusable(f"the token {name} is not a table [tokens.{name}]: remove it by hand")
    return after


def _heading(name: str, kind: Kind = "tokens") -> str:
    return f'[{kind}."{name}"]'


def _is_heading(line: str, kind: Kind, name: str) -> bool:
    return line.split("#", maxsplit=1)[0].strip() in {
        f"[{kind}.{name}]",
        _heading(name, kind),
        f"[{kind}.'{name}']",
    }

"""The text of a tokens file with a token more or less; comments, order and all other lines stay. Pure.

`gpuscale.common.security.auth` says what the file holds: digests, never a token.
"""

import json
import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import Literal, TypeGuard

from gpuscale.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError
from gpuscale.common.security.auth import Limits

Kind = Literal["tokens", "certificates"]


def read(text: str, kind: Kind = "tokens") -> Mapping[str, Mapping[str, object]]:
    """The tokens of a file, or what it says of certificates, by name.

    Raises:
        FailedPreconditionError: it is no tokens file (reason TOKENS_FILE).
    """
    try:
        found: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FailedPreconditionError(f"the tokens file is no TOML: {error}", reason="TOKENS_FILE") from error
    tokens = found.get(kind, {})
    if not _is_tables(tokens):
        raise FailedPreconditionError(f"the tokens file needs tables [{kind}.NAME]", reason="TOKENS_FILE")
    return tokens


def _is_tables(value: object) -> TypeGuard[Mapping[str, Mapping[str, object]]]:
    return _is_table(value) and all(map(_is_table, value.values()))


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)


def with_token(
    text: str, name: str, role: str, sha256: str, expires: datetime | None, limits: Limits = Limits()
) -> str:
    """The file with one token more.

    Raises:
        AlreadyExistsError: there is one of that name.
        FailedPreconditionError: it is no tokens file (reason TOKENS_FILE).
    """
    if name in read(text):
        raise AlreadyExistsError(f"there is a token {name}; revoke it first", metadata={"name": name})
    lines = [_heading(name), f'role = "{role}"', f'sha256 = "{sha256}"']
    if expires is not None:
        lines.append(f"expires = {expires.isoformat(timespec='seconds')}")
    lines += _limit_lines(limits)
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(lines) + "\n"


def with_limits(text: str, kind: Kind, name: str, limits: Limits) -> str:
    """The file with other limits of a token, or of the caller whom a client certificate names.

    Raises:
        NotFoundError: there is no such token.
        FailedPreconditionError: it is no tokens file, or is written in another way than tables (reason TOKENS_FILE).
    """
    before = read(text, kind)
    if name not in before and kind == "tokens":
        raise NotFoundError(f"there is no token {name}", metadata={"name": name})
    if name not in before:
        text = f"{text.rstrip()}\n\n{_heading(name, kind)}\n"
    after: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            inside = _is_heading(line, kind, name)
            after += [line, *(_limit_lines(limits) if inside else ())]
        elif not (inside and line.split("=")[0].strip() in {"tenants", "max_priority"}):
            after.append(line)
    changed = "\n".join(after) + "\n"
    said = tomllib.loads("\n".join(_limit_lines(limits)))
    kept = {
        key: value for key, value in before.get(name, {}).items() if key not in {"tenants", "max_priority"}
    }
    if _or_none(changed, kind) != {**before, name: {**kept, **said}}:
        raise FailedPreconditionError(
            f"{name} is not written as a table {_heading(name, kind)} with a line for each key: change it by hand",
            reason="TOKENS_FILE",
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
    """The file with one token less.

    Raises:
        NotFoundError: there is none of that name.
        FailedPreconditionError: it is no tokens file, or is written in another way than tables (reason TOKENS_FILE).
    """
    before = read(text)
    if name not in before:
        raise NotFoundError(f"there is no token {name}", metadata={"name": name})
    kept: list[str] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            inside = _is_heading(line, "tokens", name)
        if not inside or line.lstrip().startswith("#"):
            kept.append(line)
    after = "".join(kept)
    if read(after) != {key: value for key, value in before.items() if key != name}:
        raise FailedPreconditionError(
            f"the token {name} is not written as a table [tokens.{name}]: take it out by hand",
            reason="TOKENS_FILE",
        )
    return after


def _heading(name: str, kind: Kind = "tokens") -> str:
    return f'[{kind}."{name}"]'


def _is_heading(line: str, kind: Kind, name: str) -> bool:
    return line.split("#", maxsplit=1)[0].strip() in {
        f"[{kind}.{name}]",
        _heading(name, kind),
        f"[{kind}.'{name}']",
    }

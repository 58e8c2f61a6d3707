"""The text of a tokens file with a token more or less; comments, order and all other lines stay. Pure.

`gpuscale.common.security.tokens` says what the file holds: digests, never a token.
"""

import tomllib
from collections.abc import Mapping
from datetime import datetime
from typing import TypeGuard

from gpuscale.common.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError


def read(text: str) -> Mapping[str, Mapping[str, object]]:
    """The tokens of a file, by name.

    Raises:
        FailedPreconditionError: it is no tokens file (reason TOKENS_FILE).
    """
    try:
        found: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FailedPreconditionError(f"the tokens file is no TOML: {error}", reason="TOKENS_FILE") from error
    tokens = found.get("tokens", {})
    if not _is_tables(tokens):
        raise FailedPreconditionError("the tokens file needs tables [tokens.NAME]", reason="TOKENS_FILE")
    return tokens


def _is_tables(value: object) -> TypeGuard[Mapping[str, Mapping[str, object]]]:
    return _is_table(value) and all(map(_is_table, value.values()))


def _is_table(value: object) -> TypeGuard[Mapping[str, object]]:
    return isinstance(value, dict)


def with_token(text: str, name: str, role: str, sha256: str, expires: datetime | None) -> str:
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
    before = f"{text.rstrip()}\n\n" if text.strip() else ""
    return before + "\n".join(lines) + "\n"


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
            inside = line.split("#")[0].strip() in {f"[tokens.{name}]", _heading(name), f"[tokens.'{name}']"}
        if not inside or line.lstrip().startswith("#"):
            kept.append(line)
    after = "".join(kept)
    if read(after) != {key: value for key, value in before.items() if key != name}:
        raise FailedPreconditionError(
            f"the token {name} is not written as a table [tokens.{name}]: take it out by hand",
            reason="TOKENS_FILE",
        )
    return after


def _heading(name: str) -> str:
    return f'[tokens."{name}"]'

"""Tokens files for tests: the token of NAME is "NAME-token"."""

import hashlib
from pathlib import Path

from gpuscale.common.security.auth import Authenticator


def token(name: str) -> str:
    return f"{name}-token"


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call with the token of `name`."""
    return (("authorization", f"Bearer {token(name)}"),)


def authenticator(folder: Path, **roles: str) -> Authenticator:
    """One that knows these names by their tokens."""
    return Authenticator(tokens_file=write_tokens(folder / "tokens.toml", **roles))


def write_tokens(path: Path, **roles: str) -> Path:
    """Write a tokens file with one token for each name."""
    tables = [
        f'[tokens.{name}]\nrole = "{role}"\nsha256 = "{hashlib.sha256(token(name).encode()).hexdigest()}"\n'
        for name, role in roles.items()
    ]
    path.write_text("".join(tables), encoding="utf-8")
    return path

"""Secret values, which no log, error, response or repr shows, and their files.

Redaction goes by type, not by pattern: a pattern misses passwords with '@' or '/'.
"""

import errno
import os
import stat
import tempfile
from collections import ChainMap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from gpuscale.common.errors import UnavailableError

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, SecretStr
    from pydantic_core import CoreSchema
else:

    class SecretStr:
        """The part of pydantic's class that is used here, so that client and agent need no pydantic."""

        def __init__(self, secret: str) -> None:
            self._secret = secret

        def get_secret_value(self) -> str:
            """The secret."""
            return self._secret


__all__ = [
    "DatabaseUnavailableError",
    "SecretStr",
    "SecretUrl",
    "environment",
    "hide_memory",
    "read_secret",
    "take_variables",
]

_PR_SET_DUMPABLE = 4
_taken: dict[str, str] = {}


class DatabaseUnavailableError(UnavailableError):
    """PostgreSQL cannot be used. The message may have its address, which only admins get (`auth.for_caller`)."""


class SecretUrl:
    """A URL whose user, password and query are secret; `str` and `repr` show the rest. Works as a pydantic field type.

    Raises:
        ValueError: the URL has no scheme or host, or characters that must be percent-encoded; one of PostgreSQL may have
            its host in the query, or none. The error never contains any part of the URL.
    """

    __slots__ = ("_parts", "_port", "_text")

    def __init__(self, text: str) -> None:
        try:
            parts = urlsplit(text)
        except ValueError:
            raise ValueError("is not a URL") from None
        of_libpq = text.startswith(("postgresql://", "postgres://"))
        if not parts.scheme or not (parts.hostname or of_libpq):
            raise ValueError("must look like scheme://user:password@host:port/path")
        # A '/', '?' or '#' in the password ends the host early, which leaves the '@' behind it.
        if "@" in parts.path + parts.query + parts.fragment:
            raise ValueError(
                "has an '@' after its host; percent-encode the special characters of user and password"
            )
        if not text.isprintable() or " " in text:
            raise ValueError("must not hold spaces or control characters")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if port == 0:
            raise ValueError("has a port that is not a number from 1 to 65535") from None
        self._text = text
        self._parts = parts
        self._port = port

    def reveal(self) -> str:
        """The whole URL with its secrets, only for the library that connects."""
        return self._text

    def texts(self) -> tuple[str, ...]:
        """The URL and its passwords, as they are and percent-encoded: what a text must not have."""
        of_query = [one.partition("=")[2] for one in self._parts.query.split("&") if "password=" in one]
        encoded = (self._parts.password or "", *of_query)
        return self._text, *encoded, *map(unquote, encoded)

    @property
    def scheme(self) -> str:
        """The scheme, in lower case."""
        return self._parts.scheme

    @property
    def host(self) -> str:
        """The host, in lower case; an IPv6 address without brackets."""
        return self._parts.hostname or ""

    @property
    def port(self) -> int | None:
        """The port; None if the URL has none."""
        return self._port

    @property
    def path(self) -> str:
        """The path, percent-encoded."""
        return self._parts.path

    @property
    def username(self) -> SecretStr:
        """The user, decoded; empty without one."""
        return SecretStr(unquote(self._parts.username or ""))

    @property
    def password(self) -> SecretStr:
        """The password, decoded; empty without one."""
        return SecretStr(unquote(self._parts.password or ""))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self._port is None else f":{self._port}"
        return f"{self.scheme}://{host}{port}{self.path}"

    def __repr__(self) -> str:
        return f"SecretUrl({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretUrl) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[Any], handler: "GetCoreSchemaHandler") -> "CoreSchema":
        from pydantic_core import PydanticCustomError, core_schema

        def validated(value: object) -> SecretUrl:
            if isinstance(value, SecretUrl):
                return value
            if not isinstance(value, str):
                raise PydanticCustomError("secret_url", "must be a URL")
            try:
                return SecretUrl(value)
            except ValueError as error:
                raise PydanticCustomError("secret_url", "{problem}", {"problem": str(error)}) from None

        return core_schema.no_info_plain_validator_function(
            validated, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


def read_secret(file: Path, what: str) -> str:
    """The content of a file, stripped; `what` names it in errors.

    Raises ValueError: it cannot be read. The error never contains any part of the file.
    """
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "no text")
        raise ValueError(f"cannot read {what} {file}: {why}") from None


def environment() -> Mapping[str, str]:
    """The environment of this process, including variables that `take_variables` removed."""
    return ChainMap(_taken, os.environ)


def take_variables(names: Iterable[str]) -> None:
    """Remove variables from the environment, so that child processes do not inherit them; `environment()` keeps them.

    /proc/PID/environ shows the initial environment in the memory of the process, so that memory is overwritten too.
    """
    found = [name for name in names if name in os.environ]
    if not found:
        return
    import ctypes  # 1 MB, needed only if there are secrets

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    for name in found:
        value = os.environ[name]
        address = libc.getenv(os.fsencode(name))
        if address:
            ctypes.memset(address, 0, len(os.fsencode(value)))
        _taken[name] = value
        del os.environ[name]


def hide_memory() -> None:
    """Hide the memory of this process from other processes of its user: no ptrace, no /proc/PID/mem, no core files.

    For programs that hold secrets and run other people's programs as the same user. Root still sees everything.
    """
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


LINK_PATH = "/open/"
"""A sign-in link is the dashboard's address, this path and a secret."""


def write_private(path: Path, content: bytes, *, public: bool = False, keep_owner: bool = True) -> None:
    """Replace a file atomically, readable by its owner only, or by everyone if `public`.

    With `keep_owner`, an existing file keeps its owner, group and group-read bit: a service that runs as its own user can
    still read a file that root replaced.

    Raises OSError: it cannot be written, or is not a regular file (such as /dev/null); it stays unchanged. The error names the file.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:  # it names the temporary file
        raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            new, mode = os.fstat(descriptor), 0o644 if public else 0o600
            with suppress(FileNotFoundError):
                old = path.lstat()
                if keep_owner and stat.S_ISREG(old.st_mode):
                    mode |= old.st_mode & stat.S_IRGRP
                    # Only if needed: systemd units may forbid the call.
                    if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                        os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except OSError as error:  # it names no file, or the temporary one
        with suppress(OSError):
            Path(name).unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_link(file: Path, address: str) -> str:
    """Create a sign-in link to the dashboard at `address` and write it to a private file. Raises OSError on failure."""
    from secrets import token_urlsafe  # loads OpenSSL: a tenth of a command's start

    link = f"http://{address}{LINK_PATH}{token_urlsafe(16)}"
    write_private(file, f"{link}\n".encode())
    return link

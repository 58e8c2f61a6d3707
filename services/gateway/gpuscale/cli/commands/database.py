"""The PostgreSQL URL of `init` and `join --role standby`: typed, or on standard input."""

import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuscale.cli.commands.units import hand_over
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.secrets import SecretUrl, write_private

POSTGRESQL = option(
    "--postgresql",
    metavar="URL",
    help="The PostgreSQL that standbys share; - reads the URL from standard input, which other users of the host cannot see."
    " Without it, state is kept in files.",
)
_STDIN = "-"
_FILE = "database.url"


@dataclass(frozen=True)
class Database:
    """The URL as typed; None if state is kept in files."""

    url: str | None

    def __post_init__(self) -> None:
        if self.url not in {None, _STDIN}:
            _check(self.url or "")

    def place(self, folder: Path) -> Path | None:
        """The file with the URL, which the settings refer to; those of earlier releases may name one of their owner's."""
        if self.url is None:
            return None
        with suppress(OSError, ValueError, KeyError, TypeError):  # no settings yet
            settings = tomllib.loads((folder / "gpuscale.toml").read_text("utf-8"))
            return Path(settings["allocator"]["database_file"])
        return folder / _FILE

    def new(self, folder: Path) -> str:
        """The URL if its file lacks it, else nothing, as where standard input is empty on a repeat.

        Raises:
            InvalidArgumentError: services could not use it.
            FailedPreconditionError: its file is the owner's (SETTINGS_EXIST).
        """
        place, kept = self.place(folder), ""
        if place is None or self.url is None:
            return ""
        with suppress(OSError, ValueError):
            kept = place.read_text("ascii").strip()
        url = sys.stdin.readline().strip() if self.url == _STDIN else self.url
        if kept and url in {"", kept}:
            return ""
        _check(url)
        if place != folder / _FILE:
            message = f"gpuscale.toml names {place}, which has another URL: change it there"
            raise FailedPreconditionError(message, reason="SETTINGS_EXIST")
        return url

    @property
    def option(self) -> str:
        """The same option for another host, without the password."""
        parts = urlsplit(self.url or "")
        return f"--postgresql {'URL' if parts.password or 'password' in parts.query else self.url}"


def write_url(folder: Path, url: str) -> None:
    """Write a new URL to its file, for services alone. Raises OSError: it cannot be written."""
    if url:
        write_private(folder / _FILE, url.encode())
        hand_over(folder / _FILE)


def _check(url: str) -> None:
    problem = "must be a URL such as postgresql://gpuscale@db.internal/gpuscale"
    if url.partition("://")[0].lower() in {"postgresql", "postgres"}:
        try:
            SecretUrl(url)
        except ValueError as error:
            problem = str(error)
        else:
            return
    raise InvalidArgumentError(f"--postgresql {problem}", field="postgresql")

"""The PostgreSQL URL of `init` and `join --role standby`: typed, or on standard input."""

import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuscale.cli.commands.units import hand_over
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.secrets import write_private

POSTGRESQL = option(
    "--postgresql",
    metavar="URL",
    help="The PostgreSQL that standbys share; - reads the URL from standard input, which other users of the host cannot see."
    " Without it, state is kept in files.",
)
_STDIN = "-"


@dataclass(frozen=True)
class Database:
    """The URL as typed; None if state is kept in files."""

    url: str | None

    def __post_init__(self) -> None:
        if self.url not in {None, _STDIN}:
            _expect_postgresql(self.url or "")

    def place(self, folder: Path) -> Path | None:
        """The file with the URL, which the settings refer to."""
        return None if self.url is None else folder / "database.url"

    def write(self, folder: Path) -> None:
        """Write the URL to its file, for services alone. Raises OSError: it cannot be written."""
        if (place := self.place(folder)) is not None and self.url is not None:
            url = sys.stdin.readline().strip() if self.url == _STDIN else self.url
            _expect_postgresql(url)
            write_private(place, url.encode())
            hand_over(place)

    @property
    def option(self) -> str:
        """The same option for another host, without the password."""
        parts = urlsplit(self.url or "")
        return f"--postgresql {'URL' if parts.password or 'password' in parts.query else self.url}"


def _expect_postgresql(url: str) -> None:
    if urlsplit(url).scheme not in {"postgresql", "postgres"}:
        message = "--postgresql must be a URL such as postgresql://gpuscale@db.internal/gpuscale"
        raise InvalidArgumentError(message, field="postgresql")

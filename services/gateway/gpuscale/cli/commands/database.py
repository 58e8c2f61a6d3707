"""The PostgreSQL URL of `init` and `join --role standby`: typed, in a file, or on standard input."""

import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpuscale.cli.commands.units import as_units_user
from gpuscale.cli.console.command import FILE
from gpuscale.cli.grammar.parameters import option
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.secrets import SecretUrl, read_secret, write_private

DATABASE_FILE = option(
    "--database-file",
    type=FILE,
    help="File with the URL of the PostgreSQL that standbys share, - for standard input; without it, state is kept in files.",
)
POSTGRESQL = option(
    "--postgresql",
    metavar="URL",
    help="The URL itself. Other users of the host can see it: use --database-file if it has a password.",
)


@dataclass(frozen=True)
class Database:
    """The database options; empty if state is kept in files."""

    file: Path | None
    url: str | None

    def __post_init__(self) -> None:
        if self.url is not None and self.file is not None:
            raise InvalidArgumentError("pass either --postgresql or --database-file", field="postgresql")
        if self.url is not None and urlsplit(self.url).scheme not in {"postgresql", "postgres"}:
            message = "--postgresql must be a URL such as postgresql://gpuscale@db.internal/gpuscale"
            raise InvalidArgumentError(message, field="postgresql")

    def __bool__(self) -> bool:
        return self.file is not None or self.url is not None

    def place(self, folder: Path) -> Path | None:
        """The file that the settings refer to."""
        return folder / "database.url" if self.url is not None or str(self.file) == "-" else self.file

    def check(self) -> None:
        """Raises InvalidArgumentError: the services cannot read a URL from the file."""
        try:
            with as_units_user():
                if self.file is not None and str(self.file) != "-":
                    SecretUrl(read_secret(self.file, "the file"))
        except ValueError as error:
            message = f"--database-file, read as services do: {error} (to leave the file to root: --database-file - <{self.file})"
            raise InvalidArgumentError(message, field="database_file") from error

    def write(self, folder: Path) -> Path | None:
        """Write the URL to a file for its owner alone, unless it came from a file. Raises OSError: it cannot be written."""
        place = self.place(folder)
        if place is None or place == self.file:
            return None
        write_private(place, (self.url or sys.stdin.readline()).encode())
        return place

    @property
    def option(self) -> str:
        """The same option for another host, without the password."""
        if self.url is None:
            return "--database-file FILE"
        parts = urlsplit(self.url)
        return f"--postgresql {'URL' if parts.password or 'password' in parts.query else self.url}"

"""What the global options say: where to connect, how, and how to write results."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpuscale.cli.output import Output
from gpuscale.common.errors import UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import Client


@dataclass(frozen=True)
class Session:
    """One run of the program."""

    address: str | None = None
    token_file: Path | None = None
    request_timeout: float = 10.0
    """Seconds that one call may take."""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    output: Output = field(default_factory=Output)

    @contextmanager
    def connect(self) -> "Generator[Client]":
        """A client of the gateway.

        Raises:
            UnavailableError: nothing answers there; the message says how to start something.
        """
        from gpuscale.client import ClientTls, connect, read_token

        tls = ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None
        token = read_token(self.token_file) if self.token_file else None
        with connect(self.address, token=token, tls=tls, timeout=self.request_timeout) as client:
            try:
                yield client
            except UnavailableError as error:
                # A service that is there gives a reason of its own.
                if error.reason != UnavailableError.default_reason:
                    raise
                raise UnavailableError(
                    f"nothing answers at {client.address} ({error.message})\n"
                    "start everything on this machine with: gpuscalectl up",
                    reason="NO_ANSWER",
                ) from error


def session_of(context: typer.Context) -> Session:
    """The session that the global options made."""
    session = context.find_object(Session)
    return session or Session()


def note(text: str) -> None:
    """A line for the person at the terminal, beside the payload."""
    sys.stderr.write(f"{text}\n")

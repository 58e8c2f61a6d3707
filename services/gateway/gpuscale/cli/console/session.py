"""What the global options say: where to connect, how, and how to write results."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gpuscale.cli.console.output import Output
from gpuscale.cli.console.terminal import detail, note
from gpuscale.common.errors import UnavailableError

if TYPE_CHECKING:
    from gpuscale.client import AsyncClient, Client

NO_ANSWER = "NO_ANSWER"
"""Reason of a client's error where no connection is made."""
NOBODY = frozenset({NO_ANSWER, UnavailableError.default_reason})
"""The same, and where a connection is lost: a service that is there gives other reasons."""

__all__ = ["Session", "note", "session_of"]


@dataclass(frozen=True)
class Session:
    """One run of the program."""

    address: str | None = None
    token_file: Path | None = None
    request_timeout: float = 10.0
    """Seconds that one call may take."""
    dial_timeout: float = 5.0
    """Seconds that it may take to connect."""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    context: str | None = None
    output: Output = field(default_factory=Output)

    @contextmanager
    def connect(self, *, quickly: float | None = None, node: str | None = None) -> "Generator[Client]":
        """A client of the gateway; `quickly` bounds the seconds of connecting, and of each call.

        `node` is the one that this host is, where somebody says it.

        Raises:
            UnavailableError: nothing answers there; the message says how to start something.
        """
        from gpuscale.client import ClientTls, connect, read_token

        tls = ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None
        token = read_token(self.token_file) if self.token_file else None
        timeout, began = quickly or self.request_timeout, time.monotonic()
        dial = quickly or self.dial_timeout
        with connect(
            self.address,
            context=self.context,
            token=token,
            tls=tls,
            timeout=timeout,
            dial_timeout=dial,
            node=node,
        ) as client:
            detail(f"asking {client.address}")
            try:
                yield client
            except UnavailableError as error:
                if error.reason != NO_ANSWER:
                    raise
                raise _no_answer(error) from error
            finally:
                detail(f"took {time.monotonic() - began:.3f} s")

    def connect_async(self) -> "AsyncClient":
        """An async client of the gateway, for a screen of its own; no call is made yet."""
        from gpuscale.client import ClientTls, connect_async, read_token

        tls = ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None
        token = read_token(self.token_file) if self.token_file else None
        return connect_async(
            self.address, context=self.context, token=token, tls=tls, timeout=self.request_timeout
        )


def _no_answer(error: UnavailableError) -> UnavailableError:
    return UnavailableError(
        f"{error.message}\nstart everything on this machine with: gpuscalectl up\n"
        "or say where it is: --address HOST:PORT, GPUSCALE_ADDRESS, or gpuscalectl config set-context",
        reason=NO_ANSWER,
    )


def session_of(context: typer.Context) -> Session:
    """The session that the global options made."""
    session = context.find_object(Session)
    return session or Session()

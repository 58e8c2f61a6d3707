"""The connection to a server and the form of output that the common options describe."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict

from gpuscale import client as library
from gpuscale.cli.console.output import Output
from gpuscale.cli.console.terminal import detail
from gpuscale.common.errors import UnavailableError
from gpuscale.common.rpc import channel

NO_ANSWER = "NO_ANSWER"
"""The reason of a client's error if it cannot connect."""
NOBODY = frozenset({NO_ANSWER, UnavailableError.default_reason})
"""Reasons of errors without an answer; a service that answers gives others."""


class _Where(TypedDict):
    context: str | None
    token: str | Path | None
    tls: library.ClientTls | None


@dataclass(frozen=True)
class Session:
    """One run of the program.

    Attributes:
        without_token: send no token, even if the environment names one.
        request_timeout: most seconds of a call.
        dial_timeout: most seconds to connect.
        kept: an open client to use instead of a new one.
    """

    address: str | None = None
    token_file: Path | None = None
    without_token: bool = False
    request_timeout: float = 10.0
    dial_timeout: float = 5.0
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    context: str | None = None
    kept: library.Client | None = None
    output: Output = field(default_factory=Output)

    def options(self) -> list[str]:
        """The command-line options for the same server."""
        named = {
            name: getattr(self, name)
            for name in ("address", "token_file", "ca_file", "cert_file", "key_file", "context")
        }
        return [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value is not None]

    @contextmanager
    def connect(self, *, quickly: float | None = None, node: str | None = None) -> Generator[library.Client]:
        """A client of the gateway.

        Args:
            quickly: most seconds to connect, and for each call.
            node: this host's node, if an option names it.

        Raises:
            UnavailableError: nothing answers; the message says how to start a server.
        """
        if self.kept is not None:
            yield self.kept
            return
        timeout, dial = quickly or self.request_timeout, quickly or self.dial_timeout
        began = time.monotonic()
        with library.connect(
            self.address, **self._where(), timeout=timeout, dial_timeout=dial, node=node
        ) as client:
            detail(f"connecting to {client.address}")
            try:
                yield client
            except UnavailableError as error:
                if error.reason != NO_ANSWER:
                    raise
                message = (
                    f"{error.message}\nto start everything on this machine: gpuscalectl up\n"
                    "to use another server: --address HOST:PORT, GPUSCALE_ADDRESS, or gpuscalectl config set-context"
                )
                raise UnavailableError(message, reason=NO_ANSWER) from error
            finally:
                detail(f"took {time.monotonic() - began:.3f} s")

    def each(self) -> Sequence[Session]:
        """A session for each of its addresses."""
        with self.connect() as client:
            addresses = channel.split_addresses(client.address)
        current = None if self.address or os.environ.get("GPUSCALE_ADDRESS") else ""
        return [replace(self, address=one, context=self.context or current) for one in addresses]

    def connect_async(self) -> library.AsyncClient:
        """An async client of the gateway, not yet connected."""
        return library.connect_async(self.address, **self._where(), timeout=self.request_timeout)

    def _where(self) -> _Where:
        return {
            "context": self.context,
            "token": "" if self.without_token else self.token_file,
            "tls": library.ClientTls(self.ca_file, self.cert_file, self.key_file) if self.ca_file else None,
        }

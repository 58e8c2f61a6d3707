"""Settings of a program: flags, then environment, then file, then defaults; whatever is unknown is an error.

A program has one class of `Settings`. Its field `period_seconds` in section `agent` is the flag `--period-seconds`,
the variable GPUSCALE_AGENT_PERIOD_SECONDS and the key `period_seconds` of the table `[agent]` in the TOML file that
`--config` or GPUSCALE_CONFIG names. Fields that are mappings come from the file only, as tables of their own
(`[brokers.default]`); secrets are never taken as flags, which every user of the host can read.

`run_program` is what a service's `main` does with them: begin to log, and serve until it is told to stop. What a program makes of
them besides is its `frame`, which each class here is a kind of.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self, TypeVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from gpuscale.common.config.frame import (
    Format,
    Level,
    ListenerFrame,
    MetricsPageFrame,
    ProgramFrame,
    ServerFrame,
    UpstreamFrame,
    start,
)
from gpuscale.common.config.sources import Settings, load, secret_variables
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc import meter as rpc_meter
from gpuscale.common.rpc import server as rpc_server
from gpuscale.common.runtime import logs
from gpuscale.common.secrets import SecretUrl, read_secret
from gpuscale.common.store.term import Term


class ProgramSettings(ProgramFrame, Settings):
    """Settings of every program."""

    log_level: Level = Field("info", description="least level that is logged")
    log_format: Format = Field("auto", description="console, json, or auto: console on a terminal, else json")
    health_listen: str = Field(
        "",
        description="address of gRPC health checks alone, HOST:PORT, in plain text for probes that speak no TLS; not served when empty",
    )


class ListenerSettings(ListenerFrame, ProgramSettings):
    """Settings of every program that others may ask: TLS, and who is let in."""

    tls_cert_file: Path | None = Field(None, description="certificate of the server, PEM")
    tls_key_file: Path | None = Field(None, description="key of that certificate, PEM")
    tls_client_ca_file: Path | None = Field(
        None, description="authority that clients' certificates must come from; switches mTLS on"
    )
    tokens_file: Path | None = Field(
        None, description="accepted bearer tokens, TOML; callers on loopback then need one too"
    )
    revoked_file: Path | None = Field(
        None, description="client certificates that count no more, TOML; needs tls_client_ca_file"
    )
    insecure_allow_remote: bool = Field(default=False, description="serve other hosts without TLS")

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file and tls_key_file")
        if self.revoked_file is not None and self.tls_client_ca_file is None:
            raise ValueError("revoked_file needs tls_client_ca_file")
        return self


class ServerSettings(ServerFrame, ListenerSettings):
    """Settings of every program that serves gRPC."""

    listen: str = Field("127.0.0.1:0", description="address to serve on, HOST:PORT")
    reflection: bool = Field(default=False, description="serve gRPC reflection")
    calls_per_second: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="calls that each caller may make in a second, twice as many at once; 0 for any number",
    )
    audit_file: Path | None = Field(
        None, description="file of the audit log, JSON lines; - for standard output"
    )
    audit_max_mib: int = Field(
        64, ge=1, le=65_536, description="size of one file of it, in MiB; four full ones are kept"
    )


class MetricsPageSettings(MetricsPageFrame, ListenerSettings):
    """Settings of every program that serves `/metrics`, with the TLS and tokens of its other server, if it has one."""

    metrics_listen: str = Field("", description="address of /metrics, HOST:PORT; not served when empty")


class MetricsSettings(ServerSettings, MetricsPageSettings):
    """Settings of every program that serves gRPC and `/metrics`."""


class DatabaseSettings(Settings):
    """Settings of every program that keeps its state in a file or in PostgreSQL."""

    database_file: Path | None = Field(None, description="file that holds the URL of database, in its place")
    database: SecretUrl | None = Field(
        None,
        validate_default=True,
        description="PostgreSQL that keeps the state, postgresql://USER@HOST/NAME; a file in data_dir when not set",
    )
    advertise_address: str = Field(
        "",
        description="address at which others reach this process when it leads; the one it listens on when empty",
    )

    def require_driver(self) -> None:
        """Check that the PostgreSQL driver is installed. Raises FailedPreconditionError: it is not."""
        try:
            import_module("psycopg")
        except ImportError as error:
            raise FailedPreconditionError(
                f"database needs a library ({error}): pip install 'gpuscale[postgresql]'",
                reason="POSTGRESQL_NOT_INSTALLED",
            ) from error

    @field_validator("database", mode="before")
    @classmethod
    def _from_file(cls, value: object, info: ValidationInfo) -> object:
        file: Path | None = info.data.get("database_file")
        if file is None:
            return None if value == "" else value
        if value:
            raise ValueError("cannot be combined with database_file")
        return read_secret(file, "database_file")

    @field_validator("database")
    @classmethod
    def _check_database(cls, value: SecretUrl | None) -> SecretUrl | None:
        if value is not None and value.scheme not in {"postgresql", "postgres"}:
            raise ValueError("must begin with postgresql://")
        return value


class UpstreamSettings(UpstreamFrame, Settings):
    """Settings of every program that calls other programs."""

    ca_file: Path | None = Field(None, description="authority of the servers called, PEM; switches TLS on")
    cert_file: Path | None = Field(None, description="client certificate to show them, PEM; needs ca_file")
    key_file: Path | None = Field(None, description="key of the client certificate, PEM")
    token_file: Path | None = Field(
        None, description="file with the bearer token to send, over TLS or to this host only"
    )

    @model_validator(mode="after")
    def _check_upstream(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file")
        return self


class StatefulSettings(MetricsSettings, DatabaseSettings, UpstreamSettings):
    """Settings of every program that serves, keeps state and calls others."""


S = TypeVar("S", bound=ProgramSettings)


def run_program(
    settings_type: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str,
) -> int:
    """Run a service as a program: read its settings, start the log, serve.

    Args:
        settings_type: what it is told, by flags, variables and file.
        serve: the service; ends after the event, its `stop`, is set.
        argv: flags; None for those of the process.
        program: its name, as typed.
        description: what it does, for `--help`.

    Returns:
        The exit code.
    """
    settings = load(settings_type, argv, program=program, description=description)
    return start(settings, secret_variables(settings), serve, program=program)


def hand_over(settings_type: type[Settings], *, program: str, description: str) -> None:
    """Tell the process that started this one by `frame.run_apart` what it is told: the first argument is where, the others its own."""
    place, *argv = sys.argv[1:]
    settings = load(settings_type, argv, program=program, description=description)
    os.write(int(place), pickle.dumps((vars(settings), secret_variables(settings))))


class Opening(Protocol):
    """Starts a service and yields what the server serves; `term` is set where one of several processes leads.

    What it does it shows on the `/metrics` of `meter`.
    """

    def __call__(
        self, *, term: Term | None, meter: rpc_meter.CallMeter
    ) -> AbstractAsyncContextManager[Sequence[rpc_server.Registration]]:
        """Read its state and start its tasks; they end on leaving."""
        ...


async def serve_stateful(
    settings: StatefulSettings, *, services: Sequence[str], act: Opening, stop: asyncio.Event
) -> None:
    """Serve what keeps a state until `stop` is set: at once, or with a database whenever this process leads.

    Args:
        settings: say where, and name the database, if there is one.
        services: full names of what `act` opens.
        act: the service.
        stop: ends it.

    Raises:
        GpuscaleError: the stored state, the database, or an address cannot be used.
    """
    authenticator = settings.authenticator()
    meter = rpc_meter.CallMeter(settings.section, authenticator)
    server = rpc_server.Server(
        settings.server_options(), authenticator, meter if settings.metrics_listen else None
    )
    address = server.bind()

    @asynccontextmanager
    async def leading(term: Term | None) -> AsyncGenerator[Sequence[rpc_server.Registration]]:
        async with act(term=term, meter=meter) as registrations:
            with meter.leading(0 if term is None else term.epoch):
                yield registrations

    async with settings.open_metrics(meter.render):
        if settings.database is None:
            async with leading(None) as registrations:
                server.add(*registrations)
                async with server:
                    logs.get_logger(__name__).info("serving", address=address)
                    await stop.wait()
            return
        settings.require_driver()
        from gpuscale.common.rpc.standby import serve_by_turns
        from gpuscale.common.store.leadership import Candidate

        logs.get_logger(__name__).info("standing by", address=address, database=str(settings.database))
        candidate = Candidate(settings.database, settings.section, settings.advertise_address or address)
        await serve_by_turns(server, candidate, services, leading, stop, settings.open_channel)

"""Settings of a program: flags, then environment, then file, then defaults; anything unknown is an error.

Each program has one `Settings` class. Its field `period_seconds` in section `agent` is the flag `--period-seconds`,
the variable GPUSCALE_AGENT_PERIOD_SECONDS and the key `period_seconds` in the table `[agent]` of the TOML file named by
`--config` or GPUSCALE_CONFIG. Mappings come only from the file, as tables of their own (`[brokers.default]`). Secrets are
never flags, which every user of the host can read.

A service's `main` calls `run_program`. What a program builds from its settings is in `frame`, the base of each class here.
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

from gpuscale.common.config import frame
from gpuscale.common.config.sources import Settings, load, secret_variables
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError
from gpuscale.common.rpc import channel as rpc_channel
from gpuscale.common.rpc import meter as rpc_meter
from gpuscale.common.rpc import server as rpc_server
from gpuscale.common.runtime import logs
from gpuscale.common.secrets import SecretUrl, read_secret
from gpuscale.common.store.term import Term


class ProgramSettings(frame.ProgramFrame, Settings):
    """Settings of every program."""

    log_level: frame.Level = Field("info", description="lowest level to log")
    log_format: frame.Format = Field(
        "auto", description="console, json, or auto: console on a terminal, else json"
    )
    health_listen: str = Field(
        "",
        description="HOST:PORT of a plain-text port for gRPC health checks only, for probes without TLS; off when empty",
    )


class ListenerSettings(frame.ListenerFrame, ProgramSettings):
    """Settings of every program with a listening port: TLS and authentication."""

    tls_cert_file: Path | None = Field(None, description="certificate of the server, PEM")
    tls_key_file: Path | None = Field(None, description="key of that certificate, PEM")
    tls_client_ca_file: Path | None = Field(
        None, description="authority of client certificates, PEM; switches mTLS on"
    )
    tokens_file: Path | None = Field(
        None, description="accepted bearer tokens, TOML; callers on loopback then need one too"
    )
    revoked_file: Path | None = Field(
        None, description="revoked client certificates, TOML; needs tls_client_ca_file"
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


class ServerSettings(frame.ServerFrame, ListenerSettings):
    """Settings of every program that serves gRPC."""

    listen: str = Field("127.0.0.1:0", description="address to serve on, HOST:PORT")
    reflection: bool = Field(default=False, description="serve gRPC reflection")
    calls_per_second: float = Field(
        0.0,
        ge=0,
        le=1_000_000,
        description="calls per second and caller, twice as many in a burst; 0 for no limit",
    )
    audit_file: Path | None = Field(
        None, description="file of the audit log, JSON lines; - for standard output"
    )
    audit_max_mib: int = Field(
        64,
        ge=1,
        le=65_536,
        description="size at which the audit file is rotated, in MiB; four old files are kept",
    )


class MetricsPageSettings(frame.MetricsPageFrame, ListenerSettings):
    """Settings of every program that serves `/metrics`, with the TLS and tokens of its gRPC server."""

    metrics_listen: str = Field("", description="HOST:PORT of /metrics; off when empty")


class MetricsSettings(ServerSettings, MetricsPageSettings):
    """Settings of every program that serves gRPC and `/metrics`."""


class DatabaseSettings(Settings):
    """Settings of every program that stores its state in a file or PostgreSQL."""

    database_file: Path | None = Field(None, description="file with the URL for database")
    database: SecretUrl | None = Field(
        None,
        validate_default=True,
        description="PostgreSQL for the state, postgresql://USER@HOST/NAME; without it, a file in data_dir",
    )
    advertise_address: str = Field(
        "", description="address of this process for others when it leads; empty for the listen address"
    )

    def require_driver(self) -> None:
        """Raise FailedPreconditionError if the PostgreSQL driver is not installed."""
        try:
            import_module("psycopg")
        except ImportError as error:
            raise FailedPreconditionError(
                f"database needs a library ({error}): pip install 'gpuscale[postgresql]'",
                reason="POSTGRESQL_NOT_INSTALLED",
            ) from error

    def shared(self, term: Term | None) -> tuple[SecretUrl, Term] | None:
        """The database, and the term in which this process may write it; None for a file.

        Raises FailedPreconditionError: it leads for no term, as in one process with other services (DATABASE_REFUSED).
        """
        if self.database is None:
            return None
        if term is None:
            raise FailedPreconditionError(
                f"only gpuscale-{self.section} keeps its state in PostgreSQL: leave database out here",
                reason="DATABASE_REFUSED",
            )
        return self.database, term

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


class UpstreamSettings(frame.UpstreamFrame, Settings):
    """Settings of every program that calls other programs."""

    ca_file: Path | None = Field(None, description="authority of upstream servers, PEM; switches TLS on")
    cert_file: Path | None = Field(
        None, description="client certificate for upstream servers, PEM; needs ca_file"
    )
    key_file: Path | None = Field(None, description="key of the client certificate, PEM")
    token_file: Path | None = Field(
        None,
        description="file with the bearer token for upstream servers; sent only over TLS or to this host",
    )

    @field_validator(
        *(f"{name}_address" for name in ("fleet", "allocator", "autoscaler", "agent", "gateway")),
        check_fields=False,
    )
    @classmethod
    def _check_address(cls, value: str) -> str:
        try:
            return value and ",".join(rpc_channel.split_addresses(value))
        except InvalidArgumentError as error:
            raise ValueError(error.message) from None

    @model_validator(mode="after")
    def _check_upstream(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file")
        return self


class StatefulSettings(MetricsSettings, DatabaseSettings, UpstreamSettings):
    """Settings of every program that serves, stores state and calls others."""


S = TypeVar("S", bound=ProgramSettings)


def run_program(
    settings_type: type[S],
    serve: Callable[[S, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    program: str,
    description: str,
) -> int:
    """Run a service as a program: read its settings, set up the log, serve; returns the exit code.

    Args:
        settings_type: the class of its settings.
        serve: the service; ends after the event, its `stop`, is set.
        argv: flags; None for those of the process.
        program: name of the program.
        description: text for `--help`.
    """
    settings = load(settings_type, argv, program=program, description=description)
    return frame.start(settings, secret_variables(settings), serve, program=program)


def hand_over(settings_type: type[Settings], *, program: str, description: str) -> None:
    """Send settings to the parent of `frame.run_apart`: the first argument is a file descriptor, the others are flags."""
    descriptor, *argv = sys.argv[1:]
    settings = load(settings_type, argv, program=program, description=description)
    os.write(int(descriptor), pickle.dumps((vars(settings), secret_variables(settings))))


class Opening(Protocol):
    """Starts a service and yields what to serve, with its series in `meter`; `term` is set if several compete to lead."""

    def __call__(
        self, *, term: Term | None, meter: rpc_meter.CallMeter
    ) -> AbstractAsyncContextManager[Sequence[rpc_server.Registration]]:
        """Read the state and start the tasks; leaving the context ends them."""
        ...


async def serve_stateful(
    settings: StatefulSettings, *, services: Sequence[str], act: Opening, stop: asyncio.Event
) -> None:
    """Serve a stateful service until `stop` is set; with a database, only while this process leads.

    Args:
        settings: addresses, and the database if any.
        services: full names of the services that `act` opens.
        act: opens the service.
        stop: ends it.

    Raises:
        GpuscaleError: the stored state, the database, or an address cannot be used.
    """
    authenticator = settings.authenticator()
    meter = rpc_meter.CallMeter(settings.section, authenticator)
    meter.terms = 0
    server = rpc_server.Server(
        settings.server_options(), authenticator, meter if settings.metrics_listen else None
    )
    address = server.bind()

    @asynccontextmanager
    async def leading(term: Term | None) -> AsyncGenerator[Sequence[rpc_server.Registration]]:
        async with act(term=term, meter=meter) as registrations:
            with meter.leading(0 if term is None else term.epoch):
                yield registrations

    async with settings.open_metrics(meter):
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

"""Settings of a program: flags, then environment, then file, then defaults; whatever is unknown is an error.

A program has one class of `Settings`. Its field `period_seconds` in section `agent` is the flag `--period-seconds`,
the variable GPUSCALE_AGENT_PERIOD_SECONDS and the key `period_seconds` of the table `[agent]` in the TOML file that
`--config` or GPUSCALE_CONFIG names. Fields that are mappings come from the file only, as tables of their own
(`[brokers.default]`); secrets are never taken as flags, which every user of the host can read.

`run_program` is what every service's `main` does with them: begin to log, and serve until it is told to stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol, Self, TypeVar

import grpc
from pydantic import Field, SecretStr, ValidationInfo, field_validator, model_validator

from gpuscale.common.config.sources import Settings, load, secret_variables
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.rpc import audit, calls, channel, diagnosis, wrapped_channel
from gpuscale.common.rpc import meter as rpc_meter
from gpuscale.common.rpc import server as rpc_server
from gpuscale.common.runtime import lifecycle, logs, tasks
from gpuscale.common.secrets import SecretUrl, read_secret, take_variables
from gpuscale.common.security import auth, tls
from gpuscale.common.store.term import Term

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]


class ProgramSettings(Settings):
    """Settings of every program."""

    log_level: Level = Field("info", description="least level that is logged")
    log_format: Format = Field("auto", description="console, json, or auto: console on a terminal, else json")
    health_listen: str = Field(
        "",
        description="address of gRPC health checks alone, HOST:PORT, in plain text for probes that speak no TLS; not served when empty",
    )

    @asynccontextmanager
    async def open_health(self) -> AsyncGenerator[None]:
        """Answer health checks until the block ends, for a program that serves no gRPC.

        Raises:
            FailedPreconditionError: the address cannot be listened on.
            InvalidArgumentError: the address is none.
        """
        if not self.health_listen:
            yield
            return
        server, port = rpc_server.bind_health(self.health_listen)
        await server.start()
        async with tasks.TaskScope() as scope:
            scope.spawn("watch connections", calls.Connections().watch(port))
            try:
                yield
            finally:
                await server.stop(None)


class ListenerSettings(ProgramSettings):
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

    def server_tls(self) -> tls.ServerTls | None:
        """The files of its certificate; None for plain text."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return tls.ServerTls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    def server_options(self) -> rpc_server.ServerOptions:
        """How the server listens."""
        return rpc_server.ServerOptions(
            tls=self.server_tls(), insecure_allow_remote=self.insecure_allow_remote
        )

    def authenticator(
        self, internal_token: SecretStr | None = None, *, socket_role: auth.Role | None = None
    ) -> auth.Authenticator:
        """Who is let in; `internal_token` is for the parts of this process, `socket_role` for callers of a socket with a path.

        Raises:
            FailedPreconditionError: the tokens file or the deny list cannot be used.
        """
        return auth.Authenticator(
            tokens_file=self.tokens_file,
            accept_certificates=self.tls_client_ca_file is not None,
            insecure_allow_remote=self.insecure_allow_remote,
            internal_token=internal_token,
            revoked_file=self.revoked_file,
            socket_role=socket_role,
        )


class ServerSettings(ListenerSettings):
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

    def server_options(self) -> rpc_server.ServerOptions:
        """How the server listens."""
        return replace(
            super().server_options(),
            listen=self.listen,
            reflection=self.reflection,
            calls_per_second=self.calls_per_second,
            audit=audit.AuditOptions(self.audit_file, self.audit_max_mib << 20) if self.audit_file else None,
            health_listen=self.health_listen,
        )


class MetricsPageSettings(ListenerSettings):
    """Settings of every program that serves `/metrics`, with the TLS and tokens of its other server, if it has one."""

    metrics_listen: str = Field("", description="address of /metrics, HOST:PORT; not served when empty")

    @asynccontextmanager
    async def open_metrics(self, render: Callable[[], AsyncGenerator[bytes]]) -> AsyncGenerator[str]:
        """Serve a page until the block ends; yields the address, empty where nothing is served.

        Raises:
            FailedPreconditionError: the address cannot be listened on, or needs TLS; a file cannot be used.
            InvalidArgumentError: the address is none.
        """
        if not self.metrics_listen:
            yield ""
            return
        from gpuscale.common.rpc.metrics_http import (
            serve_metrics,  # not even imported where it is not asked for
        )

        fields = ("tls_cert_file", "tls_client_ca_file", "cert_file", "ca_file")
        files = {name: path for name in fields if isinstance(path := getattr(self, name, None), Path)}

        async def render_all() -> AsyncGenerator[bytes]:
            async with aclosing(render()) as chunks:
                async for chunk in chunks:
                    yield chunk
            yield await asyncio.to_thread(rpc_meter.certificates_text, files)  # it reads files

        options, authenticator = self.server_options(), self.authenticator()
        async with serve_metrics(self.metrics_listen, options, authenticator, render_all) as address:
            logs.get_logger(__name__).info("metrics are served", address=address)
            yield address

    @asynccontextmanager
    async def observed(self, meter: rpc_meter.ProgramMeter) -> AsyncGenerator[None]:
        """Serve metrics and health checks until the block ends, for a program that serves no gRPC.

        Raises:
            FailedPreconditionError: an address cannot be listened on, or needs TLS; a file cannot be used.
            InvalidArgumentError: an address is none.
        """
        async with tasks.TaskScope() as scope, self.open_metrics(meter.render) as address, self.open_health():
            if address:
                scope.spawn("watch the event loop", meter.watch_loop())
            yield


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


class UpstreamSettings(Settings):
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

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """A channel to `address` with these credentials; the caller closes it. It follows the files of TLS.

        Raises:
            FailedPreconditionError: a file cannot be used.
        """
        token = None
        if self.token_file is not None:
            try:
                token = SecretStr(read_secret(self.token_file, "the token file"))
            except ValueError as error:
                raise FailedPreconditionError(str(error), reason="TOKEN_FILE") from None
        opening = partial(channel.open_channel, address, tls=self._tls(), token=token)
        if self.ca_file is None:
            return opening()
        followed = tls.follow_client(self.ca_file, self.cert_file, self.key_file)
        return wrapped_channel.RenewedChannel(opening, followed.newer)

    def why_unavailable(self, address: str, error: UnavailableError) -> GpuscaleError:
        """The error, with what is wrong with TLS to `address` if that is the cause. Blocks for up to two seconds."""
        return diagnosis.explained(address, self._tls(), error, diagnosis.PATIENCE)

    def _tls(self) -> channel.ClientTls | None:
        return (
            None if self.ca_file is None else channel.ClientTls(self.ca_file, self.cert_file, self.key_file)
        )


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
    quiet: bool = False,
) -> int:
    """Run a service as a program: read its settings, start the log, serve.

    Args:
        settings_type: what it is told, by flags, variables and file.
        serve: the service; ends after the event, its `stop`, is set.
        argv: flags; None for those of the process.
        program: its name, as typed.
        description: what it does, for `--help`.
        quiet: it wakes up a few times a second only, see `lifecycle.run`.

    Returns:
        The exit code.
    """
    settings = load(settings_type, argv, program=program, description=description)
    logs.configure(settings.log_level, settings.log_format, service=program)
    logs.capture()
    take_variables(secret_variables(settings))
    return lifecycle.run(partial(serve, settings), program=program, quiet=quiet)


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

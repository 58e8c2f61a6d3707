"""What a program builds from its settings: server, metrics page, channels.

`settings` reads and checks the values with pydantic. This module does not need pydantic: an agent uses only these classes and has
a child process read its settings (`run_apart`).
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import grpc

from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, UnavailableError
from gpuscale.common.rpc import audit, channel, diagnosis, limits, wrapped_channel
from gpuscale.common.rpc import meter as rpc_meter
from gpuscale.common.rpc import server as rpc_server
from gpuscale.common.runtime import lifecycle, logs, tasks
from gpuscale.common.secrets import SecretStr, read_secret, take_variables
from gpuscale.common.security import auth, tls

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]


class ProgramFrame:
    """Every program. The class of the same name in `settings` (here `ProgramSettings`) describes the fields."""

    section: ClassVar[str]

    log_level: Level
    log_format: Format
    health_listen: str

    @asynccontextmanager
    async def open_health(self) -> AsyncGenerator[None]:
        """Answer health checks during the block, for a program that serves no gRPC. Raises as `bind_health`."""
        if not self.health_listen:
            yield
            return
        server, port = rpc_server.bind_health(self.health_listen)
        await server.start()
        async with tasks.TaskScope() as scope:
            scope.spawn("watch connections", limits.Connections().watch(port))
            try:
                yield
            finally:
                await server.stop(None)


class ListenerFrame(ProgramFrame):
    """A program with a listening port."""

    tls_cert_file: Path | None
    tls_key_file: Path | None
    tls_client_ca_file: Path | None
    tokens_file: Path | None
    revoked_file: Path | None
    insecure_allow_remote: bool

    def server_tls(self) -> tls.ServerTls | None:
        """The certificate files; None for plain text."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return tls.ServerTls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    def server_options(self) -> rpc_server.ServerOptions:
        """The options of the server."""
        return rpc_server.ServerOptions(
            tls=self.server_tls(), insecure_allow_remote=self.insecure_allow_remote
        )

    def authenticator(
        self, internal_token: SecretStr | None = None, *, socket_role: auth.Role | None = None
    ) -> auth.Authenticator:
        """The authenticator; `internal_token` admits parts of this process, `socket_role` callers of a unix socket.

        Raises FailedPreconditionError: the tokens file or the deny list cannot be used.
        """
        return auth.Authenticator(
            tokens_file=self.tokens_file,
            accept_certificates=self.tls_client_ca_file is not None,
            insecure_allow_remote=self.insecure_allow_remote,
            internal_token=internal_token,
            revoked_file=self.revoked_file,
            socket_role=socket_role,
        )


class ServerFrame(ListenerFrame):
    """A program that serves gRPC."""

    listen: str
    reflection: bool
    calls_per_second: float
    audit_file: Path | None
    audit_max_mib: int

    def server_options(self) -> rpc_server.ServerOptions:
        """The options of the server."""
        return replace(
            super().server_options(),
            listen=self.listen,
            reflection=self.reflection,
            calls_per_second=self.calls_per_second,
            audit=audit.AuditOptions(self.audit_file, self.audit_max_mib << 20) if self.audit_file else None,
            health_listen=self.health_listen,
        )


class MetricsPageFrame(ListenerFrame):
    """A program that serves `/metrics`."""

    metrics_listen: str

    @asynccontextmanager
    async def open_metrics(self, meter: rpc_meter.ProgramMeter) -> AsyncGenerator[str]:
        """Serve `/metrics` and watch the event loop for it during the block; yields the address, or "" if not configured.

        Raises:
            FailedPreconditionError: the address cannot be bound or needs TLS, or a file cannot be used.
            InvalidArgumentError: the address is malformed.
        """
        if not self.metrics_listen:
            yield ""
            return
        from gpuscale.common.rpc.metrics_http import serve_metrics  # loads h11

        fields = ("tls_cert_file", "tls_client_ca_file", "cert_file", "ca_file")
        files = {name: path for name in fields if isinstance(path := getattr(self, name, None), Path)}

        async def render_all() -> AsyncGenerator[bytes]:
            async with aclosing(meter.render()) as chunks:
                async for chunk in chunks:
                    yield chunk
            yield await asyncio.to_thread(rpc_meter.certificates_text, files)  # reads files

        options, authenticator = self.server_options(), self.authenticator()
        served = serve_metrics(self.metrics_listen, options, authenticator, render_all)
        async with served as address, tasks.TaskScope() as scope:
            scope.spawn("watch the event loop", meter.watch_loop())
            logs.get_logger(__name__).info("metrics are served", address=address)
            yield address

    @asynccontextmanager
    async def observed(self, meter: rpc_meter.ProgramMeter) -> AsyncGenerator[None]:
        """Serve metrics and health checks during the block, for a program that serves no gRPC. Raises as `open_metrics`."""
        async with self.open_metrics(meter), self.open_health():
            yield


class UpstreamFrame:
    """A program that calls other programs."""

    ca_file: Path | None
    cert_file: Path | None
    key_file: Path | None
    token_file: Path | None

    def open_channel(self, address: str, *, urgent: bool = False) -> grpc.aio.Channel:
        """A channel to `address` with these credentials, which reloads changed TLS files; the caller closes it.

        An `urgent` channel finds a server that comes back within a second or two.

        Raises FailedPreconditionError: a file cannot be used.
        """
        token = None
        if self.token_file is not None:
            try:
                token = SecretStr(read_secret(self.token_file, "the token file"))
            except ValueError as error:
                raise FailedPreconditionError(str(error), reason="TOKEN_FILE") from None
        opening = partial(channel.open_channel, address, tls=self._tls(), token=token, urgent=urgent)
        if self.ca_file is None:
            return opening()
        followed = tls.follow_client(self.ca_file, self.cert_file, self.key_file)
        return wrapped_channel.RenewedChannel(opening, followed.newer)

    def why_unavailable(self, address: str, error: UnavailableError) -> GpuscaleError:
        """The error, or a TLS problem with `address` that explains it. Blocks for seconds."""
        return diagnosis.explained(address, self._tls(), error, diagnosis.PATIENCE)

    def _tls(self) -> channel.ClientTls | None:
        return (
            None if self.ca_file is None else channel.ClientTls(self.ca_file, self.cert_file, self.key_file)
        )


F = TypeVar("F", bound=ProgramFrame)


def start(
    settings: F, secrets: Iterable[str], serve: Callable[[F, asyncio.Event], Awaitable[None]], *, program: str
) -> int:
    """Set up the log and serve until the event of `serve`, its `stop`, is set; returns the exit code.

    `secrets` are environment variables that child processes must not inherit.
    """
    logs.configure(settings.log_level, settings.log_format, service=program)
    logs.capture()
    take_variables(secrets)
    return lifecycle.run(partial(serve, settings), program=program)


def run_apart(
    frame: type[F],
    module: str,
    serve: Callable[[F, asyncio.Event], Awaitable[None]],
    argv: Sequence[str] | None,
    *,
    program: str,
) -> int:
    """Run a service whose settings a child process, `python -m module`, reads and returns with `hand_over`.

    So this process never loads pydantic. If the child returns no settings (`--help`, or an error), returns its exit code.
    """
    read, write = os.pipe()
    with os.fdopen(read, "rb") as answer:
        command = [sys.executable, "-m", module, str(write), *(sys.argv[1:] if argv is None else argv)]
        process = subprocess.Popen(command, pass_fds=[write])
        os.close(write)
        answered = answer.read()
    code = process.wait()
    if code or not answered:
        return code if code >= 0 else 128 - code
    values, secrets = pickle.loads(answered)  # noqa: S301 - from our own child process
    settings = frame()
    vars(settings).update(values)
    return start(settings, secrets, serve, program=program)

"""Settings of `gpuscale-dashboard`; `gpuscale.common.config.settings` says where they come from."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from gpuscale.common.config.settings import ProgramSettings, UpstreamSettings
from gpuscale.common.security.tls import ServerTls


class DashboardSettings(ProgramSettings, UpstreamSettings):
    """What the dashboard is told before it starts; the upstream is the gateway."""

    section: ClassVar[str] = "dashboard"

    gateway_address: str = Field("127.0.0.1:7070", description="address of the gateway, HOST:PORT")
    listen: str = Field("127.0.0.1:7080", description="address to serve browsers on, HOST:PORT")
    tls_cert_file: Path | None = Field(None, description="certificate of the server, PEM")
    tls_key_file: Path | None = Field(None, description="key of that certificate, PEM")
    sign_in: bool = Field(
        default=False, description="require visitors to sign in with a token that the gateway accepts"
    )
    insecure_allow_remote: bool = Field(
        default=False, description="serve other hosts without TLS or without sign-in"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="host name to answer to where nobody signs in; localhost and IP addresses are always answered; may be repeated",
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        return self

    def server_tls(self) -> ServerTls | None:
        """The files of its certificate; None for plain text."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return ServerTls(self.tls_cert_file, self.tls_key_file)

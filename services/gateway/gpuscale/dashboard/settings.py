"""Settings of `gpuscale-dashboard`; `gpuscale.common.config.settings` says where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.common.config.settings import MetricsPageSettings, UpstreamSettings
from gpuscale.common.security import tls


class DashboardSettings(MetricsPageSettings, UpstreamSettings):
    """What the dashboard is told before it starts; the upstream is the gateway."""

    section: ClassVar[str] = "dashboard"

    gateway_address: str = Field("127.0.0.1:7070", description="address of the gateway, HOST:PORT")
    listen: str = Field(
        "127.0.0.1:7080",
        description="address to serve browsers on, HOST:PORT; or fd:N, a listening socket that this program got open, until its standard input ends",
    )
    sign_in: bool = Field(
        default=False, description="require visitors to sign in with a token that the gateway accepts"
    )
    link_file: Path | None = Field(
        None,
        description="sign visitors in, without a token, by the link in this file; each works once, and the next one replaces it",
    )
    calendar_file: Path | None = Field(
        None,
        description="offer the bookings to calendar programs, by an address with the secret in this file; it is made where it is missing, and without it the address is void",
    )
    insecure_allow_remote: bool = Field(
        default=False, description="serve other hosts without TLS or without sign-in"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="host name to answer to where nobody signs in; localhost and IP addresses are always answered; may be repeated",
    )

    def browser_tls(self) -> tls.ServerTls | None:
        """The files of its certificate, which browsers are asked for none in return; None for plain text."""
        own = self.server_tls()
        return None if own is None else replace(own, client_ca_file=None)

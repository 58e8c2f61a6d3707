"""Settings of `gpuscale-dashboard`; `gpuscale.common.config.settings` says where they come from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.common.config.settings import MetricsPageSettings, UpstreamSettings
from gpuscale.common.security import tls


class DashboardSettings(MetricsPageSettings, UpstreamSettings):
    """The dashboard's settings; its upstream is the gateway."""

    section: ClassVar[str] = "dashboard"

    gateway_address: str = Field("127.0.0.1:7070", description="address of the gateway, HOST:PORT")
    listen: str = Field(
        "127.0.0.1:7080",
        description="address to serve browsers on, HOST:PORT; or fd:N, an inherited listening socket, used until standard input closes",
    )
    sign_in: bool = Field(
        default=False, description="require visitors to sign in with a token that the gateway accepts"
    )
    link_file: Path | None = Field(
        None,
        description="sign visitors in by the link in this file instead of a token; a link works once, then a new one replaces it",
    )
    calendar_file: Path | None = Field(
        None,
        description="serve the bookings to calendar programs, at an address with the secret in this file, which is created if missing; delete it to revoke the address",
    )
    insecure_allow_remote: bool = Field(
        default=False, description="serve other hosts without TLS or without sign-in"
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="host name to answer to without sign-in, beside localhost and IP addresses; may be repeated",
    )

    def browser_tls(self) -> tls.ServerTls | None:
        """The server's certificate; browsers need none of their own. None: no TLS."""
        own = self.server_tls()
        return None if own is None else replace(own, client_ca_file=None)

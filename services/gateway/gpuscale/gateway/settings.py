"""Settings of `gpuscale-gateway`; `gpuscale.common.config.settings` says where they come from."""

from pathlib import Path
from typing import ClassVar, Self

from pydantic import Field, model_validator

from gpuscale.common.config.settings import MetricsSettings, UpstreamSettings


class GatewaySettings(MetricsSettings, UpstreamSettings):
    """The gateway's settings; its upstreams are the services it forwards to."""

    section: ClassVar[str] = "gateway"

    listen: str = Field("127.0.0.1:7070", description="address to serve on, HOST:PORT")
    fleet_address: str = Field("127.0.0.1:7072", description="address of the fleet, HOST:PORT")
    allocator_address: str = Field(
        "127.0.0.1:7073", description="address of the allocator, HOST:PORT; or several"
    )
    autoscaler_address: str = Field(
        "127.0.0.1:7074", description="address of the autoscaler, HOST:PORT; or several"
    )
    fleet_files_dir: Path | None = Field(
        None,
        description="directory of the certificates and tokens that a host of services gets from the fleet and keeps up to date",
    )

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token_file is not None:
            raise ValueError("token_file: the gateway has no token of its own; it passes on its callers'")
        return self

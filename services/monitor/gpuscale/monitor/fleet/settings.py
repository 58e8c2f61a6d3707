"""Settings of the fleet."""

from typing import ClassVar

from pydantic import Field

from gpuscale.common.settings import ServerSettings


class FleetSettings(ServerSettings):
    """Settings of `gpuscale-fleet`."""

    section: ClassVar[str] = "fleet"

    listen: str = Field("127.0.0.1:7072", description="address to serve on, HOST:PORT")
    max_nodes: int = Field(20_000, ge=1, description="most nodes that may report")

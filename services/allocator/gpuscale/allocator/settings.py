"""Settings of `gpuscale-allocator`; `gpuscale.common.settings` says where they come from."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.common.settings import ServerSettings, UpstreamSettings


class AllocatorSettings(ServerSettings, UpstreamSettings):
    """What the allocator is told before it starts."""

    section: ClassVar[str] = "allocator"

    listen: str = Field("127.0.0.1:7073", description="address to serve on, HOST:PORT")
    data_dir: Path = Field(description="directory of the reservations; one allocator each")
    fleet_address: str = Field("127.0.0.1:7072", description="address of the fleet, HOST:PORT")
    default_min_memory_mib: int = Field(
        8000, ge=0, description="least free memory of a GPU where a request names none, in MiB"
    )
    default_max_utilization_percent: float = Field(
        50.0, gt=0, le=100, description="use that a GPU must be below where a request names none"
    )
    default_ttl_seconds: float = Field(
        300.0, ge=5, le=604_800, description="length of a lease where a request names none"
    )
    memory_weight: float = Field(0.6, ge=0, le=1000, description="weight of free memory in the spread score")
    utilization_weight: float = Field(
        0.4, ge=0, le=1000, description="weight of idleness in the spread score"
    )

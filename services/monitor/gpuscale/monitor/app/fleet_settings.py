"""Settings of the fleet."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from gpuscale.monitor.app.exposition_settings import ExpositionSettings
from gpuscale.monitor.history.series import Tier


class FleetSettings(ExpositionSettings):
    """Settings of `gpuscale-fleet`."""

    section: ClassVar[str] = "fleet"

    listen: str = Field("127.0.0.1:7072", description="address to serve on, HOST:PORT")
    data_dir: Path | None = Field(
        None,
        description="directory of recordings and history, one fleet each; without it a restart forgets them",
    )
    max_nodes: int = Field(20_000, ge=1, description="most nodes that may report")
    history_fine_seconds: float = Field(
        600.0, ge=10, le=86_400, description="how long history is kept in steps of 1 s"
    )
    history_medium_seconds: float = Field(
        21_600.0, ge=60, le=604_800, description="how long history is kept in steps of 10 s"
    )
    history_coarse_seconds: float = Field(
        604_800.0, ge=60, le=31_536_000, description="how long history is kept in steps of 1 min"
    )
    history_memory_mib: int = Field(
        1_024, ge=0, description="memory for history; where it is short all tiers are, and 0 keeps none"
    )
    metrics_max_gpus: int = Field(
        2_000, ge=0, description="/metrics has no series of single GPUs once there are more GPUs than this"
    )

    def history_tiers(self) -> tuple[Tier, ...]:
        """The tiers of history, from the finest to the coarsest."""
        return (
            Tier(1.0, self.history_fine_seconds),
            Tier(10.0, self.history_medium_seconds),
            Tier(60.0, self.history_coarse_seconds),
        )

"""Settings that the programs of all engines share; `gpuscale.common.config.settings` says where they come from."""

import socket
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from gpuscale.autoscaler.adapters.engines.process.settings import WorkersSettings
from gpuscale.common.config.settings import ProgramSettings, UpstreamSettings
from gpuscale.common.names import is_id, to_id


class EngineAdapterSettings(UpstreamSettings, ProgramSettings):
    """What every engine's adapter is told before it starts; the upstream is the autoscaler."""

    autoscaler_address: str = Field(
        "127.0.0.1:7074", description="address of the autoscaler, HOST:PORT; or several"
    )
    adapter: str = Field(
        to_id(socket.gethostname()), description="id of this adapter; marks all that it owns"
    )
    data_dir: Path = Field(description="directory of what it started; one adapter each")
    max_replicas: int = Field(0, ge=0, le=100_000, description="most replicas to run; 0 for no limit")
    workers: dict[str, WorkersSettings] = Field(
        default_factory=dict[str, WorkersSettings],
        description="what the workers of a command template can do, by the name of the template",
    )

    @model_validator(mode="after")
    def _check_adapter(self) -> Self:
        if not is_id(self.adapter):
            raise ValueError("adapter must be an id")
        return self

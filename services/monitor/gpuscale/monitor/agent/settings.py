"""Settings of the agent."""

import socket
from typing import ClassVar, Self

from pydantic import Field, field_validator, model_validator

from gpuscale.common.names import is_id, to_id
from gpuscale.common.settings import ServerSettings, UpstreamSettings
from gpuscale.monitor.agent.sources import SourceKind
from gpuscale.monitor.agent.staleness import Deadlines


class AgentSettings(ServerSettings, UpstreamSettings):
    """Settings of `gpuscale-agent`; the upstream is the fleet."""

    section: ClassVar[str] = "agent"

    listen: str = Field("127.0.0.1:7071", description="address to serve on, HOST:PORT")
    node: str = Field(to_id(socket.gethostname()), description="id of this node")
    source: SourceKind = Field("nvml", description="GPUs to read: nvml, simulated, or auto")
    simulated_gpu_count: int = Field(4, ge=0, le=1024, description="how many GPUs to simulate")
    period_seconds: float = Field(1.0, ge=0.1, le=3600.0, description="seconds between snapshots")
    soft_deadline_seconds: float = Field(2.0, gt=0.0, description="a GPU is SLOW beyond this")
    hard_deadline_seconds: float = Field(10.0, gt=0.0, description="a GPU is HUNG beyond this")
    fleet_address: str = Field("", description="fleet to stream to, HOST:PORT; none when empty")

    @field_validator("node")
    @classmethod
    def _check_node(cls, node: str) -> str:
        if not is_id(node):
            raise ValueError("must be 1-63 of a-z, 0-9, '-', '.' and '_', with a letter or digit at the ends")
        return node

    @model_validator(mode="after")
    def _check_deadlines(self) -> Self:
        if self.soft_deadline_seconds >= self.hard_deadline_seconds:
            raise ValueError("soft_deadline_seconds must be below hard_deadline_seconds")
        return self

    def deadlines(self) -> Deadlines:
        """When a GPU counts as SLOW and as HUNG."""
        return Deadlines(self.soft_deadline_seconds, self.hard_deadline_seconds)

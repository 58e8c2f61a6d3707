"""Settings of every adapter, and what an engine is: a class of settings that can open it.

The entry points of the group `gpuscale.engines` name such classes. `gpuscale.common.config.settings` says where settings come
from.
"""

import os
import socket
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Self

import grpc
from pydantic import BaseModel, ConfigDict, Field, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.connection import ReadLog
from gpuscale.autoscaler.adapters.engine import Engine
from gpuscale.autoscaler.adapters.journal import JournalRecord
from gpuscale.common.config.settings import MetricsPageSettings, UpstreamSettings
from gpuscale.common.names import is_id, to_id
from gpuscale.common.rpc.channel import AGENT_SOCKET, open_channel
from gpuscale.common.runtime.tasks import Clock


@dataclass(frozen=True, slots=True)
class Host:
    """What an engine is opened with."""

    clock: Clock  # seconds since boot, and the boot's id
    records: tuple[JournalRecord, ...] = ()  # the journal of earlier runs of the adapter
    # to the node's agent; None if its address is not set
    agent: grpc.aio.Channel | None = None


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An open engine."""

    engine: Engine  # takes steps
    capabilities: api.AdapterCapabilities  # reported to the autoscaler
    node: str = ""  # id of the node whose GPUs replicas reserve; empty for an engine that assigns GPUs itself
    read_log: ReadLog | None = None  # reads replicas' logs; None if there are none
    # seconds that replicas have to end with the adapter; None: they keep running
    end_within: float | None = None


class WorkersSettings(BaseModel):
    """A table [workers.TEMPLATE]: what workers in replicas of a template can do."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capabilities: dict[str, Annotated[int, Field(ge=-1, le=2**62)]]
    """Amounts by name; -1 is unbounded."""
    count: int = Field(0, ge=0, le=1_000_000)
    """Workers per replica; 0: as the capability set says."""

    def to_wire(self) -> api.WorkerGroup:
        """In the form of the contract."""
        return api.WorkerGroup(capabilities=self.capabilities, workers=self.count)


class EngineSettings(UpstreamSettings, MetricsPageSettings):
    """Settings of any engine's adapter; the upstream is the autoscaler. An engine derives its own."""

    kind: ClassVar[str]
    """The engine's name for the autoscaler and people."""
    description: ClassVar[str]
    """Description of the adapter, for --help."""
    library: ClassVar[str] = ""
    """The Python package that it needs beyond gpuscale's own; the extra of gpuscale has the engine's name."""
    templates_field: ClassVar[str]
    """Field with the templates by name."""

    autoscaler_address: str = Field(
        "127.0.0.1:7074", description="address of the autoscaler, HOST:PORT, or several"
    )
    adapter: str = Field(
        to_id(socket.gethostname()),
        description="id of this adapter, which marks everything it owns; must be unique on the host",
    )
    data_dir: Path = Field(description="directory of its journal, for one adapter")
    max_replicas: int = Field(0, ge=0, le=100_000, description="most replicas to run; 0 for no limit")
    workers: dict[str, WorkersSettings] = Field(
        default_factory=dict[str, WorkersSettings],
        description="what the workers of a command template can do, by the name of the template",
    )

    @property
    def adapter_id(self) -> str:
        """The id of this adapter."""
        return self.adapter

    @property
    def template_names(self) -> list[str]:
        """Names of the templates, sorted."""
        tables: Mapping[str, object] = getattr(self, self.templates_field)
        return sorted(tables)

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        if not is_id(self.adapter_id):
            raise ValueError("adapter must be an id")
        for name in self.template_names:
            if not is_id(name):
                raise ValueError(f"{self.templates_field}.{name}: the name of a template must be an id")
        return self

    @abstractmethod
    def open_engine(self, host: Host, /) -> AbstractAsyncContextManager[OpenEngine]:
        """Open the engine of these settings, until the block ends; GpuscaleError if it is unusable."""


class NodeEngineSettings(EngineSettings):
    """Settings of an engine that starts replicas on reserved GPUs of one node."""

    node: str = Field(to_id(socket.gethostname()), description="id of the node whose GPUs its replicas use")
    agent_address: str = Field(
        "",
        description=f"address of that node's agent, which admits work on its GPUs; when empty unix:{AGENT_SOCKET}, if it"
        " exists at the start, else none",
    )
    require_admission: bool = Field(
        default=True,
        description="start nothing on GPUs while the agent does not answer, or cannot reach the allocator",
    )
    replica_log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size at which a replica's log is rotated; one older part is kept",
    )

    def open_agent_channel(self) -> grpc.aio.Channel | None:
        """A channel to the node's agent, if there is one; over a unix socket without TLS and token."""
        address = self.agent_address or (f"unix:{AGENT_SOCKET}" if os.access(AGENT_SOCKET, os.W_OK) else "")
        if not address or address.startswith("unix:"):
            return open_channel(address) if address else None
        return self.open_channel(address)

    @model_validator(mode="after")
    def _check_node(self) -> Self:
        if not is_id(self.node):
            raise ValueError("node must be an id")
        return self

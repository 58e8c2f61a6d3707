"""Settings of `gpuscale-adapter`; `gpuscale.common.settings` says where they come from."""

import socket
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuscale.autoscaler.adapters.templates import Template, check_environment, parse_command
from gpuscale.common.names import is_id, to_id
from gpuscale.common.settings import ProgramSettings, UpstreamSettings


class TemplateSettings(BaseModel):
    """One table [templates.NAME]: how replicas of endpoints that name it are started."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...]
    """The program, an absolute path or {python}, and its arguments."""
    working_dir: Path | None = None
    """Where it is started; by default where the adapter was."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set. The environment is otherwise clean."""
    pass_env: tuple[str, ...] = ()
    """Variables to hand on from the adapter's own environment, such as one with a password."""
    ready: Literal["started"] = "started"
    """When a replica counts as ready: once its process has lived for a moment."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        parse_command(command)
        return command

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        check_environment(self.env, self.pass_env)
        return self

    def template(self, name: str) -> Template:
        """The template that this table describes."""
        return Template(name, parse_command(self.command), self.working_dir, self.env, self.pass_env)


class AdapterSettings(UpstreamSettings, ProgramSettings):
    """What the process adapter is told before it starts; the upstream is the autoscaler."""

    section: ClassVar[str] = "adapter"

    autoscaler_address: str = Field("127.0.0.1:7074", description="address of the autoscaler, HOST:PORT")
    adapter: str = Field("", description="id of this adapter; that of its node when empty")
    node: str = Field(to_id(socket.gethostname()), description="id of the node whose GPUs its replicas use")
    data_dir: Path = Field(description="directory of what it started, and of the logs; one adapter each")
    max_replicas: int = Field(0, ge=0, le=100_000, description="most replicas to run; 0 for no limit")
    replica_log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size at which a replica's log is rotated; one older part is kept",
    )
    templates: dict[str, TemplateSettings] = Field(
        default_factory=dict[str, TemplateSettings], description="command templates by name"
    )

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for what, text in (("node", self.node), ("adapter", self.adapter_id)):
            if not is_id(text):
                raise ValueError(f"{what} must be an id")
        for name in self.templates:
            if not is_id(name):
                raise ValueError(f"templates.{name}: the name of a template must be an id")
        return self

    @property
    def adapter_id(self) -> str:
        """Id of this adapter."""
        return self.adapter or self.node

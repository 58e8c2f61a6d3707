"""Settings of `gpuscale-adapter`; `gpuscale.common.config.settings` says where they come from."""

import socket
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process.logs import KEPT_SECONDS
from gpuscale.autoscaler.adapters.engines.process.probes import ProbeKind, Timing
from gpuscale.autoscaler.adapters.templates import (
    ProbeTemplate,
    Template,
    check_environment,
    parse_address,
    parse_command,
)
from gpuscale.common.config.settings import ProgramSettings, UpstreamSettings
from gpuscale.common.names import is_id, to_id

_DEFAULT = Timing()


class ProbeSettings(BaseModel):
    """One table [templates.NAME.probe]: how a replica is asked whether it is well; one of exec, tcp and http."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exec: tuple[str, ...] | None = None
    """A program and its arguments, as in `command`; it is well where this ends with 0."""
    tcp: str | None = None
    """HOST:PORT, which takes a connection."""
    http: str | None = None
    """http:// URL, which a GET is answered on with a status of 200 to 399."""
    initial_delay: float = Field(_DEFAULT.initial_delay, ge=0, le=3600)
    """Seconds from its start to the first question."""
    period: float = Field(_DEFAULT.period, ge=0.1, le=3600)
    """Seconds from an answer to the next question."""
    timeout: float = Field(_DEFAULT.timeout, ge=0.1, le=60)
    """Seconds that an answer may take."""
    failures: int = Field(_DEFAULT.failures, ge=1, le=1000)
    """Failures in a row after which it is ended, as FAILED."""
    start_timeout: float = Field(_DEFAULT.start_timeout, ge=0, le=86_400)
    """Seconds from its start for which failures do not count as long as it was never well."""

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        self.template()
        return self

    def template(self) -> ProbeTemplate:
        """The probe that this table describes.

        Raises:
            ValueError: not exactly one way to ask is set, or it is of no use.
        """
        timing = Timing(self.initial_delay, self.period, self.timeout, self.failures, self.start_timeout)
        ways = {ProbeKind.EXEC: self.exec, ProbeKind.TCP: self.tcp, ProbeKind.HTTP: self.http}
        match [(kind, way) for kind, way in ways.items() if way is not None]:
            case [(kind, str(address))]:
                return ProbeTemplate(kind, (parse_address(kind, address),), timing)
            case [(kind, tuple(command))]:
                return ProbeTemplate(kind, parse_command(command), timing)
            case _:
                raise ValueError("set one of exec, tcp and http")


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
    """When a replica without a probe counts as ready: once its process has lived for a moment."""
    probe: ProbeSettings | None = None
    """When a replica counts as ready, and as failed although its process lives."""

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
        probe = self.probe.template() if self.probe else None
        return Template(name, parse_command(self.command), self.working_dir, self.env, self.pass_env, probe)


class WorkersSettings(BaseModel):
    """One table [workers.TEMPLATE]: what the workers can do that replicas of a template bring."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    capabilities: dict[str, Annotated[int, Field(ge=-1, le=2**62)]]
    """By name, with how much of each; -1 is without bound."""
    count: int = Field(0, ge=0, le=1_000_000)
    """Workers of each replica; as many as the capability set says when 0."""

    def to_wire(self) -> api.WorkerGroup:
        """As the autoscaler is told."""
        return api.WorkerGroup(capabilities=self.capabilities, workers=self.count)


class AdapterSettings(UpstreamSettings, ProgramSettings):
    """What the process adapter is told before it starts; the upstream is the autoscaler."""

    section: ClassVar[str] = "adapter"

    autoscaler_address: str = Field(
        "127.0.0.1:7074", description="address of the autoscaler, HOST:PORT; or several"
    )
    adapter: str = Field("", description="id of this adapter; that of its node when empty")
    node: str = Field(to_id(socket.gethostname()), description="id of the node whose GPUs its replicas use")
    data_dir: Path = Field(description="directory of what it started, and of the logs; one adapter each")
    max_replicas: int = Field(0, ge=0, le=100_000, description="most replicas to run; 0 for no limit")
    worker_user: str = Field("", description="user that replicas run as; the adapter's own when empty")
    replica_log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size at which a replica's log is rotated; one older part is kept",
    )
    replica_log_keep_seconds: float = Field(
        KEPT_SECONDS,
        gt=0,
        description="how long the log of a replica that ended is kept, at most; also of deleted endpoints",
    )
    agent_address: str = Field(
        "", description="address of this node's agent, which admits work on its GPUs; not asked when empty"
    )
    require_admission: bool = Field(
        default=False, description="start nothing on GPUs while the agent does not answer"
    )
    templates: dict[str, TemplateSettings] = Field(
        default_factory=dict[str, TemplateSettings], description="command templates by name"
    )

    workers: dict[str, WorkersSettings] = Field(
        default_factory=dict[str, WorkersSettings],
        description="what the workers of a command template can do, by the name of the template",
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

"""Settings of `gpuscale-container-adapter`; `gpuscale.common.config.settings` says where they come from."""

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gpuscale.autoscaler.adapters.engines.container.template import (
    Argument,
    ContainerTemplate,
    HealthCheck,
    Logs,
    Mount,
    check_image,
    check_path,
    check_signal,
    check_source,
    check_variables,
    is_allowed,
)
from gpuscale.autoscaler.adapters.engines.process.probes import Timing
from gpuscale.autoscaler.adapters.settings import EngineAdapterSettings
from gpuscale.autoscaler.adapters.templates import Placeholder, parse_arguments
from gpuscale.common.names import is_id, to_id
from gpuscale.common.sizes import parse_size

Word = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$")]
User = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,64}(:[A-Za-z0-9_.-]{1,64})?)?$")]
_DEFAULT = Timing()


def _check_size(text: str) -> str:
    parse_size(text or "0")
    return text


Size = Annotated[str, AfterValidator(_check_size)]


class HealthCheckSettings(BaseModel):
    """One table [container_templates.NAME.health_check]: how the engine asks a container whether it is well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: tuple[str, ...]
    """A program inside the container and its arguments; well is 0. Empty: none is asked, whatever the image says."""
    period: float = Field(_DEFAULT.period, ge=0.1, le=3600)
    """Seconds from an answer to the next question."""
    timeout: float = Field(_DEFAULT.timeout, ge=0.1, le=600)
    """Seconds that an answer may take."""
    failures: int = Field(_DEFAULT.failures, ge=1, le=1000)
    """Failures in a row after which it is ended, as FAILED."""
    start_timeout: float = Field(_DEFAULT.start_timeout, ge=0, le=86_400)
    """Seconds from its start for which failures do not count as long as it was never well."""

    def check(self) -> HealthCheck:
        """The health check that this table describes.

        Raises:
            ValueError: the command is of no use.
        """
        command = _program(self.command)
        return HealthCheck(command, self.period, self.timeout, self.failures, self.start_timeout)


class MountSettings(BaseModel):
    """One of `mounts`: a directory of the host that containers of the template see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, AfterValidator(check_source)]
    """On the engine's host."""
    target: Annotated[str, AfterValidator(check_path)]
    """In the container."""
    read_only: bool = True
    """Whether it cannot be written to."""


class ContainerTemplateSettings(BaseModel):
    """One table [container_templates.NAME]: how replicas of endpoints that name it become containers."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    image: str
    """What is run; allowed_images must let it through. A digest keeps it what it is."""
    pull: Literal["missing", "never"] = "missing"
    """Whether an image that the engine does not have is fetched; registries are asked without a password."""
    entrypoint: tuple[str, ...] = ()
    """The program, where it is not the image's."""
    command: tuple[str, ...] = ()
    """The arguments, with placeholders; without an entrypoint of the image the first is the program."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set."""
    pass_env: tuple[str, ...] = ()
    """Variables to hand on from the adapter's own environment, such as one with a password."""
    working_dir: str = ""
    """Where it begins; the image's when empty."""
    user: User = ""
    """As whom it runs, USER or USER:GROUP; the image's when empty."""
    memory: Size = ""
    """Most of the host's memory, such as 32GiB; no limit when empty."""
    cpus: float = Field(0.0, ge=0, le=10_000)
    """Most CPUs; 0 for no limit."""
    shm_size: Size = ""
    """Size of /dev/shm, such as 8GiB; the engine's default (64 MiB) when empty."""
    pids: int = Field(4096, ge=0, le=4_194_304)
    """Most processes and threads; 0 for the engine's default."""
    network: Word = "bridge"
    """A network of the engine, host, or none."""
    stop_signal: Annotated[str, AfterValidator(check_signal)] = ""
    """What asks it to finish its work; the image's, or SIGTERM, when empty."""
    init: bool = False
    """Whether the engine's small init is its first process, which hands on signals and reaps."""
    read_only: bool = False
    """Whether its file system is read-only, but for /tmp."""
    drop_capabilities: bool = True
    """Whether it has no capabilities; false: those that the engine gives every container."""
    mounts: tuple[MountSettings, ...] = ()
    """Directories of the host that it sees; none by default."""
    health_check: HealthCheckSettings | None = None
    """How the engine asks whether it is well; the image's way by default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_image(self.image)
        check_variables(self.env, self.pass_env)
        self.template("")
        if not (self.working_dir + "".join(self.entrypoint)).isprintable():
            raise ValueError("working_dir and entrypoint must be printable")
        fixed = (one.replace("{", "{{").replace("}", "}}") for one in self.entrypoint)
        parse_arguments((*fixed, *self.command))  # a script may begin in one and go on in the other
        return self

    def template(self, name: str) -> ContainerTemplate:
        """The template that this table describes.

        Raises:
            ValueError: a command is of no use.
        """
        return ContainerTemplate(
            name=name,
            image=self.image,
            pull=self.pull == "missing",
            entrypoint=self.entrypoint,
            command=_program(self.command),
            env=self.env,
            pass_env=self.pass_env,
            working_dir=self.working_dir,
            user=self.user,
            memory=parse_size(self.memory or "0"),
            cpus=self.cpus,
            shm_size=parse_size(self.shm_size or "0"),
            pids=self.pids,
            network=self.network,
            stop_signal=self.stop_signal,
            init=self.init,
            read_only=self.read_only,
            drop_capabilities=self.drop_capabilities,
            mounts=tuple(Mount(one.source, one.target, one.read_only) for one in self.mounts),
            health_check=self.health_check.check() if self.health_check else None,
        )


class ContainerAdapterSettings(EngineAdapterSettings):
    """What the container adapter is told before it starts; the upstream is the autoscaler."""

    section: ClassVar[str] = "container_adapter"

    engine: str = Field(
        "unix:///run/docker.sock",
        description="address of the engine: unix:///PATH, or tcp://HOST:PORT, which needs TLS on another host",
    )
    engine_ca_file: Path | None = Field(None, description="authority of the engine's certificate, PEM")
    engine_cert_file: Path | None = Field(None, description="client certificate to show the engine, PEM")
    engine_key_file: Path | None = Field(None, description="key of that certificate, PEM")
    node: str = Field(to_id(socket.gethostname()), description="id of the node whose GPUs its replicas use")
    agent_address: str = Field(
        "", description="address of that node's agent, which admits work on its GPUs; not asked when empty"
    )
    require_admission: bool = Field(
        default=False,
        description="start nothing on GPUs while the agent does not answer, or cannot ask the allocator",
    )
    allowed_images: tuple[str, ...] = Field(
        (),
        description="pattern of images that may be run, with * for any text without a slash; none when empty",
    )
    log_driver: Word = Field("json-file", description="how the engine keeps output; as by default when empty")
    replica_log_max_bytes: int = Field(
        16 * 1024 * 1024,
        ge=4096,
        description="size at which a replica's log is rotated; one older part is kept",
    )
    container_templates: dict[str, ContainerTemplateSettings] = Field(
        default_factory=dict[str, ContainerTemplateSettings], description="container templates by name"
    )

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        where = urlsplit(self.engine)
        if where.scheme == "unix" and not where.netloc and where.path.startswith("/"):
            return self
        if where.scheme != "tcp" or not where.hostname or not where.port or where.path:
            raise ValueError("engine must be unix:///PATH or tcp://HOST:PORT")
        if (self.engine_cert_file is None) != (self.engine_key_file is None):
            raise ValueError("engine_cert_file and engine_key_file go together")
        if self.engine_ca_file is None and not _is_loopback(where.hostname):
            raise ValueError("engine on another host needs engine_ca_file: whoever reaches it owns that host")
        return self

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        if not is_id(self.node):
            raise ValueError("node must be an id")
        for name, table in self.container_templates.items():
            if not is_id(name):
                raise ValueError(f"container_templates.{name}: the name of a template must be an id")
            if not is_allowed(table.image, self.allowed_images):
                raise ValueError(f"container_templates.{name}: its image is not among allowed_images")
        return self

    def templates(self) -> dict[str, ContainerTemplate]:
        """The templates by name."""
        return {name: table.template(name) for name, table in self.container_templates.items()}

    def logs(self) -> Logs:
        """How the output of containers is kept."""
        return Logs(self.log_driver, self.replica_log_max_bytes)


def _program(command: Iterable[str]) -> tuple[Argument, ...]:
    """A command whose first argument, which may be the program, is fixed."""
    parsed = parse_arguments(command)
    if parsed and any(isinstance(part, Placeholder) and part.name != "python" for part in parsed[0]):
        raise ValueError("the first argument of a command takes no placeholder but {python}")
    return parsed


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

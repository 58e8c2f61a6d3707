"""Containers of replicas: the request that creates one from a template, which are ours, and what their state means. Pure.

Only a container with both our name and our labels is ours; nothing else is ever touched. Labels alone do not prove it: an
image committed from one of our containers passes its labels on to every container made from it.

The request is that of `POST /containers/create` of Docker's API. GPUs are named by UUID in a device request of the driver
`nvidia`, and never in CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES as well: inside the container, GPUs are numbered from 0,
so a second list would pick the wrong ones.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Literal, Self, TypeAlias

import re2
from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from gpuscale.autoscaler.adapters import templates
from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.common import names
from gpuscale.common.sizes import parse_size

ADAPTER = "gpuscale.adapter"
ENDPOINT = "gpuscale.endpoint"
REPLICA = "gpuscale.replica"
FENCE = "gpuscale.fence"
GPU_UUIDS = "gpuscale.gpu-uuids"
METRICS = "gpuscale.metrics"
"""Port and path of its server's metrics; empty without."""

STARTING = "its health check has not passed yet"
UNWELL = "its health check fails"
UNTOLD = "its engine lists it, but does not report its state"

NOT_STARTED = frozenset({"created", "configured", "initialized"})
OVER = frozenset({"exited", "stopped", "dead", "removing"})
"""States in which nothing of a container runs."""

_RUNNING = frozenset({"running", "stopping"})
_UNREADY = {"starting": STARTING, "unhealthy": UNWELL}
_HEALTH = re.compile(r"\((?:health: )?(starting|healthy|unhealthy)\)")
_MAX_TEXT = 500


def container_name(adapter: str, replica: str) -> str:
    """The name of a replica's container: readable ids, and a digest that makes it unique."""
    ids = names.parse(names.REPLICA, replica, "replica")
    digest = hashlib.sha256(f"{adapter} {replica}".encode()).hexdigest()[:10]
    return f"gpuscale-{ids['endpoint']}-{ids['replica']}-{digest}"


def labels(adapter: str, order: ReplicaOrder, metrics: str = "") -> dict[str, str]:
    """The labels of a replica's container: its adapter, replica, GPUs, and `metrics` address."""
    return {
        ADAPTER: adapter,
        ENDPOINT: order.endpoint,
        REPLICA: order.replica,
        FENCE: str(order.fence),
        GPU_UUIDS: ",".join(order.gpu_uuids),
        METRICS: metrics,
    }


def owned(adapter: str, container_names: Iterable[str], labels: Mapping[str, str]) -> str | None:
    """The replica of a container, whose names start with a slash; None if it is not of this `adapter`."""
    replica = labels.get(REPLICA, "")
    if labels.get(ADAPTER) != adapter or names.match(names.REPLICA, replica) is None:
        return None
    own_name = container_name(adapter, replica)
    return replica if any(name.removeprefix("/") == own_name for name in container_names) else None


class EngineRefusedError(Exception):
    """The engine refused a request, in its own words; `not_found` if the container or image does not exist."""

    def __init__(self, message: str, *, not_found: bool = False) -> None:
        super().__init__(message)
        self.not_found = not_found


Text = Annotated[str, BeforeValidator(lambda value: "" if value is None else str(value)[:_MAX_TEXT])]
DeviceIds = Annotated[
    tuple[str, ...],
    BeforeValidator(
        lambda requests: [uuid for request in requests or () for uuid in request.get("DeviceIDs") or ()]
    ),
]
Labels = Annotated[dict[str, str], BeforeValidator(lambda value: value or {})]


class Network(BaseModel):
    """A network of a container, by Docker's names."""

    model_config = ConfigDict(frozen=True)

    address: Text = Field(default="", validation_alias="IPAddress")


class Details(BaseModel):
    """What inspecting a container adds to a listing, by Docker's names."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    state: Text = Field(default="", validation_alias=AliasPath("State", "Status"))
    """The engine's word for its state."""
    pid: int = Field(default=0, validation_alias=AliasPath("State", "Pid"))
    """Its first process on the engine's host; 0 if it does not run."""
    exit_code: int = Field(default=0, validation_alias=AliasPath("State", "ExitCode"))
    out_of_memory: bool = Field(default=False, validation_alias=AliasPath("State", "OOMKilled"))
    """Whether the kernel killed it at its memory limit."""
    error: Text = Field(default="", validation_alias=AliasPath("State", "Error"))
    """Why the engine could not start it, or stopped it."""
    health: Annotated[str, BeforeValidator(lambda value: "" if value in {None, "none"} else value)] = Field(
        default="", validation_alias=AliasPath("State", "Health", "Status")
    )
    """`starting`, `healthy` or `unhealthy`; empty without a health check."""
    memory: int = Field(default=0, validation_alias=AliasPath("HostConfig", "Memory"))
    """Its memory limit in bytes; 0 for none."""
    gpu_uuids: DeviceIds = Field(default=(), validation_alias=AliasPath("HostConfig", "DeviceRequests"))
    """Its GPUs."""
    stop_signal: Text = Field(default="", validation_alias=AliasPath("Config", "StopSignal"))
    """The signal that asks it to finish; empty for SIGTERM."""
    labels: Labels = Field(default_factory=dict[str, str], validation_alias=AliasPath("Config", "Labels"))
    network: Text = Field(default="", validation_alias=AliasPath("HostConfig", "NetworkMode"))
    """`host` if it uses the host's network."""
    networks: Annotated[dict[str, Network], BeforeValidator(lambda value: value or {})] = Field(
        default_factory=dict[str, Network], validation_alias=AliasPath("NetworkSettings", "Networks")
    )
    """Its networks by name."""
    unknown: bool = False
    """Whether it could not be inspected."""

    @property
    def metrics(self) -> str:
        """Its metrics URL, as seen from the engine's host; empty without metrics."""
        addresses = filter(None, (one.address for one in self.networks.values()))
        own = "127.0.0.1" if self.network == "host" else next(addresses, "")
        port = self.labels.get(METRICS, "")
        return f"http://{own}:{port}" if own and port else ""


def listed_health(status: str) -> str:
    """The health in the status text of a listing, such as `Up 3 minutes (healthy)`; empty if there is none."""
    found = _HEALTH.search(status)
    return found[1] if found else ""


def sighting(state: str, details: Details, given_up: str = "") -> Sighting:
    """The state of a replica, by its container's state and details; `given_up`: why it was killed."""
    if state in NOT_STARTED:
        return Sighting(WorkerLife.WAITING, reason="its container was created, but not started yet")
    if state in OVER:
        if details.unknown:
            return Sighting(WorkerLife.ENDED, None, given_up or UNTOLD)
        number = details.exit_code - 128  # engines report signals like a shell
        limit = f", at its limit of {details.memory} bytes" if details.memory else ""
        if given_up:
            why = given_up
        elif details.out_of_memory:
            why = f"the kernel killed it when it ran out of memory{limit}"
        elif details.error:
            why = f"the engine says: {details.error}"
        else:
            often = f", often {signal.Signals(number).name}" if number in set(signal.Signals) else ""
            why = f"it ended with exit code {details.exit_code}{often}"
        return Sighting(WorkerLife.ENDED, details.exit_code, why)
    if state not in _RUNNING:
        return Sighting(WorkerLife.STARTING, reason=f"its engine calls it {state}", pid=details.pid)
    if details.unknown:
        return Sighting(WorkerLife.STARTING, reason=UNTOLD)
    if reason := _UNREADY.get(details.health):
        return Sighting(WorkerLife.STARTING, reason=reason, pid=details.pid)
    return Sighting(WorkerLife.READY, pid=details.pid, metrics=details.metrics)


Json: TypeAlias = str | int | float | bool | Sequence["Json"] | Mapping[str, "Json"] | None

PYTHON = "python3"
"""The value of {python} in a container, which does not have the adapter's own interpreter."""

_SECOND = 1_000_000_000
_CLOSED = (
    "/boot",
    "/dev",
    "/etc",
    "/proc",
    "/run",
    "/sys",
    "/var/lib/containers",
    "/var/lib/docker",
    "/var/run",
)
"""Directories that a container must not see: writing there, or reaching an engine's socket, controls the host."""
_GPU_VARIABLE = re.compile(r"(NVIDIA|CUDA)_VISIBLE_DEVICES")
_REFERENCE = re.compile(r"[a-z0-9][A-Za-z0-9._/:@-]{0,511}")


def check_path(path: str) -> str:
    """Check that a path is absolute and plain, and return it. Raises ValueError otherwise."""
    if not path.startswith("/") or path.startswith("//") or posixpath.normpath(path) != path:
        raise ValueError("must be an absolute path without . and ..")
    if not path.isprintable():
        raise ValueError("must be printable")
    return path


def check_source(path: str) -> str:
    """Return a directory of the host; ValueError if it is, or contains, part of the system."""
    above = check_path(path).rstrip("/") + "/"
    if any(path == closed or path.startswith(f"{closed}/") or closed.startswith(above) for closed in _CLOSED):
        raise ValueError("must not be, hold or lie in a directory of the system")
    return path


def check_program(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return a command whose first argument, possibly the program, is fixed; ValueError otherwise."""
    parsed = templates.parse_arguments(command)
    if parsed and any(isinstance(one, templates.Placeholder) and one.name != "python" for one in parsed[0]):
        raise ValueError("the first argument of a command takes no placeholder but {python}")
    return command


def is_allowed(image: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the whole name as written, including tag or digest; no pattern admits nothing.

    A `*` matches any characters except a slash, so it never reaches into another registry or folder.
    """
    expressions = ("[^/]*".join(re2.escape(part) for part in pattern.split("*")) for pattern in patterns)
    return any(re2.compile(expression).fullmatch(image) for expression in expressions)


Word = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]{0,127})?$")]
User = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,64}(:[A-Za-z0-9_.-]{1,64})?)?$")]


def _check_size(text: str) -> str:
    parse_size(text or "0")
    return text


Size = Annotated[str, AfterValidator(_check_size)]


class ContainerHealthCheck(BaseModel):
    """A table [container_templates.NAME.health_check]: how the engine checks a container's health."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: Annotated[tuple[str, ...], AfterValidator(check_program)]
    """A program inside the container and its arguments; exit code 0 is healthy. Empty: no check, whatever the image defines."""
    period: float = Field(5.0, ge=0.1, le=3600)
    """Seconds between checks."""
    timeout: float = Field(1.0, ge=0.1, le=600)
    """Seconds to wait for an answer."""
    failures: int = Field(3, ge=1, le=1000)
    """Consecutive failures after which it is ended as FAILED."""
    start_timeout: float = Field(300.0, ge=0, le=86_400)
    """Seconds after its start during which failures do not count, until the first success."""


class Mount(BaseModel):
    """A `mounts` entry: a directory of the host that containers of the template see."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[str, AfterValidator(check_source)]
    """On the engine's host."""
    target: Annotated[str, AfterValidator(check_path)]
    """In the container."""
    read_only: bool = True
    """Whether it is read-only."""


class ContainerTemplate(BaseModel):
    """A table [container_templates.NAME]: how replicas of endpoints that name it become containers."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    image: str
    """The image; must match allowed_images. A digest pins its content."""
    pull: Literal["missing", "never"] = "missing"
    """Whether to pull an image that the engine does not have; without registry credentials."""
    entrypoint: tuple[str, ...] = ()
    """The program, instead of the image's."""
    command: tuple[str, ...] = ()
    """The arguments, with placeholders; without an entrypoint in the image, the first is the program."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set."""
    pass_env: tuple[str, ...] = ()
    """Variables to pass on from the adapter's own environment, such as one with a password."""
    user: User = ""
    """The user, as USER or USER:GROUP; the image's when empty."""
    memory: Size = ""
    """The limit of host memory, such as 32GiB; no limit when empty."""
    cpus: float = Field(0.0, ge=0, le=10_000)
    """The limit of CPUs; 0 for no limit."""
    shm_size: Size = ""
    """Size of /dev/shm, such as 8GiB; the engine's default (64 MiB) when empty."""
    pids: int = Field(4096, ge=0, le=4_194_304)
    """The limit of processes and threads; 0 for the engine's default."""
    network: Word = "bridge"
    """A network of the engine, host, or none."""
    stop_signal: (
        Literal["SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"] | None
    ) = None
    """The signal that asks it to finish its work; the image's, or SIGTERM, by default."""
    init: bool = False
    """Whether the engine's init is its first process, which forwards signals and reaps."""
    read_only: bool = False
    """Whether its file system is read-only, except /tmp."""
    drop_capabilities: bool = True
    """Whether to drop all capabilities; false: keep the engine's defaults."""
    mounts: tuple[Mount, ...] = ()
    """Directories of the host that it sees; none by default."""
    health_check: ContainerHealthCheck | None = None
    """How the engine checks its health; the image's way by default."""
    metrics: templates.ServedMetrics | None = None
    """Where its server exposes metrics for signals `llm:...`, at the address of the container."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not _REFERENCE.fullmatch(self.image) or "//" in self.image:
            raise ValueError("must be an image name, such as registry.example/team/worker:1.2")
        for name in (*self.env, *self.pass_env):
            if _GPU_VARIABLE.fullmatch(name):
                raise ValueError(f"{name} must not be set: the adapter asks the engine for the GPUs")
        templates.check_environment(self.env, self.pass_env)
        check_program(self.command)
        if not "".join(self.entrypoint).isprintable():
            raise ValueError("entrypoint must be printable")
        templates.check_after(self.entrypoint, self.command)
        return self

    @property
    def arguments(self) -> tuple[str, ...]:
        """Everything that may have placeholders: the command, the health check, and the metrics address."""
        asked = self.health_check.command if self.health_check else ()
        shown = f"{self.metrics.port}{self.metrics.path}" if self.metrics else ""
        return (*self.command, *asked, shown)


def container_request(
    adapter: str,
    name: str,
    template: ContainerTemplate,
    order: ReplicaOrder,
    environment: Mapping[str, str],
    log_bytes: int,
) -> dict[str, Json]:
    """The request that creates a replica's container from a template; LaunchRefusedError if a value does not fit."""
    check = template.health_check
    arguments = templates.fill_arguments(name, template.arguments, order, PYTHON)
    command, test, metrics = (
        arguments[: len(template.command)],
        arguments[len(template.command) : -1],
        arguments[-1],
    )
    variables = {
        **templates.handed_on(name, template.pass_env, environment),
        **template.env,
        **order.reserved_variables(),
    }
    # Hides all GPUs from an image with NVIDIA_VISIBLE_DEVICES=all, such as CUDA's, if nvidia is the default runtime.
    hidden = [] if order.gpu_uuids else ["NVIDIA_VISIBLE_DEVICES=void"]
    request: dict[str, Json] = {
        "Image": template.image,
        "Env": [f"{variable}={value}" for variable, value in variables.items()] + hidden,
        "Labels": labels(adapter, order, metrics),
        "HostConfig": _host_config(template, order, log_bytes),
    }
    if check is not None and not test:
        request["Healthcheck"] = {"Test": ["NONE"]}
    elif check is not None:
        request["Healthcheck"] = {
            "Test": ["CMD", *test],
            "Interval": round(check.period * _SECOND),
            "Timeout": round(check.timeout * _SECOND),
            "Retries": check.failures,
            "StartPeriod": round(check.start_timeout * _SECOND),
        }
    given: dict[str, Json] = {
        "Entrypoint": template.entrypoint,
        "Cmd": command,
        "User": template.user,
        "StopSignal": template.stop_signal,
    }
    return request | {name: value for name, value in given.items() if value}


def _host_config(template: ContainerTemplate, order: ReplicaOrder, log_bytes: int) -> dict[str, Json]:
    """The container's access to its host: limited, unprivileged, and kept until the adapter removes it."""
    host: dict[str, Json] = {
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": ["ALL"] if template.drop_capabilities else [],
        "NetworkMode": template.network,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "Init": template.init,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": str(log_bytes), "max-file": "2"}},
    }
    given: dict[str, Json] = {
        "Memory": parse_size(template.memory or "0"),
        "MemorySwap": parse_size(template.memory or "0"),
        "NanoCpus": round(template.cpus * _SECOND),
        "ShmSize": parse_size(template.shm_size or "0"),
        "PidsLimit": template.pids,
        "Mounts": [
            {
                "Type": "bind",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for mount in template.mounts
        ],
    }
    host |= {name: value for name, value in given.items() if value}
    if template.read_only:
        host |= {"ReadonlyRootfs": True, "Tmpfs": {"/tmp": ""}}  # noqa: S108 - the container's own
    if order.gpu_uuids:
        host["DeviceRequests"] = [
            {"Driver": "nvidia", "DeviceIDs": list(order.gpu_uuids), "Capabilities": [["gpu"]]}
        ]
    return host

"""Which containers are ours, and what a container's state means for its replica. Pure.

Only a container with both our name and our labels is ours; nothing else is ever touched. Labels alone do not prove it: an
image committed from one of our containers passes its labels on to every container made from it.
"""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.common import names

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
        own = (
            "127.0.0.1"
            if self.network == "host"
            else next((one.address for one in self.networks.values() if one.address), "")
        )
        port = self.labels.get(METRICS, "")
        return f"http://{own}:{port}" if own and port else ""


def listed_health(status: str) -> str:
    """The health in the status text of a listing, such as `Up 3 minutes (healthy)`; empty if there is none."""
    found = _HEALTH.search(status)
    return found[1] if found else ""


def sighting(state: str, details: Details, given_up: str = "") -> Sighting:
    """The state of a replica, by its container's state and details; `given_up`: why it was killed."""
    if state in NOT_STARTED:
        return Sighting(WorkerLife.WAITING, reason="its container is made, and not started yet")
    if state in OVER:
        if details.unknown:
            return Sighting(WorkerLife.ENDED, None, given_up or UNTOLD)
        number = details.exit_code - 128  # engines report signals like a shell
        code = -number if number in set(signal.Signals) else details.exit_code
        return Sighting(WorkerLife.ENDED, code, given_up or _why_ended(details, code))
    if state not in _RUNNING:
        return Sighting(WorkerLife.STARTING, reason=f"its engine calls it {state}", pid=details.pid)
    if details.unknown:
        return Sighting(WorkerLife.STARTING, reason=UNTOLD)
    if reason := _UNREADY.get(details.health):
        return Sighting(WorkerLife.STARTING, reason=reason, pid=details.pid)
    return Sighting(WorkerLife.READY, pid=details.pid, metrics=details.metrics)


def _why_ended(details: Details, code: int) -> str:
    if details.out_of_memory:
        limit = f", at its limit of {details.memory} bytes" if details.memory else ""
        return f"the kernel killed it when it ran out of memory{limit}"
    if details.error:
        return f"the engine says: {details.error}"
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"

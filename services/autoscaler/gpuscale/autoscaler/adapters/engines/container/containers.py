"""How a container is known to be ours, and how its replica stands. Pure.

It is ours by its name and its labels, both, so that nothing else is ever touched. Labels alone would not do: an image that somebody commits from one of our containers hands its labels on to every
container that is made of it.
"""

from __future__ import annotations

import hashlib
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field

from gpuscale.autoscaler.adapters.engine import ReplicaOrder, Sighting, WorkerLife
from gpuscale.common import names

ADAPTER = "gpuscale.adapter"
ENDPOINT = "gpuscale.endpoint"
REPLICA = "gpuscale.replica"
FENCE = "gpuscale.fence"
GPU_UUIDS = "gpuscale.gpu-uuids"

STARTING = "its health check has not succeeded yet"
UNWELL = "its health check fails"
UNTOLD = "its engine lists it, and does not tell how it fares"

_DIGEST_LENGTH = 10
_NOT_STARTED = frozenset({"created", "configured", "initialized"})
_RUNNING = frozenset({"running", "stopping"})
_OVER = frozenset({"exited", "stopped", "dead", "removing"})
_HEALTH = re.compile(r"\((?:health: )?(starting|healthy|unhealthy)\)")
_SIGNAL_BASE = 128
_MAX_TEXT = 500


def container_name(adapter: str, replica: str) -> str:
    """The one name that a replica's container has: the ids for people, and a digest that keeps any two apart.

    Raises:
        InvalidArgumentError: that is no name of a replica.
    """
    ids = names.parse(names.REPLICA, replica, "replica")
    digest = hashlib.sha256(f"{adapter} {replica}".encode()).hexdigest()[:_DIGEST_LENGTH]
    return f"gpuscale-{ids['endpoint']}-{ids['replica']}-{digest}"


def labels(adapter: str, order: ReplicaOrder) -> dict[str, str]:
    """What a replica's container carries: whose it is, which replica it is, and the GPUs it was started for."""
    return {
        ADAPTER: adapter,
        ENDPOINT: order.endpoint,
        REPLICA: order.replica,
        FENCE: str(order.fence),
        GPU_UUIDS: ",".join(order.gpu_uuids),
    }


def owned(adapter: str, called: Iterable[str], marked: Mapping[str, str]) -> str | None:
    """The replica that a container is for; None where it is not this adapter's.

    Args:
        adapter: id of the adapter.
        called: names of the container; engines put a slash before them.
        marked: its labels.
    """
    replica = marked.get(REPLICA, "")
    if marked.get(ADAPTER) != adapter or names.match(names.REPLICA, replica) is None:
        return None
    mine = container_name(adapter, replica)
    return replica if any(name.removeprefix("/") == mine for name in called) else None


class EngineRefusedError(Exception):
    """The engine answered, and the answer is no; the text is its own.

    Attributes:
        not_found: whether what was asked for is not there.
    """

    def __init__(self, message: str, *, not_found: bool = False) -> None:
        super().__init__(message)
        self.not_found = not_found


def _text(value: object) -> object:
    return "" if value is None else str(value)[:_MAX_TEXT]


def _health(value: object) -> object:
    return "" if value in {None, "none"} else value


def _device_ids(requests: Any) -> tuple[str, ...]:
    return tuple(uuid for request in requests or () for uuid in request.get("DeviceIDs") or ())


Text = Annotated[str, BeforeValidator(_text)]


class Details(BaseModel):
    """What only a look at one container tells, by Docker's names."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    state: Text = Field(default="", validation_alias=AliasPath("State", "Status"))
    """What its engine calls its state."""
    pid: int = Field(default=0, validation_alias=AliasPath("State", "Pid"))
    """Its first process on the engine's host; 0 where none runs."""
    exit_code: int = Field(default=0, validation_alias=AliasPath("State", "ExitCode"))
    out_of_memory: bool = Field(default=False, validation_alias=AliasPath("State", "OOMKilled"))
    """Whether the kernel ended it at its limit."""
    error: Text = Field(default="", validation_alias=AliasPath("State", "Error"))
    """Why the engine could not start it, or ended it."""
    health: Annotated[str, BeforeValidator(_health)] = Field(
        default="", validation_alias=AliasPath("State", "Health", "Status")
    )
    """`starting`, `healthy`, `unhealthy`; empty where nobody asks."""
    memory: int = Field(default=0, validation_alias=AliasPath("HostConfig", "Memory"))
    """Its limit in bytes; 0 for none."""
    gpu_uuids: Annotated[tuple[str, ...], BeforeValidator(_device_ids)] = Field(
        default=(), validation_alias=AliasPath("HostConfig", "DeviceRequests")
    )
    """The devices that the engine gives it."""
    stop_signal: Text = Field(default="", validation_alias=AliasPath("Config", "StopSignal"))
    """What asks it to finish; empty for SIGTERM."""
    unknown: bool = False
    """Whether the engine does not tell."""


def is_over(state: str) -> bool:
    """Whether nothing of a container in this state runs any more."""
    return state in _OVER


def is_not_started(state: str) -> bool:
    """Whether a container in this state was made, and never started."""
    return state in _NOT_STARTED


def listed_health(status: str) -> str:
    """What the text of a listing, such as `Up 3 minutes (healthy)`, tells of its health; empty where it does not."""
    found = _HEALTH.search(status)
    return found[1] if found else ""


def sighting(state: str, details: Details, given_up: str = "") -> Sighting:
    """How a replica stands.

    Args:
        state: what its engine calls the state of its container.
        details: of the container.
        given_up: why the adapter ended it; empty where it did not.
    """
    if state in _NOT_STARTED:
        return Sighting(WorkerLife.WAITING, reason="its container is made, and not started yet")
    if state in _OVER and details.unknown:
        return Sighting(WorkerLife.ENDED, None, given_up or UNTOLD)
    if state in _OVER:
        code = _exit_code(details.exit_code)
        return Sighting(WorkerLife.ENDED, code, given_up or _ending(details, code))
    if state not in _RUNNING:
        return Sighting(WorkerLife.STARTING, reason=f"its engine calls it {state}", pid=details.pid)
    if details.unknown:
        return Sighting(WorkerLife.STARTING, reason=UNTOLD)
    match details.health:
        case "starting":
            return Sighting(WorkerLife.STARTING, reason=STARTING, pid=details.pid)
        case "unhealthy":
            return Sighting(WorkerLife.STARTING, reason=UNWELL, pid=details.pid)
        case _:
            return Sighting(WorkerLife.READY, pid=details.pid)


def _exit_code(code: int) -> int:
    """Negative for a signal: engines say 128 + its number, as a shell does."""
    number = code - _SIGNAL_BASE
    return -number if number in {one.value for one in signal.Signals} else code


def _ending(details: Details, code: int) -> str:
    if details.out_of_memory:
        limit = f", at its limit of {details.memory} bytes" if details.memory else ""
        return f"the kernel ended it for want of memory{limit}"
    if details.error:
        return f"the engine says: {details.error}"
    if code < 0:
        return f"it ended by {signal.Signals(-code).name}"
    return f"it ended with exit code {code}"

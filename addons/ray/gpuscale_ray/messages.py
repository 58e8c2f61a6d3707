"""The messages between the adapter and the process that speaks to Ray, one JSON text per line. Pure.

Ray's library blocks, handles signals itself, and ends its process when the cluster does not come back. So it runs in a
process of its own, `driver`, which can be killed and restarted at any moment: all state is in Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from gpuscale.autoscaler.adapters.engine import Sighting, WorkerLife

PREPARED = "CREATED"
"""State of a placement group that has its resources."""
READY_AFTER = 0.2
"""Seconds that a command must have run to count as ready."""


@dataclass(frozen=True, slots=True)
class RayLaunch:
    """A command to run in Ray, and the resources that it holds.

    Attributes:
        argv: the program and its arguments.
        env: variables to set.
        working_dir: on its node; empty for that of Ray's worker.
        cpus: logical CPUs.
        gpus: logical GPUs.
        resources: custom resources of Ray, by name.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str = ""
    cpus: float = 1.0
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def bundle(self) -> dict[str, float]:
        """What its placement group reserves; empty if it asks for nothing."""
        asked = {"CPU": self.cpus, "GPU": float(self.gpus), **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


class Verb(StrEnum):
    """What to do with a replica."""

    START = "start"
    FINISH = "finish"
    KILL = "kill"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class RayOrder:
    """What to do with a replica; START has a `launch`."""

    verb: Verb
    replica: str
    launch: RayLaunch | None = None


@dataclass(frozen=True, slots=True)
class RayQuestion:
    """Take these orders; without any, report the placement groups."""

    orders: tuple[RayOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """A command as its actor reports it: process id on its node, exit code once it ended, seconds since its start."""

    pid: int
    exit_code: int | None
    lived: float


@dataclass(frozen=True, slots=True)
class RayGroup:
    """A placement group of the adapter.

    Attributes:
        replica: its replica.
        state: Ray's word for its state.
        scheduling: Ray's word for why it waits.
        has_actor: whether its actor exists, perhaps waiting for the group.
        status: the actor's last report; None before the first.
        death: why the actor ended, if Ray tells.
    """

    replica: str
    state: str
    scheduling: str
    has_actor: bool
    status: Status | None = None
    death: str = ""


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """The placement groups, or why Ray could not be asked, or why some orders failed, by replica."""

    groups: tuple[RayGroup, ...] = ()
    error: str = ""
    failed: Mapping[str, str] = field(default_factory=dict[str, str])


QUESTION: TypeAdapter[RayQuestion] = TypeAdapter(RayQuestion)
ANSWER: TypeAdapter[RayAnswer] = TypeAdapter(RayAnswer)
STATUS: TypeAdapter[Status] = TypeAdapter(Status)

_WAITS_FOR = {
    "INFEASIBLE": "no node of the cluster has, free or taken, what its placement group asks for",
    "NO_RESOURCES": "the resources that its placement group asks for are taken",
}


def sighting(group: RayGroup) -> Sighting:
    """What a placement group says of its replica."""
    status = group.status
    if status is not None and status.exit_code is not None:
        code = status.exit_code
        how = f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        return Sighting(WorkerLife.ENDED, code, how)
    if not group.has_actor:
        return Sighting(WorkerLife.ENDED, None, f"its actor is gone: {group.death or 'Ray does not say why'}")
    if group.state != PREPARED:
        reason = _WAITS_FOR.get(group.scheduling, "its placement group is being prepared")
        waits = f"waits for Ray ({group.scheduling or group.state})"
        return Sighting(WorkerLife.STARTING, reason=f"{waits}: {reason}")
    if status is None:
        return Sighting(WorkerLife.STARTING, reason="its actor is being started")
    return Sighting(WorkerLife.READY if status.lived >= READY_AFTER else WorkerLife.STARTING)

"""What the adapter and the process that speaks to Ray tell each other, one JSON text a line. Pure.

Ray's library blocks, takes signals over, and ends the process that uses it when its cluster stays away. So it has a process
of its own, `driver`, that can be ended and begun anew at any moment: all that matters is in Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pydantic import TypeAdapter

from gpuscale.autoscaler.adapters.engine import Sighting, WorkerLife

PREPARED = "CREATED"
"""State of a placement group whose resources are held."""
READY_AFTER = 0.2
"""Seconds that a command must have run to count as ready."""


@dataclass(frozen=True, slots=True)
class RayLaunch:
    """A command to run in Ray, and the resources that it holds there.

    Attributes:
        argv: the program and its arguments.
        env: variables to set.
        working_dir: where it is started on its node; empty for where Ray's worker runs.
        cpus: logical CPUs.
        gpus: logical GPUs.
        resources: further resources of Ray, by name.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str = ""
    cpus: float = 1.0
    gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def bundle(self) -> dict[str, float]:
        """What its placement group reserves; empty where it asks for nothing."""
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
    """One thing to do; `launch` belongs to START."""

    verb: Verb
    replica: str
    launch: RayLaunch | None = None


@dataclass(frozen=True, slots=True)
class RayQuestion:
    """Take these orders, or, where there are none, say what there is."""

    orders: tuple[RayOrder, ...] = ()


@dataclass(frozen=True, slots=True)
class Status:
    """A command as its actor sees it: process id on its node, exit code once it ended, seconds since it was started."""

    pid: int
    exit_code: int | None
    lived: float


@dataclass(frozen=True, slots=True)
class RayGroup:
    """A placement group of ours.

    Attributes:
        replica: whose it is.
        state: Ray's word for how far the group has come.
        scheduling: Ray's word for why it waits.
        has_actor: whether its actor is there, be it that it waits for the group.
        status: what the actor said last; None where it has not said anything yet.
        death: why the actor ended, where Ray told.
    """

    replica: str
    state: str
    scheduling: str
    has_actor: bool
    status: Status | None = None
    death: str = ""


@dataclass(frozen=True, slots=True)
class RayAnswer:
    """What there is, or why Ray could not be asked; or why some orders failed, by name of the replica."""

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
    """The replica of a placement group, as the crew wants to know it."""
    status = group.status
    if status is not None and status.exit_code is not None:
        code = status.exit_code
        how = f"it ended by signal {-code}" if code < 0 else f"it ended with exit code {code}"
        return Sighting(WorkerLife.ENDED, code, how)
    if not group.has_actor:
        return Sighting(WorkerLife.ENDED, None, f"its actor is gone: {group.death or 'Ray does not say why'}")
    if group.state != PREPARED:
        reason = _WAITS_FOR.get(group.scheduling, "its placement group is being prepared")
        return Sighting(
            WorkerLife.STARTING, reason=f"waits for Ray ({group.scheduling or group.state}): {reason}"
        )
    if status is None:
        return Sighting(WorkerLife.STARTING, reason="its actor is being started")
    return Sighting(WorkerLife.READY if status.lived >= READY_AFTER else WorkerLife.STARTING)

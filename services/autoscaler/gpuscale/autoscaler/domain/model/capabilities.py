"""What tasks need of workers and what workers can do: capabilities by name, each with an amount.

The rules are those of OpenGRIS Scaler: a worker can run a task whose capabilities are a subset of its own. Amounts count
here (a worker with gpu: 1 cannot run a task that needs gpu: 2), where the original goes by names alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Amounts: TypeAlias = Mapping[str, int]
"""Capabilities by name, with how much of each."""
ANY = -1
"""Of a task: any amount of it will do. Of a worker: it has it without bound."""


def covers(offered: Amounts, needed: Amounts) -> bool:
    """Whether a worker with `offered` can run a task that needs `needed`."""
    return all(_enough(offered.get(name, 0), amount) for name, amount in needed.items())


def in_words(capabilities: Amounts) -> str:
    """Such as `gpu:2, high_memory`."""
    parts = (name if amount == ANY else f"{name}:{amount}" for name, amount in sorted(capabilities.items()))
    return ", ".join(parts) or "nothing special"


def _enough(offered: int, needed: int) -> bool:
    if offered == ANY or needed == ANY:
        return offered != 0
    return offered >= needed


@dataclass(frozen=True, slots=True)
class TaskDemand:
    """So many tasks, waiting or running, that need the same."""

    capabilities: Amounts
    tasks: int


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """So many workers that can do the same; of a report 0 stands for as many as were asked for."""

    capabilities: Amounts
    workers: int = 1


NO_WORKERS = WorkerGroup({}, 0)


@dataclass(frozen=True, slots=True)
class TaskReport:
    """All tasks of an endpoint, and the workers that somebody else started."""

    demands: tuple[TaskDemand, ...] = ()
    unmanaged: tuple[WorkerGroup, ...] = ()

    @property
    def total(self) -> int:
        """How many tasks there are."""
        return sum(one.tasks for one in self.demands)


@dataclass(frozen=True, slots=True)
class SetState:
    """What is known of a capability set when rules are read.

    Attributes:
        before: groups aimed at until now.
        groups: what those that are known can do, the one that would be stopped first at the front.
        reported: what its newest group reports that it can do, where that is not what was asked for.
    """

    before: int
    groups: tuple[WorkerGroup, ...] = ()
    reported: Amounts | None = None


NO_SETS: Mapping[str, SetState] = {}


@dataclass(frozen=True, slots=True)
class GroupOfReplica:
    """What a replica is in terms of its capability set: as was asked for, and as its adapter reports (None: it does not)."""

    set: str = ""
    asked: WorkerGroup = NO_WORKERS
    reported: WorkerGroup | None = None

    @property
    def actual(self) -> WorkerGroup:
        """What it can do, as far as anybody knows."""
        if self.reported is None:
            return self.asked
        return WorkerGroup(self.reported.capabilities, self.reported.workers or self.asked.workers)


NO_GROUP = GroupOfReplica()
"""Of a replica whose endpoint has no capability sets."""

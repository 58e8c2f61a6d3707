"""Tasks of ECS, and what each says of a replica. Pure.

Statuses, stop codes and their order are those of the task lifecycle in Amazon's developer guide for ECS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from gpuscale.autoscaler.adapters.engines.model import Life, Sighting

REPLICA_TAG = "gpuscale:replica"
ADAPTER_TAG = "gpuscale:adapter"
CHECKED_TAG = "gpuscale:health-check"
"""Marks a task whose container has a health check in its task definition."""

_RUNNING = "RUNNING"
_OVER = frozenset({"STOPPED", "DELETED"})
_FIRST_SIGNAL, _LAST_SIGNAL = 129, 192
"""Exit codes by which a container engine says that a signal ended the program: 128 and the signal's number."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task that runs a replica.

    Attributes:
        arn: its name in AWS, never given out again.
        replica: endpoints/{endpoint}/replicas/{replica}.
        status: the last that ECS knows.
        created: when ECS took it, in seconds since 1970.
        checked: whether its container has a health check.
        health: what that says.
        exit_code: of the container, once it ended, as ECS has it.
        stop_code: what stopped it, in ECS' word.
        reason: why it stopped, in ECS' words.
    """

    arn: str
    replica: str
    status: str
    created: float = 0.0
    checked: bool = False
    health: str = "UNKNOWN"
    exit_code: int | None = None
    stop_code: str = ""
    reason: str = ""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        return self.status in _OVER


def started_by(adapter: str) -> str:
    """What ECS notes as the starter of an adapter's tasks: it takes no dots, and no id holds a slash."""
    return f"gpuscale/{adapter.replace('.', '/')}"


def client_token(adapter: str, replica: str) -> str:
    """The same for every request for a replica, so that ECS starts it once: at most 64 characters."""
    return hashlib.sha256(f"{adapter} {replica}".encode()).hexdigest()


def first(tasks: Iterable[Task]) -> Task:
    """Of tasks of one replica the one that counts: the oldest."""
    return min(tasks, key=lambda task: (task.created, task.arn))


def sighting(task: Task) -> Sighting:
    """What a task says of its replica."""
    if task.over:
        code = _exit_code(task.exit_code)
        return Sighting(Life.ENDED, code, _why_ended(task, code))
    if task.status != _RUNNING:
        return Sighting(Life.STARTING, reason=f"its task is {task.status.lower()}")
    if task.health == "UNHEALTHY" or (task.checked and task.health != "HEALTHY"):
        return Sighting(Life.STARTING, reason="its health check has not succeeded")
    return Sighting(Life.READY)


def _exit_code(code: int | None) -> int | None:
    """With a signal as a negative number."""
    if code is not None and _FIRST_SIGNAL <= code <= _LAST_SIGNAL:
        return 128 - code
    return code


def _why_ended(task: Task, code: int | None) -> str:
    said = (
        f"{task.stop_code}: {task.reason}"
        if task.stop_code and task.reason
        else task.stop_code or task.reason
    )
    if code is None:
        return said or "its task stopped"
    how = f"exit code {code}" if code >= 0 else f"ended by signal {-code}"
    return f"{how}; {said}" if said else how

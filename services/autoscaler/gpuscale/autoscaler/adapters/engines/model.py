"""What an adapter and the engine it drives say to each other. Pure.

An engine (a container engine, Kubernetes, Slurm, Ray, ECS) keeps replicas for us and outlives the adapter. It is asked by
level: what is there is observed, what is missing is asked for, again and again; an answer that was lost costs nothing. An
engine that cannot be listed says nothing: that is not "nothing runs".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from gpuscale.autoscaler.adapters.templates import ReplicaOrder


class EngineUnavailableError(Exception):
    """The engine did not answer, or not in time, or refused to be asked; the text says why, for a person."""


class StepsFailedError(EngineUnavailableError):
    """Some steps were perhaps not taken, and all the others were.

    Attributes:
        failed: why, for a person, by name of the replica; the steps of these come again if they are still wanted.
        refused: what `Engine.apply` returns of the others.
    """

    def __init__(self, failed: Mapping[str, str], refused: Mapping[str, str]) -> None:
        super().__init__("; ".join(sorted(set(failed.values()))))
        self.failed = failed
        self.refused = refused


class Life(Enum):
    """How an engine sees a replica."""

    WAITING = "waiting"
    """It was not started yet, such as for want of its image: `Start` is repeated until it was."""
    STARTING = "starting"
    """It was accepted: it waits for room, is being prepared, or is not well yet."""
    READY = "ready"
    """It runs, and is well as far as the engine can tell."""
    ENDED = "ended"
    """Nothing of it runs."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A replica as its engine has it.

    Attributes:
        life: how far it has come.
        exit_code: once it ended, where the engine tells; negative for a signal.
        reason: why it stands as it does, such as what it waits for; may be empty.
        pid: its process on this host; 0 where there is none, or nobody knows.
    """

    life: Life
    exit_code: int | None = None
    reason: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Start:
    """Start it, once: where the engine has one of this name already, that is the one."""

    order: ReplicaOrder
    template: str

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self.order.replica


@dataclass(frozen=True, slots=True)
class Finish:
    """Ask it to finish its work and to end; it is told once. `drain_timeout` seconds later `Kill` follows; None: never."""

    replica: str
    drain_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """End it now; harmless where it has ended, and repeated until it has."""

    replica: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove what is left of it in the engine; harmless where nothing is."""

    replica: str


Step: TypeAlias = Start | Finish | Kill | Remove


class Engine(Protocol):
    """One engine. All methods end by themselves within seconds; what takes longer goes on inside the engine."""

    async def observe(self) -> Mapping[str, Sighting]:
        """Every replica of this adapter that the engine has, by name, those that ended too until they are removed.

        Raises:
            EngineUnavailableError: nobody knows what runs.
        """
        ...

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """Take these steps; each is harmless when it was taken before, and one that fails holds up no other.

        Returns:
            Why a replica will never be started, for a person, by name: what was ordered is of no use.

        Raises:
            StepsFailedError: some were perhaps not taken.
            EngineUnavailableError: perhaps none was; they come again if they are still wanted.
        """
        ...

    async def watch(self) -> None:
        """Wait until something may have changed in the engine; never longer than some seconds.

        Raises:
            EngineUnavailableError: it cannot be watched now.
        """
        ...

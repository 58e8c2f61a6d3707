"""What an adapter and the engine it drives say to each other. Pure.

An engine (a container engine, Kubernetes, Slurm, Ray, ECS) keeps replicas for us and outlives the adapter. It is asked by
level: what is there is observed, what is missing is asked for, again and again; an answer that was lost costs nothing. An
engine that cannot be listed says nothing: that is not "nothing runs".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

from gpuscale.autoscaler.adapters.templates import ReplicaOrder
from gpuscale.common.runtime.logs import get_logger


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


class Goal(Enum):
    """What should become of a replica."""

    RUN = "run"
    STOP = "stop"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Desired:
    """What the autoscaler wants of one replica.

    Attributes:
        order: which replica, and with what it is started.
        goal: what should become of it.
        template: name of its command template.
        drain_timeout: seconds it may take to finish its work; None for ever.
    """

    order: ReplicaOrder
    goal: Goal
    template: str = ""
    drain_timeout: float | None = None


def ends_first(steps: Iterable[Step]) -> list[Step]:
    """The steps in their order, but for starts, which are taken last: they make room for nobody, and may take long."""
    return sorted(steps, key=lambda step: isinstance(step, Start))


class Taking:
    """Notes what came of each step."""

    def __init__(self) -> None:
        self._refused: dict[str, str] = {}
        self._failed: dict[str, str] = {}

    async def note(self, step: Step, taken: Awaitable[str]) -> None:
        """Take a step; what is awaited tells of a start why it will never be, and of the others nothing."""
        try:
            refusal = await taken
        except EngineUnavailableError as error:
            self.fail(step.replica, str(error))
        else:
            if refusal:
                self._refused[step.replica] = refusal

    def fail(self, replica: str, why: str) -> None:
        """Its step was perhaps not taken."""
        self._failed[replica] = why

    def outcome(self) -> Mapping[str, str]:
        """As `Engine.apply` returns it.

        Raises:
            StepsFailedError: some steps were perhaps not taken.
        """
        if self._failed:
            raise StepsFailedError(self._failed, self._refused)
        return self._refused


_log = get_logger(__name__)


class Kept(Protocol):
    """A job, a task, or whatever an engine calls it."""

    @property
    def over(self) -> bool:
        """Whether nothing of it runs any more."""
        ...


K = TypeVar("K", bound=Kept)


async def one_each(
    found: Iterable[tuple[str, K]],
    first: Callable[[Iterable[K]], K],
    end: Callable[[K], Awaitable[None]],
) -> dict[str, K]:
    """The one that counts of each replica.

    Args:
        found: all of them, with the name of the replica.
        first: says which of several counts.
        end: ends one of those that do not.

    Raises:
        EngineUnavailableError: one that is there twice was perhaps not ended.
    """
    by_replica: dict[str, list[K]] = {}
    for replica, one in found:
        by_replica.setdefault(replica, []).append(one)
    counts = {replica: first(own) for replica, own in by_replica.items()}
    for replica, own in by_replica.items():
        for other in own:
            if other is not counts[replica] and not other.over:
                _log.warning("ending what was started twice", replica=replica, what=str(other))
                await end(other)
    return counts

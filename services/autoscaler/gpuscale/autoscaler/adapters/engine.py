"""The interface between an adapter and the engine it drives. Pure.

An engine (processes, containers, Kubernetes, Slurm, Ray, ECS) runs replicas for the adapter. It is level-triggered: the adapter
observes what exists and requests what is missing, repeatedly, so a lost answer does no harm. An engine that cannot be listed
proves nothing; replicas may still run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import JsonValue

from gpuscale.autoscaler.domain.inputs import ANY
from gpuscale.autoscaler.domain.replicas import Goal


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """The autoscaler's order for a replica to run."""

    replica: str  # endpoints/{endpoint}/replicas/{replica}
    endpoint: str  # endpoints/{endpoint}
    parameters: Mapping[str, str]  # values for the template's placeholders
    gpu_uuids: tuple[str, ...] = ()  # its reserved GPUs
    gpu_count: int = 0  # how many GPUs it needs
    fence: int = 0  # of its reservation; 0 if it needs none
    reservation: str = ""  # its name; empty if it needs none
    lease_token: str = field(default="", repr=False)  # token of the grant
    # what its workers must offer, if its endpoint has capability sets
    capabilities: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def capability_text(self) -> str:
        """The format of OpenGRIS Scaler's workers: gpu=2,high_memory."""
        return ",".join(
            name if amount == ANY else f"{name}={amount}"
            for name, amount in sorted(self.capabilities.items())
        )

    def variables(self) -> dict[str, str]:
        """Variables that every engine sets, even one that picks GPUs itself."""
        own = {"GPUSCALE_ENDPOINT": self.endpoint, "GPUSCALE_REPLICA": self.replica}
        return {**own, "GPUSCALE_CAPABILITIES": self.capability_text} if self.capabilities else own

    def reserved_variables(self) -> dict[str, str]:
        """The same, plus those of an engine that starts replicas on reserved GPUs."""
        return {
            **self.variables(),
            "GPUSCALE_FENCE": str(self.fence),
            "GPUSCALE_GPU_UUIDS": ",".join(self.gpu_uuids),
            "GPUSCALE_RESERVATION": self.reservation,
        }


@dataclass(frozen=True, slots=True)
class Desired:
    """What the autoscaler wants of one replica."""

    order: ReplicaOrder  # which replica, and how to start it
    goal: Goal  # its goal
    template: str = ""  # name of its template
    drain_timeout: float | None = None  # seconds to finish its work; None for no limit


class LaunchRefusedError(Exception):
    """A replica can never be started as requested; the text says why, for people."""


class EngineUnavailableError(Exception):
    """The engine did not answer in time, or refused; the text says why, for people."""


class StepsFailedError(EngineUnavailableError):
    """Some steps may not have been taken; all others were.

    `failed` says why, by replica: they are retried if still wanted. `refused` is what `Engine.apply` returns for the others.
    """

    def __init__(self, failed: Mapping[str, str], refused: Mapping[str, str]) -> None:
        super().__init__("; ".join(sorted(set(failed.values()))))
        self.failed = failed
        self.refused = refused


class WorkerLife(Enum):
    """The state of a replica in its engine."""

    WAITING = "waiting"
    """Not started yet, for example because its image is missing: `Start` is repeated until it is."""
    STARTING = "starting"
    """Accepted: it waits for capacity, is being prepared, or is not healthy yet."""
    READY = "ready"
    """Running, and healthy as far as the engine knows."""
    ENDED = "ended"
    """Nothing of it runs."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """A replica as its engine reports it."""

    life: WorkerLife  # its state
    exit_code: int | None = None  # once it ended, if the engine reports it; negative for a signal
    reason: str = ""  # the reason for its state, such as what it waits for; may be empty
    pid: int = 0  # its process on this host; 0 if none or unknown
    metrics: str = ""  # its metrics URL; empty if its template has none
    # what the engine needs to find it after a restart of the adapter; returned in `JournalRecord.kept`
    kept: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Start a replica, once: if the engine already has one of this name, that is it."""

    order: ReplicaOrder
    template: str

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self.order.replica


@dataclass(frozen=True, slots=True)
class Finish:
    """Ask it to finish its work and end, once. `Kill` follows `drain_timeout` seconds later; None: never."""

    replica: str
    drain_timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """End it now; harmless if it has ended, and repeated until it has."""

    replica: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove what is left of it in the engine; harmless if nothing is."""

    replica: str


Step: TypeAlias = Start | Finish | Kill | Remove


class Engine(Protocol):
    """An engine. All methods return within seconds; longer work continues inside the engine."""

    async def observe(self) -> Mapping[str, Sighting]:
        """Every replica of the engine by name, including ended ones until they are removed; EngineUnavailableError."""
        ...

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """Take these steps; repeating one is harmless, and one that fails does not block others.

        Returns why replicas will never be started, by name. StepsFailedError: some may not have been taken;
        EngineUnavailableError: perhaps none was; they are retried if still wanted.
        """
        ...

    async def watch(self) -> None:
        """Wait up to some seconds until something may have changed in the engine; EngineUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcomes:
    """The outcome of several steps: replicas that will never be started, and steps that may not have been taken."""

    refused: dict[str, str] = field(default_factory=dict[str, str])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def result(self) -> Mapping[str, str]:
        """The result of `Engine.apply`. Raises StepsFailedError if some steps may not have been taken."""
        if self.failed:
            raise StepsFailedError(self.failed, self.refused)
        return self.refused


class StepwiseEngine(Engine):
    """An engine that takes steps one by one. Each may raise EngineUnavailableError without blocking others."""

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """See `Engine.apply`."""
        outcomes = StepOutcomes()
        for step in steps:
            await self.take(step, outcomes)
        return outcomes.result()

    async def take(self, step: Step, outcomes: StepOutcomes) -> None:
        """Take one step and add its outcome to `outcomes`."""
        try:
            match step:
                case Start():
                    await self.start(step)
                case Finish():
                    await self.finish(step)
                case Kill(replica):
                    await self.kill(replica)
                case Remove(replica):
                    await self.remove(replica)
        except LaunchRefusedError as error:
            outcomes.refused[step.replica] = str(error)
        except EngineUnavailableError as error:
            outcomes.failed[step.replica] = str(error)

    @abstractmethod
    async def start(self, step: Start) -> None:
        """See `Start`. Raises LaunchRefusedError if it will never be started."""

    @abstractmethod
    async def finish(self, step: Finish) -> None:
        """See `Finish`."""

    @abstractmethod
    async def kill(self, replica: str) -> None:
        """See `Kill`."""

    @abstractmethod
    async def remove(self, replica: str) -> None:
        """See `Remove`."""


K = TypeVar("K")


def split_duplicates(
    found: Iterable[tuple[str | None, K]], age: Callable[[K], Any]
) -> tuple[dict[str, K], list[K]]:
    """Sort an engine's jobs or tasks by replica, if they are ours: the oldest of each, and the surplus ones.

    A start whose answer is lost is repeated. If an engine accepted both, it should end the surplus.
    """
    counting: dict[str, K] = {}
    others: list[K] = []
    for replica, item in sorted(found, key=lambda pair: age(pair[1])):
        if replica is not None and counting.setdefault(replica, item) is not item:
            others.append(item)
    return counting, others

"""What an adapter and the engine it drives say to each other. Pure.

An engine (processes, a container engine, Kubernetes, Slurm, Ray, ECS) keeps replicas for the adapter. It is level-triggered:
what is there is observed, what is missing is asked for, again and again, so a lost answer costs nothing. An engine that
cannot be listed says nothing; that does not mean that nothing runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, TypeAlias, TypeVar

from pydantic import JsonValue

from gpuscale.autoscaler.domain.inputs import ANY


@dataclass(frozen=True, slots=True)
class ReplicaOrder:
    """What the autoscaler says of a replica that is to run."""

    replica: str  # endpoints/{endpoint}/replicas/{replica}
    endpoint: str  # endpoints/{endpoint}
    parameters: Mapping[str, str]  # values for the template's placeholders
    gpu_uuids: tuple[str, ...] = ()  # its GPUs, where they are reserved
    gpu_count: int = 0  # how many it needs
    fence: int = 0  # of the reservation that holds them; 0 where it needs none
    reservation: str = ""  # its name; empty where it needs none
    lease_token: str = field(default="", repr=False)  # what came with the grant
    # what its workers are to have, where its endpoint has capability sets
    capabilities: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def capability_text(self) -> str:
        """As workers of OpenGRIS Scaler take them: gpu=2,high_memory."""
        return ",".join(
            name if amount == ANY else f"{name}={amount}"
            for name, amount in sorted(self.capabilities.items())
        )

    def variables(self) -> dict[str, str]:
        """Variables that every engine sets, also one that picks GPUs itself."""
        own = {"GPUSCALE_ENDPOINT": self.endpoint, "GPUSCALE_REPLICA": self.replica}
        return {**own, "GPUSCALE_CAPABILITIES": self.capability_text} if self.capabilities else own

    def reserved_variables(self) -> dict[str, str]:
        """The same, with those of an engine that starts replicas on reserved GPUs."""
        return {
            **self.variables(),
            "GPUSCALE_FENCE": str(self.fence),
            "GPUSCALE_GPU_UUIDS": ",".join(self.gpu_uuids),
            "GPUSCALE_RESERVATION": self.reservation,
        }


class WorkerGoal(Enum):
    """What should become of a replica."""

    RUN = "run"
    STOP = "stop"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Desired:
    """What the autoscaler wants of one replica."""

    order: ReplicaOrder  # which replica, and with what it is started
    goal: WorkerGoal  # what should become of it
    template: str = ""  # name of its template
    drain_timeout: float | None = None  # seconds it may take to finish its work; None for ever


class LaunchRefusedError(Exception):
    """A replica can never be started as asked; the text says why, for a person."""


class EngineUnavailableError(Exception):
    """The engine did not answer, or not in time, or refused to be asked; the text says why, for a person."""


class StepsFailedError(EngineUnavailableError):
    """Some steps were perhaps not taken, all others were.

    `failed` says why, by replica: they come again if still wanted. `refused` is what `Engine.apply` returns of the others.
    """

    def __init__(self, failed: Mapping[str, str], refused: Mapping[str, str]) -> None:
        super().__init__("; ".join(sorted(set(failed.values()))))
        self.failed = failed
        self.refused = refused


class WorkerLife(Enum):
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
    """A replica as its engine has it."""

    life: WorkerLife  # how far it has come
    exit_code: int | None = None  # once it ended, where the engine tells; negative for a signal
    reason: str = ""  # why it stands as it does, such as what it waits for; may be empty
    pid: int = 0  # its process on this host; 0 where there is none, or nobody knows
    metrics: str = ""  # URL of what it shows of itself; empty where its template names none
    # what the engine needs to find it again after a restart of the adapter; it comes back in `Record.kept`
    kept: Mapping[str, JsonValue] | None = None


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
        """Every replica that the engine has, by name, ended ones until they are removed; EngineUnavailableError."""
        ...

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """Take these steps; each is harmless when it was taken before, and one that fails holds up no other.

        Returns why replicas will never be started, by name. StepsFailedError: some were perhaps not taken;
        EngineUnavailableError: perhaps none was; they come again if they are still wanted.
        """
        ...

    async def watch(self) -> None:
        """Wait some seconds at most until something may have changed in the engine; EngineUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class StepOutcomes:
    """What came of several steps: why replicas will never be started, and which steps were perhaps not taken."""

    refused: dict[str, str] = field(default_factory=dict[str, str])
    failed: dict[str, str] = field(default_factory=dict[str, str])

    def result(self) -> Mapping[str, str]:
        """As `Engine.apply` returns it. Raises StepsFailedError: some steps were perhaps not taken."""
        if self.failed:
            raise StepsFailedError(self.failed, self.refused)
        return self.refused


class StepwiseEngine(Engine):
    """An engine that takes steps one by one. Each may raise EngineUnavailableError, which holds up no other."""

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`."""
        outcomes = StepOutcomes()
        for step in steps:
            await self.take(step, outcomes)
        return outcomes.result()

    async def take(self, step: Step, outcomes: StepOutcomes) -> None:
        """Take one step and add what came of it to `outcomes`."""
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
        """As `Start`. Raises LaunchRefusedError: it will never be started."""

    @abstractmethod
    async def finish(self, step: Finish) -> None:
        """As `Finish`."""

    @abstractmethod
    async def kill(self, replica: str) -> None:
        """As `Kill`."""

    @abstractmethod
    async def remove(self, replica: str) -> None:
        """As `Remove`."""


K = TypeVar("K")


def split_duplicates(
    found: Iterable[tuple[str | None, K]], age: Callable[[K], Any]
) -> tuple[dict[str, K], list[K]]:
    """Of an engine's jobs or tasks, with their replicas if they are ours: the oldest of each, which counts, and the others.

    A start whose answer is lost comes again. Where an engine took both, it is to end the others.
    """
    counting: dict[str, K] = {}
    others: list[K] = []
    for replica, item in sorted(found, key=lambda pair: age(pair[1])):
        if replica is not None and counting.setdefault(replica, item) is not item:
            others.append(item)
    return counting, others

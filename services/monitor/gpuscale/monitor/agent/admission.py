"""Which work may start on a GPU: that with the highest fence seen there, or a higher one. Pure.

The fence of a reservation only grows (the fencing tokens of Martin Kleppmann, "How to do distributed locking", 2016). A
holder that slept through the end of its lease comes with a lower one than who was granted the GPU since, and is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey


@dataclass(frozen=True, slots=True)
class FenceTooLow:
    """A refusal: work with a higher fence was admitted on this GPU."""

    uuid: str
    highest: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that was admitted on GPUs."""

    process: ProcessKey
    fence: int
    uuids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Admissions:
    """What was admitted so far: the highest fence by GPU, and the processes that said who they are."""

    fences: Mapping[str, int] = field(default_factory=dict[str, int])
    workers: tuple[Worker, ...] = ()

    def admit(
        self, uuids: Sequence[str], fence: int, process: ProcessKey | None
    ) -> "Admissions | FenceTooLow":
        """With this work admitted on all of the GPUs, or why it is admitted on none."""
        for uuid in uuids:
            if self.fences.get(uuid, 0) > fence:
                return FenceTooLow(uuid, self.fences[uuid])
        workers = self.workers
        if process is not None:
            others = (worker for worker in workers if worker.process != process)
            known = [worker for worker in workers if worker.process == process and worker.fence == fence]
            before = known[0].uuids if known else frozenset[str]()
            workers = (*others, Worker(process, fence, before | frozenset(uuids)))
        return Admissions({**self.fences, **dict.fromkeys(uuids, fence)}, workers)

    def without_dead(self, lives: Callable[[ProcessKey], bool]) -> "Admissions":
        """Without the processes that have ended; fences stay for good."""
        return replace(self, workers=tuple(worker for worker in self.workers if lives(worker.process)))

    def fence_of(self, uuid: str, lineage: Iterable[ProcessKey]) -> int | None:
        """The fence that a process runs under on a GPU: its own, or that of the nearest it descends from."""
        for process in lineage:
            for worker in self.workers:
                if worker.process == process and uuid in worker.uuids:
                    return worker.fence
        return None

    def mark(self, uuid: str, processes: tuple[GpuProcess, ...]) -> tuple[GpuProcess, ...]:
        """The processes of a GPU, each with its fence."""
        if not self.workers:
            return processes
        return tuple(replace(process, fence=self.fence_of(uuid, process.lineage)) for process in processes)

"""Which work may start on a GPU, and whose a process is: by what was admitted. Pure.

Each grant has a higher fence than the one before it (the fencing tokens of Martin Kleppmann, "How to do distributed
locking", 2016). A holder that slept through the end of its lease comes with a lower fence than any that holds the GPU now,
and is refused. Reservations of shares hold one GPU together, so the lowest fence of them counts, not the highest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

DEAD_KEPT: Final = 256
"""How many admitted processes are remembered after they end: what they left behind still belongs to them."""


@dataclass(frozen=True, slots=True)
class FenceTooLow:
    """A refusal: when work was last admitted on this GPU, the lowest fence that held it was higher already."""

    uuid: str
    lowest: int


@dataclass(frozen=True, slots=True)
class AdmittedProcess:
    """A process that was admitted on GPUs for a reservation, `reservations/{reservation}`.

    Attributes:
        container: the container or pod that it was the first process of; empty where it was not.
        user: number of its Unix user; None where that is not known.
    """

    process: ProcessKey
    reservation: str
    fence: int
    uuids: frozenset[str]
    container: str = ""
    user: int | None = None


@dataclass(frozen=True, slots=True)
class Admissions:
    """What was admitted so far: the lowest fence that may still hold each GPU, and the processes that said who they are."""

    fences: Mapping[str, int] = field(default_factory=dict[str, int])
    workers: tuple[AdmittedProcess, ...] = ()

    def admit(
        self,
        uuids: Sequence[str],
        reservation: str,
        fence: int,
        process: ProcessKey | None,
        *,
        container: str = "",
        user: int | None = None,
        lowest: Mapping[str, int] | None = None,
    ) -> "Admissions | FenceTooLow":
        """Admit work on all of these GPUs; or the reason why it is admitted on none.

        Args:
            uuids: of the GPUs.
            reservation: it holds them.
            fence: of the reservation.
            process: the process that asks; None where it is not known.
            container: the container or pod that it is the first process of.
            user: number of its Unix user.
            lowest: the lowest fence that holds each GPU; where one is not named, this reservation holds it alone.
        """
        for uuid in uuids:
            if self.fences.get(uuid, 0) > fence:
                return FenceTooLow(uuid, self.fences[uuid])
        workers = self.workers
        if process is not None:
            others = (worker for worker in workers if worker.process != process)
            known = [worker for worker in workers if worker.process == process and worker.fence == fence]
            before = known[0].uuids if known else frozenset[str]()
            worker = AdmittedProcess(process, reservation, fence, before | frozenset(uuids), container, user)
            workers = (*others, worker)
        held = {uuid: (lowest or {}).get(uuid, fence) for uuid in uuids}
        fences = {uuid: max(found, self.fences.get(uuid, 0)) for uuid, found in held.items()}
        return Admissions({**self.fences, **fences}, workers)

    def reset(self, uuids: Iterable[str]) -> "Admissions":
        """Drop the fences of these GPUs, and what was admitted on them."""
        gone = frozenset(uuids)
        left = (replace(worker, uuids=worker.uuids - gone) for worker in self.workers)
        fences = {uuid: fence for uuid, fence in self.fences.items() if uuid not in gone}
        return Admissions(fences, tuple(worker for worker in left if worker.uuids))

    def without_dead(self, lives: Callable[[ProcessKey], bool]) -> "Admissions":
        """Drop processes that have ended, but for the latest `DEAD_KEPT`; fences stay for good."""
        dead = [worker for worker in self.workers if not lives(worker.process)]
        forgotten = {worker.process for worker in dead[:-DEAD_KEPT]}
        return replace(
            self, workers=tuple(worker for worker in self.workers if worker.process not in forgotten)
        )

    def on(self, uuid: str) -> tuple[AdmittedProcess, ...]:
        """What was admitted on a GPU."""
        return tuple(worker for worker in self.workers if uuid in worker.uuids)


class Holders:
    """Tells which reservation a process on a GPU belongs to.

    The first rule that gives an answer counts:

    1. It was admitted, or descends from a process that was: from the nearest of them. A pid counts with its start time.
    2. By this rule it was known before, though what started it has ended since.
    3. It runs in a container or pod whose first process was admitted; of several reservations' there: unknown.
    4. Its environment names a reservation, under which the same Unix user had work admitted on this GPU: the user could
       as well have admitted it, so nobody can put the blame on another by it. The environment alone says nothing.
    5. Only with `by_user`: its Unix user has work of one reservation alone on this GPU.

    Of a process that the agent cannot see it is unknown whose it is.
    """

    def __init__(self, *, by_user: bool = False) -> None:
        self._by_user = by_user
        self._known: dict[str, dict[ProcessKey, str]] = {}

    def mark(
        self, admissions: Admissions, uuid: str, processes: tuple[GpuProcess, ...]
    ) -> tuple[GpuProcess, ...]:
        """The processes of a GPU, each with its reservation."""
        workers = admissions.on(uuid)
        if not workers:
            self._known.pop(uuid, None)
            return processes
        known, self._known[uuid] = self._known.get(uuid, {}), {}
        return tuple(self._marked(process, workers, known, self._known[uuid]) for process in processes)

    def _marked(
        self,
        process: GpuProcess,
        workers: Sequence[AdmittedProcess],
        before: Mapping[ProcessKey, str],
        known: dict[ProcessKey, str],
    ) -> GpuProcess:
        if not process.lineage:
            return process
        key = process.lineage[0]
        reservation = _descends(process, workers) or before.get(key)
        if reservation is not None and any(worker.reservation == reservation for worker in workers):
            known[key] = reservation
            return replace(process, reservation=reservation)
        for found in (
            _contained(process, workers),
            _named(process, workers),
            self._of_user(process, workers),
        ):
            if len(found) == 1:
                return replace(process, reservation=next(iter(found)))
            if found:
                return replace(process, holder_unknown=True)
        return process

    def _of_user(self, process: GpuProcess, workers: Sequence[AdmittedProcess]) -> set[str]:
        if not self._by_user or process.user is None:
            return set()
        return {worker.reservation for worker in workers if worker.user == process.user}


def _descends(process: GpuProcess, workers: Sequence[AdmittedProcess]) -> str | None:
    admitted = {worker.process: worker.reservation for worker in workers}
    return next((admitted[key] for key in process.lineage if key in admitted), None)


def _contained(process: GpuProcess, workers: Sequence[AdmittedProcess]) -> set[str]:
    return {
        worker.reservation for worker in workers if worker.container and worker.container == process.container
    }


def _named(process: GpuProcess, workers: Sequence[AdmittedProcess]) -> set[str]:
    named = (worker for worker in workers if worker.reservation == process.mark and worker.user is not None)
    return {worker.reservation for worker in named if worker.user == process.user}

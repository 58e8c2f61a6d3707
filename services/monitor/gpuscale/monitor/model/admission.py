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
    """A process that was admitted on GPUs for a reservation, `reservations/{reservation}`."""

    process: ProcessKey
    reservation: str
    fence: int
    uuids: frozenset[str]
    container: str = ""  # the container or pod that it was the first process of; empty where it was not
    user: int | None = None  # number of its Unix user; None where that is not known


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

        `container`: the one that `process` is the first of. `lowest`: the lowest fence of each GPU that several may hold.
        """
        for uuid in uuids:
            if self.fences.get(uuid, 0) > fence:
                return FenceTooLow(uuid, self.fences[uuid])
        workers = self.workers
        if process is not None:
            before = {worker.process: worker for worker in workers}
            known = before.pop(process, None)
            gpus = frozenset(uuids)
            if known is not None and known.fence == fence:
                gpus |= known.uuids
            worker = AdmittedProcess(process, reservation, fence, gpus, container, user)
            workers = (*before.values(), worker)
        lowest = lowest or {}
        fences = {uuid: max(lowest.get(uuid, fence), self.fences.get(uuid, 0)) for uuid in uuids}
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
        admitted = {worker.process: worker.reservation for worker in workers}
        ancestors = (admitted[ancestor] for ancestor in process.lineage if ancestor in admitted)
        reservation = next(ancestors, None) or before.get(key)
        if reservation is not None and reservation in admitted.values():
            known[key] = reservation
            return replace(process, reservation=reservation)
        found = self._claims(process, workers)
        if len(found) == 1:
            return replace(process, reservation=next(iter(found)))
        return replace(process, holder_unknown=True) if found else process

    def _claims(self, process: GpuProcess, workers: Sequence[AdmittedProcess]) -> set[str]:
        """The reservations that a process may belong to, by the first of the rules 3 to 5 that gives any."""
        in_container = {
            worker.reservation
            for worker in workers
            if process.container and worker.container == process.container
        }
        of_user = {
            worker.reservation
            for worker in workers
            if process.user is not None and worker.user == process.user
        }
        return in_container or of_user & {process.mark} or (of_user if self._by_user else set())

"""Admission of work on GPUs by fences, and the reservations of processes. Pure.

Each grant has a higher fence than the one before (the fencing tokens of Martin Kleppmann, "How to do distributed locking", 2016),
so a holder that slept through the end of its lease is refused. Reservations of shares hold a GPU together: the lowest of their
fences counts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

DEAD_KEPT: Final = 256
"""How many admitted processes are remembered after they end, as their children still belong to their reservation."""


@dataclass(frozen=True, slots=True)
class FenceTooLow:
    """A refusal: the GPU is already held under a higher fence, at least `lowest`."""

    uuid: str
    lowest: int


@dataclass(frozen=True, slots=True)
class AdmittedProcess:
    """A process admitted on GPUs for a reservation, `reservations/{reservation}`."""

    process: ProcessKey
    reservation: str
    fence: int
    uuids: frozenset[str]
    container: str = ""  # the container or pod of which it is the first process, if so
    user: int | None = None  # Unix user id


@dataclass(frozen=True, slots=True)
class Admissions:
    """What was admitted: the lowest fence that may still hold each GPU, and the processes."""

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
        """Admit work on all of these GPUs, or refuse it.

        `container`: that of which `process` is the first. `lowest`: the lowest fence of each shared GPU.
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
        """Drop the fences of these GPUs and what was admitted on them."""
        gone = frozenset(uuids)
        left = (replace(worker, uuids=worker.uuids - gone) for worker in self.workers)
        fences = {uuid: fence for uuid, fence in self.fences.items() if uuid not in gone}
        return Admissions(fences, tuple(worker for worker in left if worker.uuids))

    def without_dead(self, lives: Callable[[ProcessKey], bool]) -> "Admissions":
        """Drop processes that have ended, except for the latest `DEAD_KEPT`. Fences stay."""
        dead = [worker for worker in self.workers if not lives(worker.process)]
        forgotten = {worker.process for worker in dead[:-DEAD_KEPT]}
        return replace(
            self, workers=tuple(worker for worker in self.workers if worker.process not in forgotten)
        )

    def on(self, uuid: str) -> tuple[AdmittedProcess, ...]:
        """What was admitted on a GPU."""
        return tuple(worker for worker in self.workers if uuid in worker.uuids)


class Holders:
    """Finds the reservation that a process on a GPU belongs to, by the first rule that applies.

    1. It was admitted, or its nearest admitted ancestor was. Processes are identified by pid and start time.
    2. It was found by rule 1 before, and its admitted ancestor has ended since.
    3. It runs in a container or pod whose first process was admitted; unknown if there are several reservations.
    4. Its environment names a reservation of which the same Unix user had work admitted on this GPU, and so could have admitted it.
    5. With `by_user`: its Unix user has work of only one reservation on this GPU.

    The reservation of a process that the agent cannot see is unknown.
    """

    def __init__(self, *, by_user: bool = False) -> None:
        self._by_user = by_user
        self._known: dict[str, dict[ProcessKey, str]] = {}

    def mark(
        self, admissions: Admissions, uuid: str, processes: tuple[GpuProcess, ...]
    ) -> tuple[GpuProcess, ...]:
        """The processes of a GPU with their reservations."""
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
            return process._replace(reservation=reservation)
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
        found = in_container or of_user & {process.mark} or (of_user if self._by_user else set[str]())
        if len(found) == 1:
            return process._replace(reservation=next(iter(found)))
        return process._replace(holder_unknown=True) if found else process

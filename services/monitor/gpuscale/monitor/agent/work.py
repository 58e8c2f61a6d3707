"""Admits work on this host's GPUs: one decision at a time, on disk before it is told."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gpuscale.common.errors import FailedPreconditionError, NotFoundError
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.tasks import uninterrupted
from gpuscale.common.security.auth import Principal
from gpuscale.monitor.agent.admission import Admissions, FenceTooLow
from gpuscale.monitor.agent.admission_file import AdmissionFile
from gpuscale.monitor.agent.lease_checks import HeldLease, LeaseChecks
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.model.readings import GpuProcess, ProcessKey


class Work:
    """The admissions of this agent.

    Args:
        knows: whether the host has a GPU of that UUID that work can be placed on.
        leases: asks the allocator who holds what.

    Attributes:
        admissions: what is admitted now.
    """

    def __init__(self, knows: Callable[[str], bool], leases: LeaseChecks) -> None:
        self._leases = leases
        self.admissions = Admissions()
        self._file: AdmissionFile | None = None
        self._knows = knows
        self._processes = ProcessNames()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def kept_in(self, directory: Path | None, boot_id: str) -> AsyncGenerator[None, None]:
        """Keep the admissions in a directory, locked for as long as the block lasts; None: in memory only.

        Raises:
            FailedPreconditionError: another agent uses the directory, or what is in it cannot be read.
        """
        if directory is None:
            yield
            return
        with DirectoryLock(directory):
            self._file = AdmissionFile(directory, boot_id)
            self.admissions = await asyncio.to_thread(self._file.load)
            yield

    async def admit(
        self, lease: HeldLease, pid: int | None, caller: Principal, pid_namespace: int | None = None
    ) -> None:
        """Admit work of a lease on its GPUs, and remember the process if one is named.

        Raises:
            NotFoundError: GPU_NOT_FOUND or PROCESS_NOT_FOUND, or the allocator knows no such reservation.
            PermissionDeniedError: the lease token is missing or another's.
            FailedPreconditionError: FENCE_TOO_LOW, the allocator says that the lease does not hold the GPUs, or nobody can
                be asked.
            UnavailableError: STATE_UNAVAILABLE, the fence cannot be written; or the allocator does not answer.
        """
        self._expect(lease.gpu_uuids)
        lowest = await self._leases.check(lease, caller)
        await self._admit(lease, pid, pid_namespace, lowest)

    @uninterrupted
    async def reset(self, uuids: Sequence[str]) -> None:
        """Forget the fences of GPUs, and what was admitted on them.

        Raises:
            NotFoundError: GPU_NOT_FOUND.
            UnavailableError: STATE_UNAVAILABLE, that cannot be written.
        """
        self._expect(uuids)
        async with self._turn:
            await self._put(self.admissions.reset(uuids))

    def _expect(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if not self._knows(uuid):
                raise NotFoundError(
                    f"this host has no GPU {uuid}", reason="GPU_NOT_FOUND", metadata={"gpu": uuid}
                )

    @uninterrupted
    async def _admit(
        self, lease: HeldLease, pid: int | None, pid_namespace: int | None, lowest: dict[str, int]
    ) -> None:
        async with self._turn:
            found = None if pid is None else await asyncio.to_thread(self._find, pid, pid_namespace)
            living = await asyncio.to_thread(self.admissions.without_dead, self._lives)
            decided = living.admit(
                lease.gpu_uuids,
                lease.reservation,
                lease.fence,
                found.lineage[0] if found else None,
                container=found.container if found and self._processes.leads(found) else "",
                user=found.user if found else None,
                lowest=lowest,
            )
            if isinstance(decided, FenceTooLow):
                raise _too_low(decided, lease.fence)
            await self._put(decided)

    async def _put(self, decided: Admissions) -> None:
        """First on disk, then in memory."""
        if self._file is not None and decided != self.admissions:
            await asyncio.to_thread(self._file.save, decided)
        self.admissions = decided

    def _find(self, pid: int, pid_namespace: int | None) -> GpuProcess:
        own = self._processes.in_namespace(pid, pid_namespace)
        found = None if own is None else self._processes.find(own)
        if found is None:
            raise NotFoundError(f"this host has no process {pid}", reason="PROCESS_NOT_FOUND")
        return found

    def _lives(self, process: ProcessKey) -> bool:
        return self._processes.lineage(process.pid)[:1] == (process,)


def _too_low(refusal: FenceTooLow, fence: int) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"{refusal.uuid} is held under fence {refusal.lowest} or a higher one, and {fence} is lower: "
        "the reservation is over",
        reason="FENCE_TOO_LOW",
        metadata={"gpu": refusal.uuid, "highest_fence": str(refusal.lowest)},
    )

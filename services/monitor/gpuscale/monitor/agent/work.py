"""Admits work on this host's GPUs: one decision at a time, on disk before it is told."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gpuscale.common.errors import FailedPreconditionError, NotFoundError
from gpuscale.common.runtime.lock import DirectoryLock
from gpuscale.monitor.agent.admission import Admissions, FenceTooLow
from gpuscale.monitor.agent.admission_file import AdmissionFile
from gpuscale.monitor.model.readings import ProcessKey
from gpuscale.monitor.agent.processes import ProcessNames


class Work:
    """The admissions of this agent.

    Args:
        knows: whether the host has a GPU of that UUID that work can be placed on.

    Attributes:
        admissions: what is admitted now.
    """

    def __init__(self, knows: Callable[[str], bool]) -> None:
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

    async def admit(self, uuids: Sequence[str], fence: int, pid: int | None) -> None:
        """Admit work on GPUs under a fence, and remember the process if one is named.

        Raises:
            NotFoundError: GPU_NOT_FOUND or PROCESS_NOT_FOUND.
            FailedPreconditionError: FENCE_TOO_LOW.
            UnavailableError: STATE_UNAVAILABLE, the fence cannot be written.
        """
        for uuid in uuids:
            if not self._knows(uuid):
                raise NotFoundError(
                    f"this host has no GPU {uuid}", reason="GPU_NOT_FOUND", metadata={"gpu": uuid}
                )
        # Shielded: a caller that goes away must not leave a fence on disk that the memory does not have.
        await asyncio.shield(asyncio.ensure_future(self._admit(uuids, fence, pid)))

    async def _admit(self, uuids: Sequence[str], fence: int, pid: int | None) -> None:
        async with self._turn:
            process = None if pid is None else await asyncio.to_thread(self._find, pid)
            living = await asyncio.to_thread(self.admissions.without_dead, self._lives)
            decided = living.admit(uuids, fence, process)
            if isinstance(decided, FenceTooLow):
                raise _too_low(decided, fence)
            if self._file is not None and decided != self.admissions:
                await asyncio.to_thread(self._file.save, decided)
            self.admissions = decided

    def _find(self, pid: int) -> ProcessKey:
        lineage = self._processes.lineage(pid)
        if not lineage:
            raise NotFoundError(f"this host has no process {pid}", reason="PROCESS_NOT_FOUND")
        return lineage[0]

    def _lives(self, process: ProcessKey) -> bool:
        return self._processes.lineage(process.pid)[:1] == (process,)


def _too_low(refusal: FenceTooLow, fence: int) -> FailedPreconditionError:
    return FailedPreconditionError(
        f"work with fence {refusal.highest} was admitted on {refusal.uuid}, and {fence} is lower: "
        "the reservation is over",
        reason="FENCE_TOO_LOW",
        metadata={"gpu": refusal.uuid, "highest_fence": str(refusal.highest)},
    )

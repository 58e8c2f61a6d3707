"""Admits work on this host's GPUs: the allocator confirms the lease, and the fence is on disk before the caller is answered.

The file is replaced atomically. If it cannot be read, the agent refuses to start, since without fences it would admit work of
ended leases.
"""

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnimplementedError,
)
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.tasks import hit, require_uninterrupted, uninterrupted
from gpuscale.common.security.auth import Principal, Role
from gpuscale.monitor.agent.processes import ProcessNames
from gpuscale.monitor.helper import keep
from gpuscale.monitor.model.admission import Admissions, AdmittedProcess, FenceTooLow
from gpuscale.monitor.model.readings import GpuProcess, ProcessKey

FILE_NAME = "admissions.json"
ROOM: Final = 64 << 10
"""Bytes that are allocated on disk for the next file."""
_VERSION = 2
_WITHOUT_RESERVATIONS = 1
"""An older version whose fences count, but whose processes lack their reservations."""


class AdmissionFile:
    """The stored admissions of one agent, in its own directory. Methods block."""

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._path = directory / FILE_NAME
        self._draft = self._path.with_suffix(".new")
        self._boot_id = boot_id

    def load(self) -> Admissions:
        """Load the fences, and the processes of this boot. FailedPreconditionError (STATE_UNREADABLE) if that fails."""
        self._keep_room()
        try:
            stored: dict[str, Any] = json.loads(self._path.read_bytes())
            version, fences = stored["version"], {gpu: int(fence) for gpu, fence in stored["fences"].items()}
            known = version == _VERSION and stored["boot_id"] == self._boot_id
            workers = [
                AdmittedProcess(
                    ProcessKey(int(one["pid"]), int(one["started"])),
                    str(one["reservation"]),
                    int(one["fence"]),
                    frozenset(one["gpus"]),
                    str(one["container"]),
                    None if one["user"] is None else int(one["user"]),
                )
                for one in (stored["workers"] if known else ())
            ]
            found = Admissions(fences, tuple(workers))
        except FileNotFoundError:
            return Admissions()
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            raise self._unreadable(type(error).__name__) from error
        if version not in {_VERSION, _WITHOUT_RESERVATIONS}:
            raise self._unreadable(f"version {version}")
        return found

    def save(self, admissions: Admissions) -> None:
        """Write admissions durably. UnavailableError if that fails."""
        workers = [
            {
                "pid": worker.process.pid,
                "started": worker.process.started,
                "reservation": worker.reservation,
                "container": worker.container,
                "user": worker.user,
                "fence": worker.fence,
                "gpus": sorted(worker.uuids),
            }
            for worker in admissions.workers
        ]
        stored = {"boot_id": self._boot_id, "fences": dict(admissions.fences), "workers": workers}
        hit("agent.admit.before_write")
        try:
            keep(self._path, {"version": _VERSION} | stored)
        except OSError as error:
            raise UnavailableError(
                f"cannot write the fence: {error.strerror}", reason="STATE_UNAVAILABLE"
            ) from error
        self._keep_room()
        hit("agent.admit.after_write")

    def _keep_room(self) -> None:
        """Allocate the next file, so that a full disk cannot prevent it."""
        with suppress(OSError):
            draft = os.open(self._draft, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(draft, 0, ROOM)
            finally:
                os.close(draft)

    def _unreadable(self, why: str) -> FailedPreconditionError:
        return FailedPreconditionError(
            f"cannot read the fences in {self._path} ({why}); the file is unchanged",
            reason="STATE_UNREADABLE",
        )


TIMEOUT: Final = 2.0
"""Seconds for the allocator's answer; an adapter waits three for the agent's."""
RETRY_PAUSE: Final = 0.05
"""Seconds before a retry after the connection to the allocator is lost."""
_REASONS_OF_LEASES: Final = frozenset(
    {"NOT_FOUND", "RESERVATION_ENDED", "FENCE_MISMATCH", "GPU_NOT_HELD", "LEASE_TOKEN_INVALID"}
)
"""Reasons that the lease itself is refused."""


class LeaseChecks:
    """Checks leases on this node; `allocator` is None if no address is set."""

    def __init__(self, allocator: grpc.aio.Channel | None, node: str) -> None:
        self._stub = None if allocator is None else allocator_api.AllocatorServiceStub(allocator)
        self._node = node

    async def check(self, work: monitor_api.AdmitWorkRequest, caller: Principal) -> dict[str, int]:
        """The lowest fence that holds each GPU of the work's lease on this node.

        Refuses with LEASE_TOKEN_MISSING, LEASE_TOKEN_INVALID, LEASE_NOT_CHECKED without an answer, or the allocator's reason.
        """
        if not work.lease_token and caller.role < Role.ADMIN:
            raise PermissionDeniedError(
                f"lease_token is empty: only an admin may admit work for {work.reservation} without its token",
                reason="LEASE_TOKEN_MISSING",
            )
        if self._stub is None:
            raise _unchecked(
                FailedPreconditionError, "set allocator_address in the settings of this node's agent"
            )
        request = allocator_api.CheckLeaseRequest(
            name=work.reservation,
            fence=work.fence,
            node=self._node,
            gpu_uuids=work.gpu_uuids,
            lease_token=work.lease_token,
        )
        try:
            with rpc_errors():
                answer = await self._ask(self._stub, request)
        except (FailedPreconditionError, NotFoundError, PermissionDeniedError) as error:
            if error.reason in _REASONS_OF_LEASES:
                raise
            raise _unchecked(FailedPreconditionError, f"the allocator refuses: {error.message}") from error
        except UnimplementedError as error:
            raise _unchecked(
                FailedPreconditionError,
                "there is no allocator at that address; set allocator_address in the settings of this node's agent",
            ) from error
        except GpuscaleError as error:
            raise _unchecked(UnavailableError, f"the allocator does not answer: {error.message}") from error
        return dict(zip(work.gpu_uuids, answer.lowest_fences, strict=False))

    @staticmethod
    async def _ask(
        stub: "allocator_api.AllocatorServiceAsyncStub", request: allocator_api.CheckLeaseRequest
    ) -> allocator_api.CheckLeaseResponse:
        """Ask, with retries while connections are lost: a restart or a cut link leaves several dead ones."""
        loop = asyncio.get_running_loop()
        end, lost = loop.time() + TIMEOUT, None
        while True:
            try:
                return await stub.CheckLease(request, timeout=end - loop.time())
            except grpc.aio.AioRpcError as error:
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise (lost or error) from error  # the lost connection says more than the timeout
                if error.code() != grpc.StatusCode.UNAVAILABLE or loop.time() + RETRY_PAUSE >= end:
                    raise
                lost = error
            await asyncio.sleep(RETRY_PAUSE)


def _unchecked(kind: type[GpuscaleError], why: str) -> GpuscaleError:
    return kind(f"cannot check the lease: {why}", reason="LEASE_NOT_CHECKED")


class Work:
    """The admissions of this agent; `knows` says whether the host has such a GPU that work can run on."""

    def __init__(self, knows: Callable[[str], bool], leases: LeaseChecks) -> None:
        self._leases = leases
        self.admissions = Admissions()
        self._file: AdmissionFile | None = None
        self._knows = knows
        self._processes = ProcessNames()
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def kept_in(self, directory: Path | None, boot_id: str) -> AsyncGenerator[None, None]:
        """Keep the admissions in a directory, locked until the block ends, or in memory for None."""
        if directory is None:
            yield
            return
        with DirectoryLock(directory):
            self._file = AdmissionFile(directory, boot_id)
            self.admissions = await asyncio.to_thread(self._file.load)
            yield

    async def admit(self, work: monitor_api.AdmitWorkRequest, caller: Principal) -> None:
        """Admit work of a lease on its GPUs, and remember its process if given.

        Raises as `check`, and refuses with FENCE_TOO_LOW, PROCESS_GONE, NotFoundError for a GPU, or STATE_UNAVAILABLE.
        """
        self._expect(work.gpu_uuids)
        await self._admit(work, await self._leases.check(work, caller))

    @uninterrupted
    async def reset(self, uuids: Sequence[str]) -> None:
        """Forget the fences of these GPUs and what was admitted on them."""
        self._expect(uuids)
        async with self._turn:
            await self._put(self.admissions.reset(uuids))

    @asynccontextmanager
    async def at_rest(self) -> AsyncGenerator[Admissions]:
        """The admissions; nothing is admitted until the block ends."""
        async with self._turn:
            yield self.admissions

    def _expect(self, uuids: Iterable[str]) -> None:
        for uuid in uuids:
            if not self._knows(uuid):
                raise NotFoundError(f"this host has no GPU {uuid}", metadata={"name": gpu_name("-", uuid)})

    @uninterrupted
    async def _admit(self, work: monitor_api.AdmitWorkRequest, lowest: dict[str, int]) -> None:
        async with self._turn:
            found = await asyncio.to_thread(self._find, work) if work.HasField("pid") else None
            lineage = self._processes.lineage
            living = await asyncio.to_thread(
                self.admissions.without_dead, lambda process: lineage(process.pid)[:1] == (process,)
            )
            decided = living.admit(
                work.gpu_uuids,
                work.reservation,
                work.fence,
                found.lineage[0] if found else None,
                container=found.container if found and self._processes.leads(found) else "",
                user=found.user if found else None,
                lowest=lowest,
            )
            if isinstance(decided, FenceTooLow):
                highest = max(self.admissions.fences.values())
                raise FailedPreconditionError(
                    f"{decided.uuid} is held under fence {decided.lowest} or higher, and {work.fence} is lower: the reservation is"
                    f" over; if the allocator lost its state, set its fences_above to {highest} or more, as the agents of all hosts ask",
                    reason="FENCE_TOO_LOW",
                    metadata={"gpu": decided.uuid, "highest_fence": str(decided.lowest)},
                )
            await self._put(decided)

    async def _put(self, decided: Admissions) -> None:
        """Set the admissions, on disk first."""
        require_uninterrupted()
        if self._file is not None and decided != self.admissions:
            await asyncio.to_thread(self._file.save, decided)
        self.admissions = decided

    def _find(self, work: monitor_api.AdmitWorkRequest) -> GpuProcess:
        namespace = work.pid_namespace if work.HasField("pid_namespace") else None
        own = self._processes.in_namespace(work.pid, namespace)
        found = None if own is None else self._processes.find(own)
        if found is None:
            raise NotFoundError(f"this host has no process {work.pid}", reason="PROCESS_GONE")
        return found

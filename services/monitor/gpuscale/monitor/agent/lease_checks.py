"""Asks the allocator whether a lease holds GPUs of this node, before work is admitted for it."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import (
    FailedPreconditionError,
    GpuscaleError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
    UnimplementedError,
)
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Principal, Role

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1.allocator_service_pb2_grpc import AllocatorServiceAsyncStub

TIMEOUT: Final = 2.0
"""Seconds for the allocator's answer: an adapter waits three for ours."""
_REASONS_OF_LEASES: Final = frozenset(
    {
        "RESERVATION_NOT_FOUND",
        "RESERVATION_ENDED",
        "FENCE_MISMATCH",
        "GPU_NOT_HELD",
        "LEASE_TOKEN_INVALID",
    }
)
"""What is wrong with the lease, and not with our question."""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """What somebody says it holds: `reservations/{reservation}`, its fence and GPUs, and the token that proves it."""

    reservation: str
    fence: int
    gpu_uuids: tuple[str, ...]
    token: str = field(default="", repr=False)


class LeaseChecks:
    """Checks leases.

    Args:
        allocator: leads to it; None where the agent is not told where it is.
        node: id of this node.
    """

    def __init__(self, allocator: grpc.aio.Channel | None, node: str) -> None:
        self._stub = None if allocator is None else allocator_api.AllocatorServiceStub(allocator)
        self._node = node

    async def check(self, lease: HeldLease, caller: Principal) -> dict[str, int]:
        """See to it that a lease holds its GPUs on this node, and that the caller may speak for its holder.

        Returns:
            The lowest fence that holds each of the GPUs; of an older allocator, nothing.

        Raises:
            PermissionDeniedError: LEASE_TOKEN_MISSING, or LEASE_TOKEN_INVALID.
            NotFoundError: RESERVATION_NOT_FOUND.
            FailedPreconditionError: it has ended, or does not hold the GPUs; LEASE_NOT_CHECKED, nobody can be asked.
            UnavailableError: LEASE_NOT_CHECKED, nobody answers now.
        """
        if not lease.token and caller.role < Role.ADMIN:
            raise PermissionDeniedError(
                f"lease_token is empty: only an admin may admit work for {lease.reservation} without the token that came"
                " with its grant",
                reason="LEASE_TOKEN_MISSING",
            )
        if self._stub is None:
            raise _unchecked(
                FailedPreconditionError, "set allocator_address in the settings of this node's agent"
            )
        request = allocator_api.CheckLeaseRequest(
            name=lease.reservation,
            fence=lease.fence,
            node=self._node,
            gpu_uuids=lease.gpu_uuids,
            lease_token=lease.token,
        )
        try:
            with rpc_errors():
                answer = await self._ask(self._stub, request)
        except (FailedPreconditionError, NotFoundError, PermissionDeniedError) as error:
            if error.reason in _REASONS_OF_LEASES:
                raise
            raise _unchecked(
                FailedPreconditionError, f"the allocator refuses to say: {error.message}"
            ) from error
        except UnimplementedError as error:
            raise _unchecked(
                FailedPreconditionError,
                "no allocator is there where it was asked; set allocator_address in the settings of this node's agent",
            ) from error
        except GpuscaleError as error:
            raise _unchecked(UnavailableError, f"the allocator does not answer: {error.message}") from error
        return dict(zip(lease.gpu_uuids, answer.lowest_fences, strict=False))

    @staticmethod
    async def _ask(
        stub: "AllocatorServiceAsyncStub", request: allocator_api.CheckLeaseRequest
    ) -> allocator_api.CheckLeaseResponse:
        """Ask; once more where the connection was lost, as one is that a restart or a cut link left behind unnoticed."""
        end = asyncio.get_running_loop().time() + TIMEOUT
        try:
            return await stub.CheckLease(request, timeout=TIMEOUT)
        except grpc.aio.AioRpcError as error:
            left = end - asyncio.get_running_loop().time()
            if error.code() != grpc.StatusCode.UNAVAILABLE or left <= 0:
                raise
            return await stub.CheckLease(request, timeout=left)


def _unchecked(kind: type[GpuscaleError], why: str) -> GpuscaleError:
    return kind(f"the lease cannot be checked: {why}", reason="LEASE_NOT_CHECKED")

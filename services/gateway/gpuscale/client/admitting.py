"""Has this host's agent admit work before it touches a GPU, so that its processes are known as the holder's.

The agent is the one that GPUSCALE_WORK_ADDRESS names; or else who serves at the client's own address, where that is on this
host (`gpuscalectl up`), and then whoever listens where an agent does by default. What listens there may be anybody's, so it is
sent neither the caller's token nor the lease token: an agent without tokens of its own trusts its host.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.rpc.channel import is_local, open_sync_channel
from gpuscale.common.rpc.status import rpc_errors

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1 import WorkServiceStub
    from gpuscale.api.monitor.v1.work_service_pb2_grpc import WorkServiceAsyncStub

AGENT_VARIABLE: Final = "GPUSCALE_WORK_ADDRESS"
"""Names the address of this host's agent, which admits work."""
DEFAULT_AGENT: Final = "127.0.0.1:7071"
TIMEOUT: Final = 3.0
"""Seconds for the answer of an agent."""
_OVER: Final = frozenset({"FENCE_TOO_LOW", "RESERVATION_ENDED"})


def admission(
    reservation: allocator_api.Reservation, lease_token: str, node: str | None
) -> monitor_api.AdmitWorkRequest | None:
    """What this process asks the agent of `node` for; None where the reservation has nothing there."""
    uuids = [gpu.uuid for gpu in reservation.gpus if gpu.node == node]
    if not uuids:
        return None
    return monitor_api.AdmitWorkRequest(
        gpu_uuids=uuids,
        fence=reservation.fence,
        reservation=reservation.name,
        lease_token=lease_token,
        pid=os.getpid(),
        pid_namespace=pid_namespace(),
    )


def pid_namespace() -> int | None:
    """The number of this process's PID namespace; None where the system has none."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return None


def admit(request: monitor_api.AdmitWorkRequest, own: "WorkServiceStub | None", address: str) -> str:
    """Have work admitted; why no agent did, or nothing.

    Args:
        request: what `admission` made.
        own: the service at the client's own address.
        address: that address.

    Raises:
        FailedPreconditionError: the reservation is over.
    """
    why = "no agent answers on this host"
    for stub, asked in _agents(request, own, address):
        try:
            with rpc_errors():
                stub.AdmitWork(asked, timeout=TIMEOUT)
        except FailedPreconditionError as error:
            if error.reason in _OVER:
                raise
            why = error.message
        except GpuscaleError as error:
            why = why if error.reason in {"UNAVAILABLE", "UNIMPLEMENTED"} else error.message
        else:
            return ""
    return why


async def admit_async(
    request: monitor_api.AdmitWorkRequest, own: "WorkServiceAsyncStub", address: str
) -> str:
    """`admit`, for the running event loop; other agents than at the client's own address are asked in a thread.

    Raises:
        FailedPreconditionError: the reservation is over.
    """
    if is_local(address) and not os.environ.get(AGENT_VARIABLE):
        try:
            await own.AdmitWork(request, timeout=TIMEOUT)
        except GpuscaleError as error:
            if error.reason in _OVER:
                raise
        else:
            return ""
    return await asyncio.to_thread(admit, request, None, address)


def _agents(
    request: monitor_api.AdmitWorkRequest, own: "WorkServiceStub | None", address: str
) -> "Iterator[tuple[WorkServiceStub, monitor_api.AdmitWorkRequest]]":
    named = os.environ.get(AGENT_VARIABLE)
    if named:
        from gpuscale.client.connection import connect

        with connect(named) as client:
            yield client.work, request
        return
    if own is not None and is_local(address):
        yield own, request
    if address != DEFAULT_AGENT:
        bare = monitor_api.AdmitWorkRequest()
        bare.CopyFrom(request)
        bare.ClearField("lease_token")
        with open_sync_channel(DEFAULT_AGENT) as channel:
            yield monitor_api.WorkServiceStub(channel), bare

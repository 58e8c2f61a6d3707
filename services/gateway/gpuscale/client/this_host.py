"""This host: which node of the fleet it is, since work must start where its GPUs are, and its agent, which admits the work.

The node is, in this order: what the caller says, what GPUSCALE_NODE says, else the one node whose agent runs on this kernel
(the same boot id) and, where there are several, in this network namespace. Nodes that cannot be told apart are refused, never
guessed: the wrong one would start work beside GPUs that are not its own.

Work is admitted before it touches a GPU, so that its processes are known as the holder's. The agent is the one that
GPUSCALE_WORK_ADDRESS names; or else who serves at the client's own address, where that is on this host (`gpuscalectl up`), then
who listens on the agent's socket, and last whoever listens where an agent does by default. What listens there may be anybody's, so
it is sent neither the caller's token nor the lease token: an agent without tokens of its own trusts its host. An agent that
refuses because the lease does not hold the GPUs is believed: the work does not start.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Iterator
from typing import Final

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, InvalidArgumentError
from gpuscale.common.names import is_id, node_name, node_of
from gpuscale.common.rpc.channel import AGENT_SOCKET, is_local, open_sync_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import network_namespace, pid_namespace, read_boot_id

NODE_VARIABLE = "GPUSCALE_NODE"
"""Names the node that this host is, where that cannot be found out."""

_log = logging.getLogger(__name__)
_NO_ROOM = frozenset({"NO_CAPACITY", "NODE_NOT_ONLINE", "NOT_FOUND", "UNSATISFIABLE", "WAIT_TIMEOUT"})
"""Reasons of refusals that another host might not have given."""


class ThisHost:
    """This host, and the node that it is.

    Attributes:
        node: id of the node; None until it is said or found.
        asked: whether the fleet was asked.
    """

    def __init__(self, node: str | None = None) -> None:
        """`node`: id or name of the node; what GPUSCALE_NODE says when absent.

        Raises:
            InvalidArgumentError: it is neither.
        """
        given = node or os.environ.get(NODE_VARIABLE, "")
        self.node = given.removeprefix("nodes/") or None
        self._said = self.node
        self.asked: bool = False
        self._unadmitted = False
        if self.node is not None and not is_id(self.node):
            source = "node" if node else NODE_VARIABLE
            raise InvalidArgumentError(f"{source}: {given!r} is not the id of a node", field=source)
        try:
            self._boot_id = read_boot_id()
        except OSError:  # no Linux, so no agent
            self._boot_id = ""

    def say_unadmitted(self, why: str) -> None:
        """Say once that no agent knows what runs here as the holder's; nothing where `why` is empty."""
        if why and not self._unadmitted:
            self._unadmitted = True
            _log.warning("the agent does not count this process as the holder of its GPUs: %s", why)

    def request(self) -> monitor_api.ListNodesRequest | None:
        """What to ask the fleet; None where this host cannot be a node of it."""
        return monitor_api.ListNodesRequest(boot_id=self._boot_id) if self._boot_id else None

    def find(self, nodes: Iterable[monitor_api.Node]) -> str | None:
        """The node among these that this host is; None where it is none of them.

        Raises:
            FailedPreconditionError: several run on this kernel, and nothing tells which is this host (NODE_AMBIGUOUS);
                or this host was said to be a node that runs elsewhere (NODE_MISMATCH).
        """
        self.asked = True
        # Looked at again, since a fleet of an earlier version answers with all of its nodes.
        on_kernel = {
            one.name.removeprefix("nodes/"): one.snapshot.host.network_namespace
            for one in nodes
            if one.snapshot.host.boot_id == self._boot_id
        }
        own = network_namespace()
        near = [node for node, namespace in on_kernel.items() if own and namespace == own]
        if self._said is not None:
            there = near or list(on_kernel)
            if there and self._said not in there:
                raise FailedPreconditionError(
                    f"this host is configured as {self._said}, but its agent reports {' or '.join(there)}:"
                    f" correct {NODE_VARIABLE}, or unset it",
                    reason="NODE_MISMATCH",
                )
            return self._said
        found = near if len(on_kernel) > 1 else list(on_kernel)
        if len(found) != 1 and on_kernel:
            raise FailedPreconditionError(
                f"this host may be any of {', '.join(on_kernel)}, whose agents share its kernel:"
                f" say which it is, such as {NODE_VARIABLE}={next(iter(on_kernel))}",
                reason="NODE_AMBIGUOUS",
                metadata={"nodes": ",".join(on_kernel)},
            )
        self.node = found[0] if found else None
        return self.node


def confine(ask: allocator_api.Ask, node: str) -> None:
    """Keep an ask to one node."""
    ask.nodes[:] = [node_name(node)]


def only_here(error: GpuscaleError, node: str | None, remedy: str) -> GpuscaleError:
    """The refusal of an ask that was kept to this host, if it was: one that another might not have given says so."""
    if node and error.reason in _NO_ROOM:
        error.message = f"{error.message.removesuffix('.')}; only this host, {node}, was asked: {remedy}"
        error.args = (error.message,)
    return error


def expect_here(reservation: allocator_api.Reservation, here: str | None, remedy: str) -> None:
    """Go on where all GPUs of a reservation are on this host.

    Raises:
        FailedPreconditionError: some are on another (GPUS_ELSEWHERE).
    """
    elsewhere = sorted({node_of(gpu) for gpu in reservation.gpus} - {here})
    if not elsewhere:
        return
    where = " and ".join(elsewhere)
    this = f"this host is {here}" if here else "no agent of the fleet runs on this host"
    raise FailedPreconditionError(
        f"{reservation.name} holds GPUs of {where}, and {this}: {remedy.format(node=elsewhere[0])}",
        reason="GPUS_ELSEWHERE",
        metadata={"name": reservation.name, "nodes": ",".join(elsewhere)},
    )


AGENT_VARIABLE: Final = "GPUSCALE_WORK_ADDRESS"
"""Names the address of this host's agent, which admits work."""
DEFAULT_AGENT: Final = "127.0.0.1:7071"
TIMEOUT: Final = 3.0
"""Seconds for the answer of an agent."""
_REFUSED: Final = frozenset(
    {"FENCE_TOO_LOW", "RESERVATION_ENDED", "FENCE_MISMATCH", "GPU_NOT_HELD", "LEASE_TOKEN_INVALID"}
)
"""Reasons for which work must not start: the lease is over, or does not hold the GPUs."""


def admission(
    reservation: allocator_api.Reservation, lease_token: str, node: str | None
) -> monitor_api.AdmitWorkRequest | None:
    """What this process asks the agent of `node` for; None where the reservation has nothing there."""
    uuids = [gpu.uuid for gpu in reservation.gpus if node_of(gpu) == node]
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


def admit(
    request: monitor_api.AdmitWorkRequest, own: monitor_api.WorkServiceStub | None, address: str
) -> str:
    """Have work admitted; why no agent did, or nothing.

    Args:
        request: what `admission` made.
        own: the service at the client's own address.
        address: that address.

    Raises:
        FailedPreconditionError, PermissionDeniedError: the lease does not hold the GPUs.
    """
    why = "no agent answers on this host"
    for stub, asked in _agents(request, own, address):
        try:
            with rpc_errors():
                stub.AdmitWork(asked, timeout=TIMEOUT)
        except GpuscaleError as error:
            if error.reason in _REFUSED:
                raise
            why = why if error.reason in {"UNAVAILABLE", "UNIMPLEMENTED"} else error.message
        else:
            return ""
    return why


async def admit_async(
    request: monitor_api.AdmitWorkRequest, own: monitor_api.WorkServiceAsyncStub, address: str
) -> str:
    """`admit`, for the running event loop; other agents than at the client's own address are asked in a thread.

    Raises:
        FailedPreconditionError, PermissionDeniedError: the lease does not hold the GPUs.
    """
    if is_local(address) and not os.environ.get(AGENT_VARIABLE):
        try:
            await own.AdmitWork(request, timeout=TIMEOUT)
        except GpuscaleError as error:
            if error.reason in _REFUSED:
                raise
        else:
            return ""
    return await asyncio.to_thread(admit, request, None, address)


def _agents(
    request: monitor_api.AdmitWorkRequest, own: monitor_api.WorkServiceStub | None, address: str
) -> Iterator[tuple[monitor_api.WorkServiceStub, monitor_api.AdmitWorkRequest]]:
    named = os.environ.get(AGENT_VARIABLE)
    if named:
        from gpuscale.client.connection import connect

        with connect(named) as client:
            yield client.work, request
        return
    if own is not None and is_local(address):
        yield own, request
    if os.access(AGENT_SOCKET, os.W_OK):
        with open_sync_channel(f"unix:{AGENT_SOCKET}") as channel:
            yield monitor_api.WorkServiceStub(channel), request
    if address != DEFAULT_AGENT:
        bare = monitor_api.AdmitWorkRequest()
        bare.CopyFrom(request)
        bare.ClearField("lease_token")
        with open_sync_channel(DEFAULT_AGENT) as channel:
            yield monitor_api.WorkServiceStub(channel), bare

"""This host: which node of the fleet it is, and its agent, which admits work.

The node is the one the caller names, or GPUSCALE_NODE, or the one whose agent runs on this kernel (same boot id) and, if there are
several, in this network namespace. If nodes cannot be told apart, that is an error: a wrong guess would start work on another
holder's GPUs.

Work is admitted before it touches a GPU, so that its processes count as the holder's. The agent is tried at GPUSCALE_WORK_ADDRESS;
else at the client's own address if that is on this host (`gpuscalectl up`), at the agent's socket, and at the agent's default
address. Anyone may listen at the last, so it gets neither the caller's token nor the lease token: an agent without tokens
trusts its host. If an agent answers that the lease does not hold the GPUs, the work does not start.
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
from gpuscale.common.names import LEASE_KEY, is_id, node_name, node_of
from gpuscale.common.rpc.channel import AGENT_SOCKET, is_local, open_sync_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import network_namespace, pid_namespace, read_boot_id

NODE_VARIABLE = "GPUSCALE_NODE"
"""Names this host's node, if it cannot be found out."""

_log = logging.getLogger(__name__)
_NO_ROOM = frozenset({"NO_CAPACITY", "NODE_NOT_ONLINE", "NOT_FOUND", "UNSATISFIABLE", "WAIT_TIMEOUT"})
"""Reasons of refusals that might not apply on another host."""


class ThisHost:
    """This host and its node, None until known; `asked` says whether the fleet was queried."""

    def __init__(self, node: str | None = None) -> None:
        """`node`: id or name of the node; GPUSCALE_NODE by default. Raises InvalidArgumentError: it is not a valid id or name."""
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
        except OSError:  # not Linux, so no agent
            self._boot_id = ""

    def say_unadmitted(self, why: str) -> None:
        """Warn once that no agent attributes this process to the holder; does nothing if `why` is empty."""
        if why and not self._unadmitted:
            self._unadmitted = True
            _log.warning("the agent does not count this process as the holder of its GPUs: %s", why)

    def request(self) -> monitor_api.ListNodesRequest | None:
        """The request to the fleet; None if this host cannot be one of its nodes."""
        return monitor_api.ListNodesRequest(boot_id=self._boot_id) if self._boot_id else None

    def find(self, nodes: Iterable[monitor_api.Node]) -> str | None:
        """This host's node among these; None if it is not one of them.

        Raises:
            FailedPreconditionError: several run on this kernel and cannot be told apart (NODE_AMBIGUOUS), or the
                configured node runs elsewhere (NODE_MISMATCH).
        """
        self.asked = True
        # Filter again, since fleets of earlier versions return all nodes.
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
    """Limit an ask to one node."""
    ask.nodes[:] = [node_name(node)]


def only_here(error: GpuscaleError, node: str | None, remedy: str) -> GpuscaleError:
    """The error of a refused ask, with a fresh traceback; says so if only this host was asked and another might have room."""
    if node and error.reason in _NO_ROOM and error.metadata.get("last_reason") != "QUOTA_EXCEEDED":
        error.message = f"{error.message.removesuffix('.')}; only this host, {node}, was asked: {remedy}"
        error.args = (error.message,)
    return error.with_traceback(None)


AGENT_VARIABLE: Final = "GPUSCALE_WORK_ADDRESS"
"""The address of this host's agent, which admits work."""
DEFAULT_AGENT: Final = "127.0.0.1:7071"
TIMEOUT: Final = 3.0
"""Seconds for an agent to answer."""
_REFUSED: Final = frozenset(
    {"FENCE_TOO_LOW", "RESERVATION_ENDED", "FENCE_MISMATCH", "GPU_NOT_HELD", "LEASE_TOKEN_INVALID"}
)
"""Reasons not to start work: the lease is over, or does not hold the GPUs."""


def admission(
    reservation: allocator_api.Reservation, lease_token: str, node: str | None
) -> monitor_api.AdmitWorkRequest | None:
    """The request of this process to the agent of `node`; None if the reservation has no GPUs there."""
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
    """Have work admitted by `own`, the service at the client's address, or an agent; returns why none did, or an empty string.

    Raises FailedPreconditionError, PermissionDeniedError: the lease does not hold the GPUs.
    """
    why = "no agent answers on this host"
    for stub, asked in _agents(request, own, address):
        # The lease token does for a caller without credentials, as a supervisor is.
        for metadata in ((), ((LEASE_KEY, asked.lease_token),)):
            try:
                with rpc_errors():
                    stub.AdmitWork(asked, timeout=TIMEOUT, metadata=metadata)
            except GpuscaleError as error:
                if error.reason in _REFUSED:
                    raise
                why = why if error.reason in {"UNAVAILABLE", "UNIMPLEMENTED"} else error.message
                if error.reason != "TOKEN_MISSING" or not asked.lease_token:
                    break
            else:
                return ""
    return why


async def admit_async(
    request: monitor_api.AdmitWorkRequest, own: monitor_api.WorkServiceAsyncStub, address: str
) -> str:
    """`admit` for async code, with the same errors; agents other than at the client's address are called in a thread."""
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

"""The last check before a worker is started: the node's agent admits the fence of its reservation, or refuses it.

A lease may end between the grant and the start (if the adapter was suspended or disconnected), and somebody else may hold the
GPUs by then. The agent remembers the highest fence of each GPU and refuses a lower one.
"""

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.autoscaler.adapters.engine import ReplicaOrder
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger

TIMEOUT = 3.0
"""Seconds to wait for the agent's answer."""

_log = get_logger(__name__)


class Admission:
    """Asks the agent of this node. Without an answer, nothing starts if `required`."""

    def __init__(self, agent: grpc.aio.Channel | None, *, required: bool) -> None:
        self._stub = None if agent is None else monitor_api.WorkServiceStub(agent)
        self._required = required
        self._warned = False

    async def refusal(
        self, order: ReplicaOrder, pid: int | None = None, pid_namespace: int | None = None
    ) -> str:
        """Why a replica must not use its GPUs; empty if it may, or needs none.

        With the `pid` of its running process (in `pid_namespace`, or the agent's own), the agent lists it under its lease.
        """
        if not order.gpu_uuids:
            return ""
        if self._stub is None:
            if not self._warned:
                self._warned = True
                _log.warning("no agent admits work on this node: set agent_address", replica=order.replica)
            return ""
        request = monitor_api.AdmitWorkRequest(
            gpu_uuids=order.gpu_uuids,
            fence=order.fence,
            reservation=order.reservation,
            lease_token=order.lease_token,
            pid=pid,
            pid_namespace=pid_namespace,
        )
        try:
            with rpc_errors():
                await self._stub.AdmitWork(request, timeout=TIMEOUT)
        except GpuscaleError as error:
            if error.reason == "PROCESS_GONE":
                return ""  # it has ended meanwhile, which others notice
            # The agent knows that the lease does not hold the GPUs, or is another's.
            unheld = isinstance(error, FailedPreconditionError | NotFoundError)
            if error.reason == "LEASE_TOKEN_INVALID" or (unheld and error.reason != "LEASE_NOT_CHECKED"):
                return f"the node's agent refuses: {error.message}"
            if self._required and pid is None:
                return f"the node's agent must admit it, but did not: {error.message}"
            _log.warning(
                "the agent refused work",
                reservation=order.reservation,
                reason=error.reason,
                why=error.message,
            )
        return ""

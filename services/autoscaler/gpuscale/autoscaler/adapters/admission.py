"""The last check before a worker is started: the node's agent admits the fence of its reservation, or refuses it.

A lease may end between the grant and the start (the adapter slept, or lost its connection), and the GPUs be somebody
else's by then. The agent remembers the highest fence of each GPU and refuses a lower one.
"""

from collections.abc import Sequence

import grpc

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError, NotFoundError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.rpc.status import rpc_errors

TIMEOUT = 3.0
"""Seconds for the agent's answer; a start waits for no longer."""

_log = get_logger(__name__)


class Admission:
    """Asks the agent of this node.

    Args:
        agent: leads to it; None where the adapter is not told where it is.
        required: whether nothing is started while it does not answer.
    """

    def __init__(self, agent: grpc.aio.Channel | None, *, required: bool) -> None:
        self._stub = None if agent is None else monitor_api.WorkServiceStub(agent)
        self._required = required

    async def refusal(self, gpu_uuids: Sequence[str], fence: int, pid: int | None = None) -> str:
        """Why work must not run on these GPUs under this fence; empty where it may, or where it needs none.

        Args:
            gpu_uuids: the GPUs.
            fence: of the reservation that holds them.
            pid: the process that works, once it runs: the agent then shows it with the fence.
        """
        if not gpu_uuids:
            return ""
        if self._stub is None:
            return "the node's agent must admit it, and agent_address is not set" if self._required else ""
        request = monitor_api.AdmitWorkRequest(gpu_uuids=gpu_uuids, fence=fence, pid=pid)
        try:
            with rpc_errors():
                await self._stub.AdmitWork(request, timeout=TIMEOUT)
        except (FailedPreconditionError, NotFoundError) as error:
            # The worker may have ended by itself meanwhile, which others notice; no GPU and an old fence are final.
            return "" if error.reason == "PROCESS_NOT_FOUND" else f"the node's agent refuses: {error.message}"
        except GpuscaleError as error:
            if self._required and pid is None:
                return f"the node's agent does not answer, and must admit it: {error.message}"
            _log.warning("the agent did not admit work", fence=fence, reason=error.reason, why=error.message)
        return ""

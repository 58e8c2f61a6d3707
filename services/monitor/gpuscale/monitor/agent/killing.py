"""Ends outsiders that use policies order to end, by gpuscale-killer: only where that runs, and once more checked here.

While its socket is there, orders are asked for each 5 s, and what became of them is told at once, with the next call. Nothing is
admitted between the check and the order to the helper.
"""

import asyncio
from pathlib import Path
from typing import Final

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.wire import seconds
from gpuscale.monitor.agent.collector import Sampler
from gpuscale.monitor.agent.work import Work
from gpuscale.monitor.helper import ask_helper
from gpuscale.monitor.model.admission import Admissions
from gpuscale.monitor.model.readings import ProcessKey, Snapshot

LOOK: Final = 5.0
"""Seconds between two looks whether there are orders, and the helper."""
PATIENCE: Final = 1.0
"""Seconds for the helper's answer."""
_log = get_logger(__name__)


class Killing:
    """Takes orders for a node, and has the helper at `place` carry them out."""

    def __init__(
        self, allocator: grpc.aio.Channel, place: Path, node: str, sampler: Sampler, work: Work
    ) -> None:
        self._stub = allocator_api.PolicyServiceStub(allocator)
        self._place = place
        self._node = node
        self._sampler = sampler
        self._work = work

    async def run(self) -> None:
        """Take orders until cancelled."""
        request, failing = self._request(), False
        while True:
            if not request.results:
                await asyncio.sleep(LOOK)
            if not await asyncio.to_thread(self._place.is_socket):
                request = self._request()
                continue
            try:
                with rpc_errors():
                    answer = await self._stub.TakeKillOrders(request, timeout=RPC_TIMEOUT)
            except GpuscaleError as error:
                if not failing:
                    _log.warning("cannot take orders to end outsiders", error=error.message)
                request, failing = self._request(), True
                continue
            request, failing = self._request(), False
            for order in answer.orders:
                problem = await self._carry_out(order)
                if problem is not None:
                    request.results.add(order=order.id, problem=problem)
                _log.warning(
                    "ordered to end an outsider",
                    gpu=order.gpu,
                    pid=order.pid,
                    problem="gpuscale-killer has not said what became of it"
                    if problem is None
                    else problem or None,
                )

    def _request(self) -> allocator_api.TakeKillOrdersRequest:
        return allocator_api.TakeKillOrdersRequest(node=node_name(self._node))

    async def _carry_out(self, order: allocator_api.KillOrder) -> str | None:
        """Why a process is not ended, empty if it is; None where that is not known."""
        async with self._work.at_rest() as admissions:
            snapshot = await self._sampler.get(max_age=0.0)
            process = ProcessKey(order.pid, order.start_ticks)
            return refusal(snapshot, admissions, order.gpu, process) or await self._ask(
                process, seconds(order.grace), admissions
            )

    async def _ask(self, process: ProcessKey, grace: float, admissions: Admissions) -> str | None:
        admitted = [(one.process.pid, one.process.started) for one in admissions.workers]
        order = {"pid": process.pid, "started": process.started, "grace": grace, "admitted": admitted}
        try:
            answer = await ask_helper(self._place, order, PATIENCE)
        except OSError as error:
            return f"gpuscale-killer does not answer: {error.strerror}"
        return None if answer is None else str(answer.get("problem", ""))


def refusal(snapshot: Snapshot, admissions: Admissions, gpu: str, process: ProcessKey) -> str:
    """Why a process is no outsider on a GPU by what is seen and was admitted; empty if it is one."""
    found = [
        (gpu_name(snapshot.node, view.identity.uuid), one)
        for view in snapshot.gpus
        for one in view.reading.processes or ()
        if one.lineage[:1] == (process,)
    ]
    if all(name != gpu for name, _ in found):
        return "it does not use the GPU any more"
    for name, one in found:
        if one.reservation or one.holder_unknown:
            return (
                f"it works for {one.reservation} on {name}"
                if one.reservation
                else "it is not known whose it is"
            )
    for _, one in found:
        if own := next((worker for worker in admissions.workers if worker.process in one.lineage), None):
            return f"it descends from process {own.process.pid}, which was admitted for {own.reservation}"
    return ""

"""Passes the allocator's orders to kill processes without a reservation to gpuscale-killer, after checking them here too.

While the helper's socket exists, the agent polls for orders and reports results with the next poll. No work is admitted between
the check and the order to the helper.
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
"""Seconds between polls."""
PATIENCE: Final = 1.0
"""Timeout of the helper's answer, in seconds."""
_log = get_logger(__name__)


class Killing:
    """Carries out kill orders for a node through the helper at `place`."""

    def __init__(
        self, allocator: grpc.aio.Channel, place: Path, node: str, sampler: Sampler, work: Work
    ) -> None:
        self._stub = allocator_api.PolicyServiceStub(allocator)
        self._place = place
        self._node = node
        self._sampler = sampler
        self._work = work

    async def run(self) -> None:
        """Carry out orders until cancelled."""
        results: list[allocator_api.KillResult] = []
        failing = False
        while True:
            if not results:
                await asyncio.sleep(LOOK)
            sent, results = results, []
            if not await asyncio.to_thread(self._place.is_socket):
                continue
            request = allocator_api.TakeKillOrdersRequest(node=node_name(self._node), results=sent)
            try:
                with rpc_errors():
                    answer = await self._stub.TakeKillOrders(request, timeout=RPC_TIMEOUT)
            except GpuscaleError as error:
                if not failing:
                    _log.warning("cannot poll kill orders", error=error.message)
                failing = True
                continue
            failing = False
            for order in answer.orders:
                problem = await self._carry_out(order)
                if problem is not None:
                    results.append(allocator_api.KillResult(order=order.id, problem=problem))
                shown = "gpuscale-killer has not answered" if problem is None else problem or None
                _log.warning("ordered to kill a process", gpu=order.gpu, pid=order.pid, problem=shown)

    async def _carry_out(self, order: allocator_api.KillOrder) -> str | None:
        """Why the process is not killed, empty if it is; None if the helper did not say."""
        async with self._work.at_rest() as admissions:
            snapshot = await self._sampler.get(max_age=0.0)
            if problem := refusal(snapshot, admissions, order.gpu, ProcessKey(order.pid, order.start_ticks)):
                return problem
            wish = {
                "pid": order.pid,
                "started": order.start_ticks,
                "grace": seconds(order.grace),
                "admitted": [(one.process.pid, one.process.started) for one in admissions.workers],
            }
            try:
                answer = await ask_helper(self._place, wish, PATIENCE)
            except OSError as error:
                return f"gpuscale-killer does not answer: {error.strerror}"
            return None if answer is None else str(answer.get("problem", ""))


def refusal(snapshot: Snapshot, admissions: Admissions, gpu: str, process: ProcessKey) -> str:
    """Why a process may not be killed, by a snapshot and what was admitted; empty if it may."""
    found = [
        (gpu_name(snapshot.node, view.identity.uuid), one)
        for view in snapshot.gpus
        for one in view.reading.processes or ()
        if one.lineage[:1] == (process,)
    ]
    if all(name != gpu for name, _ in found):
        return "it no longer uses the GPU"
    for name, one in found:
        if one.reservation:
            return f"it belongs to {one.reservation} on {name}"
        if one.holder_unknown:
            return "its reservation is unknown"
    for _, one in found:
        if own := next((worker for worker in admissions.workers if worker.process in one.lineage), None):
            return f"it descends from process {own.process.pid}, which was admitted for {own.reservation}"
    return ""

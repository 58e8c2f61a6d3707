"""Passes orders of the allocator to gpuscale-power and gpuscale-killer, while the sockets of these helpers exist.

gpuscale-power gets power caps and MIG partitions. The agent reports power draw and polls for caps, every second while there are
any. While the allocator does not answer, the last caps stay in force: a budget protects a fuse. Each order is also a heartbeat.

gpuscale-killer gets orders to kill processes without a reservation, which are checked here too. Results go with the next poll. No
work is admitted between the check and the order to the helper.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.names import gpu_name, node_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale.common.wire import seconds
from gpuscale.monitor.agent.collector import Sampler
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.agent.work import Work
from gpuscale.monitor.helper import PATIENCE, ask_helper
from gpuscale.monitor.model.admission import Admissions
from gpuscale.monitor.model.readings import ProcessKey, Snapshot

LOOK, QUICK = 5.0, 1.0
"""Seconds between polls, and between those with caps."""
PARTITION = 60.0
"""Timeout of partitioning, in seconds."""
KILL_PATIENCE = 1.0
"""Timeout of an order to kill, in seconds: no work is admitted meanwhile."""
_NO_ANSWER: Final = "gpuscale-power does not answer"
_log = get_logger(__name__)


class Capping:
    """Applies the allocator's power caps and partitions for a node through the helper at `place`."""

    def __init__(
        self, allocator: grpc.aio.Channel, place: Path, node: str, sampler: Sampler, gpus: Gpus
    ) -> None:
        self._stub = allocator_api.PowerServiceStub(allocator)
        self._place = place
        self._node = node
        self._sampler = sampler
        self._gpus = gpus
        self._caps: dict[str, float] | None = None  # the last order; None until known
        self._begun: set[str] = set()  # ids of partition orders that were passed to the helper
        self._state: dict[str, Any] = {}
        # Original limits by UUID: after a cap is lifted, readings still show it for a while.
        self._found: dict[str, float] = {}

    async def run(self) -> None:
        """Keep caps in force until cancelled."""
        polling = Attempts(_log, "cannot poll power caps: they stay in force", GpuscaleError)
        while True:
            await asyncio.sleep(QUICK if self._caps else LOOK)
            there = await asyncio.to_thread(self._place.is_socket)
            if not there:
                self._state = {}
                if self._caps is None:
                    continue
            elif self._caps is None:
                await self._put()  # asks for the caps in force
            answer: allocator_api.TakePowerCapsResponse | None = None
            with polling, rpc_errors():
                answer = await self._stub.TakePowerCaps(await self._request(), timeout=RPC_TIMEOUT)
            if answer is not None:
                self._caps = {cap.uuid: cap.watts for cap in answer.caps} if there else None
                orders = {
                    one.order: {"uuid": one.uuid, "profiles": [*one.profiles]} for one in answer.partitions
                }
                self._begun &= orders.keys()
                ends = self._state.get("partitions")
                if ends is not None and orders.keys() - self._begun - ends.keys():
                    await self._partition(orders)
            if there:
                await self._put()

    async def _partition(self, orders: Mapping[str, object]) -> None:
        """Have the helper partition GPUs, with the driver released: it destroys no instance that is in use."""
        try:
            await self._gpus.release(PARTITION, "GPUs are being partitioned")
        except FailedPreconditionError as error:
            _log.warning("cannot partition GPUs yet", error=error.message)
            return
        self._begun |= orders.keys()
        try:
            async with asyncio.timeout(PARTITION):
                while not orders.keys() <= (self._state.get("partitions") or {}).keys():
                    await self._put(orders)
                    await asyncio.sleep(QUICK)
        except TimeoutError:
            _log.warning("gpuscale-power does not finish partitioning", orders=[*orders])
        finally:
            self._gpus.resume()

    async def _put(self, orders: Mapping[str, object] | None = None) -> None:
        try:
            answer = await ask_helper(self._place, {"caps": self._caps, "partitions": orders}, PATIENCE)
        except OSError:
            answer = None
        self._state = {"problem": _NO_ANSWER} if answer is None else answer
        self._found |= self._state.get("found", {})
        if self._caps is None:
            self._caps = self._state.get("caps")

    async def _request(self) -> allocator_api.TakePowerCapsRequest:
        ends: Mapping[str, Any] | None = self._state.get("partitions")
        request = allocator_api.TakePowerCapsRequest(
            node=node_name(self._node),
            partitions_gpus=ends is not None,
            partition_ends=[
                allocator_api.PartitionEnd(
                    order=order,
                    problem=end["problem"],
                    instances=end["instances"],
                    unsettled=end["instances"] is None,
                )
                for order, end in (ends or {}).items()
            ],
        )
        snapshot = await self._sampler.get(max_age=QUICK)
        caps, problems = (self._state.get(key, {}) for key in ("caps", "problems"))
        otherwise = "" if "caps" in self._state else self._state.get("problem", _NO_ANSWER)
        for view in snapshot.gpus:
            uuid, reading = view.identity.uuid, view.reading
            if not view.identity.parent_uuid:
                fresh = view.read_at is not None and snapshot.taken_at - view.read_at <= 3 * snapshot.period
                limits = (reading.power_limit_watts, self._found.get(uuid))
                request.gpus.add(
                    uuid=uuid,
                    watts=reading.power_watts if fresh else None,
                    lowest_watts=reading.power_limit_min_watts,
                    limit_watts=max((limit for limit in limits if limit is not None), default=None),
                    cap_watts=caps.get(uuid),
                    sm_activity_percent=reading.sm_activity_percent,
                    problem=problems.get(uuid, otherwise),
                )
        return request


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
        polling = Attempts(_log, "cannot poll kill orders", GpuscaleError)
        while True:
            if not results:
                await asyncio.sleep(LOOK)
            sent, results = results, []
            if not await asyncio.to_thread(self._place.is_socket):
                continue
            request = allocator_api.TakeKillOrdersRequest(node=node_name(self._node), results=sent)
            orders: Sequence[allocator_api.KillOrder] = ()
            with polling, rpc_errors():
                orders = (await self._stub.TakeKillOrders(request, timeout=RPC_TIMEOUT)).orders
            for order in orders:
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
                answer = await ask_helper(self._place, wish, KILL_PATIENCE)
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

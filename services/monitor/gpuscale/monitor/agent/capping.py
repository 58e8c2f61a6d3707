"""Passes power caps and MIG partitions from the allocator to gpuscale-power, while that helper's socket exists.

The agent reports power draw and polls for caps, every second while there are any. While the allocator does not answer, the last
caps stay in force: a budget protects a fuse. Each order to the helper is also its heartbeat.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import FailedPreconditionError, GpuscaleError
from gpuscale.common.names import node_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import get_logger
from gpuscale.monitor.agent.collector import Sampler
from gpuscale.monitor.agent.gpus import Gpus
from gpuscale.monitor.helper import PATIENCE, ask_helper

LOOK, QUICK = 5.0, 1.0
"""Seconds between polls without and with caps."""
PARTITION = 60.0
"""Timeout of partitioning, in seconds."""
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
        failing = False
        while True:
            await asyncio.sleep(QUICK if self._caps else LOOK)
            there = await asyncio.to_thread(self._place.is_socket)
            if not there:
                self._state = {}
                if self._caps is None:
                    continue
            elif self._caps is None:
                await self._put()  # asks for the caps in force
            try:
                with rpc_errors():
                    answer = await self._stub.TakePowerCaps(await self._request(), timeout=RPC_TIMEOUT)
            except GpuscaleError as error:
                if not failing:
                    _log.warning("cannot poll power caps: they stay in force", error=error.message)
                failing = True
            else:
                failing = False
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

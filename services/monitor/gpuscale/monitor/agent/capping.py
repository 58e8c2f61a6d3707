"""Caps the power of GPUs as budgets and reservations say, and has them partitioned, by gpuscale-power: only where that runs.

While its socket is there the allocator is told what GPUs draw and asked for caps, each second while there are any. What it said
last stays in force while it does not answer: a budget protects a fuse. The helper hears of it each time, as a sign of life.
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
"""Seconds between two looks, while there are no caps and while there are."""
PARTITION = 60.0
"""Seconds in which GPUs are partitioned."""
_NO_ANSWER: Final = "gpuscale-power does not answer"
_log = get_logger(__name__)


class Capping:
    """Has the helper at `place` put in force what the allocator says for a node."""

    def __init__(
        self, allocator: grpc.aio.Channel, place: Path, node: str, sampler: Sampler, gpus: Gpus
    ) -> None:
        self._stub = allocator_api.PowerServiceStub(allocator)
        self._place = place
        self._node = node
        self._sampler = sampler
        self._gpus = gpus
        self._caps: dict[str, float] | None = None
        """What was ordered last; None before it is known."""
        self._begun: set[str] = set()
        """Orders to give GPUs other MIG instances that the helper has."""
        self._state: dict[str, Any] = {}
        self._found: dict[str, float] = {}
        """Limits that helpers found: a reading of a GPU whose cap was taken back is that of the cap for a while."""

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
                await self._put()  # nothing, but ask which there are
            try:
                with rpc_errors():
                    answer = await self._stub.TakePowerCaps(await self._request(), timeout=RPC_TIMEOUT)
            except GpuscaleError as error:
                if not failing:
                    _log.warning("cannot ask for power caps: they stay as they are", error=error.message)
                failing = True
            else:
                failing = False
                self._caps = {one.uuid: one.watts for one in answer.caps} if there else None
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
        """Have orders carried out, and leave the driver so long: it destroys nothing that is open, and tells of what was."""
        try:
            await self._gpus.release(PARTITION, "MIG instances are made")
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
            _log.warning("gpuscale-power does not end orders", orders=[*orders])
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
            partition_ends=[_end(key, said) for key, said in (ends or {}).items()],
        )
        snapshot = await self._sampler.get(max_age=QUICK)
        caps, problems = (self._state.get(key, {}) for key in ("caps", "problems"))
        otherwise = "" if "caps" in self._state else self._state.get("problem", _NO_ANSWER)
        for view in snapshot.gpus:
            uuid, reading = view.identity.uuid, view.reading
            if not view.identity.parent_uuid:
                fresh = view.read_at is not None and snapshot.taken_at - view.read_at <= 3 * snapshot.period
                request.gpus.add(
                    uuid=uuid,
                    watts=reading.power_watts if fresh else None,
                    lowest_watts=reading.power_limit_min_watts,
                    limit_watts=self._limit(uuid, reading.power_limit_watts),
                    cap_watts=caps.get(uuid),
                    sm_activity_percent=reading.sm_activity_percent,
                    problem=problems.get(uuid, otherwise),
                )
        return request

    def _limit(self, uuid: str, read: float | None) -> float | None:
        """The limit of a GPU without a cap, at most."""
        known = [one for one in (read, self._found.get(uuid)) if one is not None]
        return max(known, default=None)


def _end(order: str, said: Mapping[str, Any]) -> allocator_api.PartitionEnd:
    there = said["instances"]
    return allocator_api.PartitionEnd(
        order=order, problem=said["problem"], instances=there, unsettled=there is None
    )

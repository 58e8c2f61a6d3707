"""Dry runs of use policies, over past reservations, the usage ledger and the fleet's history."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import grpc

from gpuscale.allocator.domain.ledger import RETENTION
from gpuscale.allocator.domain.model import WHOLE, Reservation
from gpuscale.allocator.domain.usage import IDLE_PERCENT
from gpuscale.allocator.domain.use_policies import (
    BUSY,
    IDLE,
    DryRun,
    PolicyCondition,
    RecordedHold,
    RecordedUse,
    UsePolicy,
)
from gpuscale.allocator.state.archive import RecordFilter
from gpuscale.allocator.usecases.accounting import Accounting
from gpuscale.allocator.usecases.leases import Records, every
from gpuscale.allocator.usecases.policing import subject_of
from gpuscale.allocator.usecases.reserving import AllocatorWorld
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import wire
from gpuscale.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from gpuscale.common.names import reservation_name
from gpuscale.common.rpc.channel import RPC_TIMEOUT
from gpuscale.common.rpc.status import rpc_errors

STEP = 60.0
"""Seconds between looks: the step of the fleet's daily history."""
WINDOW = 2880
"""Steps of one GPU that are read at once: a few milliseconds."""
RECORDED = (PolicyCondition.IDLE, PolicyCondition.OVER_TIME)


@dataclass(eq=False)
class DryRuns:
    """Runs one at a time, since it reads a lot."""

    records: Records
    world: AllocatorWorld
    accounting: Accounting
    fleet: grpc.aio.Channel
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def run(self, name: str, policy: UsePolicy, start: float, end: float) -> tuple[DryRun, RecordedUse]:
        """What a policy would have done from `start` to `end`, in seconds since 1970, and over which steps.

        Raises:
            FailedPreconditionError: NOT_RECORDED, for a condition without records.
            InvalidArgumentError: the period is empty, or begins before the oldest records of reservations.
            ResourceExhaustedError: another one is running.
        """
        now = self.records.clock.wall().timestamp()
        if policy.condition not in RECORDED:
            raise FailedPreconditionError(
                f"what {policy.condition.name} needs is not recorded: create the policy in shadow, and see what it would do",
                reason="NOT_RECORDED",
            )
        if not start < end <= now + STEP:
            raise InvalidArgumentError(
                "start_time must be before end_time, and both past", field="start_time"
            )
        if start < now - RETENTION - STEP:
            days = f"{RETENTION / 86_400:g} days"
            raise InvalidArgumentError(f"start_time must be within the last {days}", field="start_time")
        if self._turn.locked():
            raise ResourceExhaustedError(
                "another dry run is running: try again later", reason="BUSY", retry_after=5.0
            )
        async with self._turn:
            wanted = RecordFilter(period=wire.TimeRange(_wall(start), _wall(end)))
            every_one = await every(partial(self.records.list_reservations, wanted, ended=True))
            held = [one for one in every_one if one.gpus and not one.waiting]
            holds = [await self._hold(one, now) for one in held]
            holds = [one for one in holds if policy.scope.holds(one.subject)]
            use = RecordedUse(start, STEP, int((end - start) // STEP))
            if policy.condition is PolicyCondition.IDLE:
                use = await self._use(use, sorted({uuid for one in holds for uuid in one.gpus}))
            found = DryRun()
            for one in holds:
                await asyncio.to_thread(found.replay, name, policy, one, use)
            found.acts.sort(key=lambda act: act.time)
            return found, use

    async def _hold(self, one: Reservation, now: float) -> RecordedHold:
        end = one.ended.timestamp() if one.ended else now + STEP
        if one.live:
            begin = now - (self.records.clock.now() - self.world.granted_at(one))
        elif one.wanted is None:
            begin = one.created.timestamp()
        else:  # it waited first: the ledger knows for how long it held something
            used = await self.accounting.statistics(one.id)
            begin = end - max((gpu.tally.granted for gpu in used.gpus), default=0) / 1000
        gpus = tuple(dict.fromkeys(gpu.uuid for gpu in one.gpus))
        shared = frozenset(gpu.uuid for gpu in one.gpus if gpu.milli < WHOLE)
        return RecordedHold(subject_of(reservation_name(one.id), [one]), gpus, shared, begin, end)

    async def _use(self, use: RecordedUse, uuids: list[str]) -> RecordedUse:
        """The fleet's history of the GPUs. Its steps follow the fleet's clock: ours are aligned to them."""
        aligned = False
        for uuid in uuids:
            states = use.gpus.setdefault(uuid, bytearray(use.count))
            points: list[monitor_api.HistoryPoint] = []
            for index in range(0, use.count, WINDOW):
                begin = use.start + index * STEP
                points += await self._points(
                    uuid, begin, min(begin + WINDOW * STEP, use.start + use.count * STEP)
                )
            if points and not aligned:
                begin = use.start + (_seconds(points[0]) - use.start) % STEP  # aligned to the history
                count = int((use.start + use.count * STEP - begin) // STEP)
                use, aligned = replace(use, start=begin, count=count), True
            mean = sum(one.sample_count for one in points) / max(1, len(points))
            for one in points:
                place = round((_seconds(one) - use.start) / STEP)
                if 0 <= place < use.count and 2 * one.sample_count >= mean:  # half a step is none
                    states[place] = IDLE if one.max < IDLE_PERCENT and states[place] != BUSY else BUSY
        return use

    async def _points(self, uuid: str, start: float, end: float) -> list[monitor_api.HistoryPoint]:
        span = monitor_api.HistorySpan(
            start_time=wire.to_timestamp(_wall(start)), end_time=wire.to_timestamp(_wall(end))
        )
        request = monitor_api.QueryHistoryRequest(
            uuids=[uuid],
            metrics=[monitor_api.Metric.METRIC_UTILIZATION_PERCENT],
            span=span,
            step=wire.to_duration(STEP),
        )
        try:
            with rpc_errors():
                stub = monitor_api.HistoryServiceStub(self.fleet)
                found = await stub.QueryHistory(request, timeout=RPC_TIMEOUT)
        except NotFoundError:  # no agent reports it any more
            return []
        return [point for series in found.series for point in series.points]


def _seconds(point: monitor_api.HistoryPoint) -> float:
    return point.start_time.seconds + point.start_time.nanos / 1e9


def _wall(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)

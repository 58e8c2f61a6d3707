"""BacktestService on the wire."""

import asyncio
from collections.abc import Sequence
from functools import partial

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.report import oracle_gpu_hours
from gpuscale.autoscaler.backtest.trace import Request
from gpuscale.autoscaler.servicers import endpoint_changes
from gpuscale.autoscaler.servicers.backtests import LONGEST_RUN, Runs
from gpuscale.autoscaler.servicers.translate_backtest import job_from_wire, report_to_wire
from gpuscale.autoscaler.signals.histories import Histories
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.names import ENDPOINT, parse
from gpuscale.common.runtime.clock import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.store.store import Store
from gpuscale.common.wire import optional_seconds

_ANSWERING = 0.2
"""Seconds of a call's deadline that are left for its answer."""


class BacktestServicer(api.BacktestServiceServicer):
    """Runs policies on workloads."""

    def __init__(self, runs: Runs, histories: Histories, store: Store, clock: Clock) -> None:
        self._runs = runs
        self._histories = histories
        self._store = store
        self._clock = clock

    async def Backtest(self, request: api.BacktestRequest, context: Context) -> api.BacktestResponse:
        """Run each policy on the workload."""
        left = _time_remaining(context)
        history = await self._history(request)
        job = await asyncio.to_thread(job_from_wire, request, history)  # there may be many requests
        budget = LONGEST_RUN if left is None else left - _ANSWERING
        reports = await self._runs.run(job, budget)
        named = zip(request.policies, job.parts, reports, strict=True)
        worked = job.parts if job.shared else job.parts[:1]
        return api.BacktestResponse(
            reports=[report_to_wire(policy.name, part.spec, report) for policy, part, report in named],
            work_gpu_hours=sum(
                oracle_gpu_hours(one.requests, one.setting.slots, one.setting.gpus_each) for one in worked
            ),
        )

    async def _history(self, request: api.BacktestRequest) -> Sequence[Request]:
        """The workload of the endpoint that a request names; nothing where it names none."""
        if not request.endpoint:
            return ()
        if request.arrivals:
            raise InvalidArgumentError("endpoint cannot stand beside arrivals", field="endpoint")
        endpoint = parse(ENDPOINT, request.endpoint, "endpoint")["endpoint"]
        await self._store.read(partial(endpoint_changes.find, endpoint_id=endpoint))
        service = optional_seconds(request, "service_time")
        return await self._histories.workload(endpoint, service, self._clock.wall())


def _time_remaining(context: Context) -> float | None:
    """Seconds until the caller's deadline; None where it set none (gRPC's stub omits that case)."""
    return context.time_remaining()

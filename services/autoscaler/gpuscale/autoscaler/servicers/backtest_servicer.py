"""BacktestService on the wire: policies on a workload, in a thread, one run at a time and never beyond its time."""

import asyncio
import threading
from collections.abc import Sequence
from functools import partial
from typing import cast

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.simulate import Report, oracle_gpu_hours
from gpuscale.autoscaler.servicers.backtest_jobs import Job, job_from_wire, report_to_wire, run_job
from gpuscale.autoscaler.servicers.endpoints import find_endpoint
from gpuscale.autoscaler.signals.sources import Histories
from gpuscale.client.traces import Request
from gpuscale.common.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from gpuscale.common.names import ENDPOINT, parse
from gpuscale.common.runtime.tasks import Clock
from gpuscale.common.security.auth import Context
from gpuscale.common.store.store import Store
from gpuscale.common.wire import optional_seconds

LONGEST_RUN = 120.0
"""Seconds that a run may take."""


class Runs:
    """Runs jobs, one at a time."""

    def __init__(self) -> None:
        self._running = False

    async def run(self, job: Job, budget: float) -> list[Report]:
        """The figures of each policy.

        Args:
            job: what to run.
            budget: seconds that it may take.

        Raises:
            ResourceExhaustedError: another is running (reason BACKTEST_RUNNING).
            DeadlineExceededError: it took longer.
        """
        if self._running:
            raise ResourceExhaustedError(
                "another backtest is running", reason="BACKTEST_RUNNING", retry_after=1.0
            )
        self._running = True
        stop = threading.Event()
        work = asyncio.ensure_future(asyncio.to_thread(run_job, job, stop))

        def ended(_: object) -> None:
            self._running = False
            if not work.cancelled():
                work.exception()  # whoever waits has it; where nobody does, it is of no use

        work.add_done_callback(ended)
        try:
            # Shielded, for a thread ends by itself: soon after it is told to.
            reports = await asyncio.wait_for(asyncio.shield(work), min(budget, LONGEST_RUN))
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"the backtest took longer than {min(budget, LONGEST_RUN):.0f} s: run fewer policies, or a shorter trace"
            ) from error
        finally:
            stop.set()
        return reports or []


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
        left = cast("float | None", context.time_remaining())  # gRPC's stub omits the None of no deadline
        history: Sequence[Request] = ()
        if request.endpoint:
            if request.arrivals:
                raise InvalidArgumentError("endpoint cannot stand beside arrivals", field="endpoint")
            endpoint = parse(ENDPOINT, request.endpoint, "endpoint")["endpoint"]
            await self._store.read(partial(find_endpoint, endpoint_id=endpoint))
            service = optional_seconds(request, "service_time")
            history = await self._histories.workload(endpoint, service, self._clock.wall())
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

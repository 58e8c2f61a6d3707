"""BacktestService on the wire, and the RPC of clients before 1.0 that runs a backtest and waits for it."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any, cast

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.simulate import Report
from gpuscale.autoscaler.servicers.backtest_jobs import (
    BacktestJob,
    job_from_wire,
    least_gpu_hours,
    report_to_wire,
    requests_from_wire,
    run_job,
)
from gpuscale.autoscaler.servicers.backtests import Backtests
from gpuscale.common.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from gpuscale.common.filters import compile_filter, listed
from gpuscale.common.rpc.feed import FeedView
from gpuscale.common.security.auth import RESERVED_NAMES, Context, current_principal
from gpuscale.common.wire import absence_allowed

LONGEST_CALL = 120.0
"""Most seconds of a run whose caller waits for it."""
_ANSWERING = 0.2
"""Seconds of a call's deadline reserved for its answer."""


async def run_within(job: BacktestJob, budget: float, turn: asyncio.Lock) -> list[Report]:
    """The figures of each policy, within `budget` seconds.

    ResourceExhaustedError (BACKTEST_RUNNING) if another holds the `turn`, DeadlineExceededError if it takes longer.
    """
    if turn.locked():
        raise ResourceExhaustedError(
            "another backtest is running", reason="BACKTEST_RUNNING", retry_after=1.0
        )
    await turn.acquire()
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(run_job, job, stop.is_set))

    def ended(_: object) -> None:
        turn.release()
        if not work.cancelled():
            work.exception()  # the caller has it; without a caller it is useless

    work.add_done_callback(ended)
    try:
        # Shielded, because a thread ends on its own, soon after it is told to.
        reports = await asyncio.wait_for(asyncio.shield(work), min(budget, LONGEST_CALL))
    except TimeoutError as error:
        raise DeadlineExceededError(
            f"the backtest took longer than {min(budget, LONGEST_CALL):.0f} s: run fewer policies, or a shorter trace"
        ) from error
    finally:
        stop.set()
    return reports or []


class BacktestServicer(api.BacktestServiceServicer):
    """Translates between the wire and `Backtests`."""

    def __init__(self, backtests: Backtests) -> None:
        self._backtests = backtests

    async def Backtest(self, request: api.BacktestRequest, context: Context) -> api.BacktestResponse:
        left = cast("float | None", context.time_remaining())  # gRPC's stub omits the None of no deadline
        if request.endpoint and request.arrivals:
            raise InvalidArgumentError("endpoint cannot be combined with arrivals", field="endpoint")
        history = await self._backtests.history(request)

        def read() -> BacktestJob:
            return job_from_wire(request, history or requests_from_wire(request))

        job = await asyncio.to_thread(read)  # there may be many requests
        budget = LONGEST_CALL if left is None else left - _ANSWERING
        reports = await run_within(job, budget, self._backtests.turn)
        named = zip(request.policies, job.parts, reports, strict=True)
        return api.BacktestResponse(
            reports=[report_to_wire(policy.name, part.spec, report) for policy, part, report in named],
            work_gpu_hours=least_gpu_hours(job),
        )

    async def CreateBacktest(
        self, request_iterator: AsyncIterable[api.CreateBacktestRequest], context: Context
    ) -> api.CreateBacktestResponse:
        caller = current_principal().name
        made = await self._backtests.create(request_iterator, "" if caller in RESERVED_NAMES else caller)
        return api.CreateBacktestResponse(backtest=made)

    async def GetBacktest(self, request: api.GetBacktestRequest, context: Context) -> api.GetBacktestResponse:
        return api.GetBacktestResponse(backtest=self._backtests.get(request.name))

    async def ListBacktests(
        self, request: api.ListBacktestsRequest, context: Context
    ) -> api.ListBacktestsResponse:
        found, token = listed(
            self._backtests.every(),
            request,
            api.Backtest,
            key=lambda one: f"{one.create_time.ToMicroseconds():020} {one.name}",
            encode=lambda one: one,
            descending=True,
        )
        return api.ListBacktestsResponse(backtests=found, next_page_token=token)

    async def WatchBacktests(
        self, request: api.WatchBacktestsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        matches = compile_filter(request.filter, api.Backtest) if request.filter else None
        async for message in self._backtests.feed.stream(request, FeedView(matches=matches)):
            yield message

    async def ReadBacktestReports(
        self, request: api.ReadBacktestReportsRequest, context: Context
    ) -> AsyncGenerator[api.ReadBacktestReportsResponse]:
        async for report in self._backtests.reports(request.name):
            yield api.ReadBacktestReportsResponse(report=report)

    async def CancelBacktest(
        self, request: api.CancelBacktestRequest, context: Context
    ) -> api.CancelBacktestResponse:
        return api.CancelBacktestResponse(backtest=await self._backtests.cancel(request.name))

    async def DeleteBacktest(
        self, request: api.DeleteBacktestRequest, context: Context
    ) -> api.DeleteBacktestResponse:
        with absence_allowed(request):
            await self._backtests.delete(request.name)
        return api.DeleteBacktestResponse()

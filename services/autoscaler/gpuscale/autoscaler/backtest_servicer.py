"""BacktestService on the wire."""

import asyncio
from typing import TypeAlias

import grpc

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.report import oracle_gpu_hours
from gpuscale.autoscaler.backtests import LONGEST_RUN, Runs
from gpuscale.autoscaler.translate_backtest import job_from_wire, report_to_wire

_Backtest: TypeAlias = grpc.aio.ServicerContext[api.BacktestRequest, api.BacktestResponse]
_ANSWERING = 0.2
"""Seconds of a call's deadline that are left for its answer."""


class BacktestServicer(api.BacktestServiceServicer):
    """Runs policies on workloads."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    async def Backtest(self, request: api.BacktestRequest, context: _Backtest) -> api.BacktestResponse:
        """Run each policy on the workload."""
        left = _time_remaining(context)
        job = await asyncio.to_thread(job_from_wire, request)  # there may be many requests
        budget = LONGEST_RUN if left is None else left - _ANSWERING
        reports = await self._runs.run(job, budget)
        specs = [spec for spec, _ in job.policies]
        named = zip(request.policies, specs, reports, strict=True)
        slots, each = job.policies[0][1].slots, job.policies[0][1].gpus_each
        return api.BacktestResponse(
            reports=[report_to_wire(policy.name, spec, report) for policy, spec, report in named],
            work_gpu_hours=oracle_gpu_hours(job.requests, slots, each),
        )


def _time_remaining(context: _Backtest) -> float | None:
    """Seconds until the caller's deadline; None where it set none (gRPC's stub omits that case)."""
    return context.time_remaining()

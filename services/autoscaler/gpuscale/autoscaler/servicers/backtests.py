"""A run of several policies on one workload, in a thread of its own: one at a time, and never beyond its time."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuscale.autoscaler.backtest.report import Report
from gpuscale.autoscaler.backtest.shared import Part, run_shared
from gpuscale.autoscaler.backtest.simulate import StoppedError, run
from gpuscale.common.errors import DeadlineExceededError, ResourceExhaustedError

LONGEST_RUN = 120.0
"""Seconds that a run may take."""


@dataclass(frozen=True, slots=True)
class Job:
    """Policies to run, each with its workload and setting: one after another, or beside each other on shared GPUs."""

    parts: Sequence[Part]
    goal: float
    begin: datetime
    shared: bool = False


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
        work = asyncio.ensure_future(asyncio.to_thread(_run, job, stop))
        work.add_done_callback(self._ended)
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

    def _ended(self, work: "asyncio.Future[list[Report] | None]") -> None:
        self._running = False
        if not work.cancelled():
            work.exception()  # whoever waits has it; where nobody does, it is of no use


def _run(job: Job, stop: threading.Event) -> list[Report] | None:
    """The reports; None once it was told to stop."""
    try:
        if job.shared:
            most = job.parts[0].setting.max_gpus
            return run_shared(job.parts, goal=job.goal, begin=job.begin, most=most, stopped=stop.is_set)
        return [
            run(one.spec, one.requests, one.setting, goal=job.goal, begin=job.begin, stopped=stop.is_set)
            for one in job.parts
        ]
    except StoppedError:
        return None

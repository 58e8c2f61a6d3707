"""BacktestService, and the RPC of clients before 1.0 that runs a backtest and waits for it.

Backtests outlive their call: one runs at a time, in a thread, and the state of each is on disk. Workloads are
not: what runs or waits when the autoscaler ends has failed at its next start, with the figures so far.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar, cast
from uuid import uuid4

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest.simulate import Report
from gpuscale.autoscaler.servicers import backtest_jobs
from gpuscale.autoscaler.servicers.endpoints import find_endpoint
from gpuscale.autoscaler.signals.sources import Histories
from gpuscale.autoscaler.state import backtest_store
from gpuscale.autoscaler.state.backtest_store import StoredBacktest
from gpuscale.autoscaler.state.store import Connection
from gpuscale.client.traces import MOST_REQUESTS, Request
from gpuscale.common import errors
from gpuscale.common.filters import compile_filter, listed
from gpuscale.common.names import BACKTEST, ENDPOINT, parse
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from gpuscale.common.rpc.validation import validate
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.security.auth import RESERVED_NAMES, Context, current_principal, for_caller
from gpuscale.common.store.store import Store
from gpuscale.common.wire import absence_allowed, fingerprint, optional_seconds, to_timestamp

MOST_WAITING: Final = 8
"""Most backtests that run, wait or are being sent."""
KEPT: Final = 100
"""Most ended backtests that are kept."""
KEPT_BYTES: Final = 64 << 20
"""Most bytes of all backtests with their reports; beyond, those that ended first are forgotten."""
LONGEST_RUN: Final = 3600.0
"""Most seconds of a run."""
LONGEST_SENDING: Final = 300.0
"""Most seconds to send a workload."""
_State, _Why = api.Backtest.State, api.Backtest.EndReason
_log = get_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class AskedBacktest:
    """The messages of one request combined: policies hold the parts of their own workloads."""

    spec: api.BacktestSpec = field(default_factory=api.BacktestSpec)
    request_id: str = ""
    backtest_id: str = ""
    workload: api.Workload = field(default_factory=api.Workload)
    count: int = 0

    @classmethod
    async def of(cls, messages: AsyncIterable[api.CreateBacktestRequest]) -> "AskedBacktest":
        """Read the stream; InvalidArgumentError if a message is invalid, or there is too much."""
        asked: AskedBacktest | None = None
        async for message in messages:
            await asyncio.to_thread(validate, message)  # which may be large
            if asked is None:
                for name, given in (("spec", message.HasField("spec")), ("request_id", message.request_id)):
                    if not given:
                        raise errors.InvalidArgumentError(
                            f"{name} must be set in the first message", field=name
                        )
                asked = cls(message.spec, message.request_id, message.backtest_id)
                asked.count = sum(len(one.workload.arrivals) for one in message.spec.policies)
            asked.add(message)
        if asked is None:
            raise errors.InvalidArgumentError("spec must be set", field="spec")
        return asked

    def add(self, message: api.CreateBacktestRequest) -> None:
        """Add a message's part of a workload."""
        self.count += len(message.workload.arrivals)
        if self.count > MOST_REQUESTS:
            raise errors.InvalidArgumentError(
                f"more than {MOST_REQUESTS} requests", field="workload.arrivals"
            )
        of = self.workload
        if message.policy:
            own = [one for one in self.spec.policies if one.name == message.policy]
            if not own:
                raise errors.InvalidArgumentError("policy is not in the spec", field="policy")
            of = own[0].workload
        of.MergeFrom(message.workload)

    def fingerprint(self) -> str:
        """Identifies the request, however it was split into messages."""
        return fingerprint(
            api.CreateBacktestRequest(spec=self.spec, backtest_id=self.backtest_id, workload=self.workload)
        )

    def job(self) -> backtest_jobs.BacktestJob:
        """The run; InvalidArgumentError if it contradicts itself."""
        try:
            return backtest_jobs.job_from_wire(self.spec, backtest_jobs.requests_from_wire(self.workload))
        except errors.InvalidArgumentError as error:  # fields as in this request
            rooms = {"arrivals": "workload.", "service_seconds": "workload."}
            found = [
                one._replace(field=rooms.get(one.field, "spec.") + one.field) for one in error.violations
            ]
            raise errors.InvalidArgumentError.of(found) from error

    def message(self) -> api.Backtest:
        """The requested backtest, without its large parts; InvalidArgumentError if it contradicts itself."""
        message = api.Backtest(
            name=f"backtests/{self.backtest_id or f'b-{uuid4().hex[:12]}'}",
            spec=self.spec,
            state=_State.STATE_PENDING,
            request_count=len(self.workload.arrivals)
            + sum(len(one.workload.arrivals) for one in self.spec.policies),
            work_gpu_hours=backtest_jobs.least_gpu_hours(self.job()),
        )
        del message.spec.policies[:]
        message.spec.policies.extend(api.BacktestPolicy(name=one.name) for one in self.spec.policies)
        return message


@dataclass(slots=True)
class _Run:
    asked: AskedBacktest
    stop: threading.Event = field(default_factory=threading.Event)


class Backtests:
    """All backtests. `feed` has their messages; `turn` is held while something runs."""

    def __init__(self, store: Store, histories: Histories, clock: Clock) -> None:
        self.feed: ResourceFeed[api.Backtest] = ResourceFeed(
            api.WatchBacktestsResponse, lambda message, _: message
        )
        self.turn = asyncio.Lock()
        self._store = store
        self._histories = histories
        self._clock = clock
        self._stored: dict[str, StoredBacktest] = {}
        self._runs: dict[str, _Run] = {}
        self._sending = 0
        self._some = asyncio.Event()
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Load what is stored; unfinished backtests were cut off by the end of their process."""
        for one in await self._store.read(backtest_store.load):
            self._stored[one.message.name] = one
            self.feed.put(one.message.name, one.message)
            if not one.message.HasField("end_time"):
                why, text = _Why.END_REASON_SERVICE_ENDED, "the autoscaler ended, and its workload was lost"
                await self._fail(one.message.name, why, text)

    async def run(self) -> None:
        """Run waiting backtests, one after another; never ends."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._runs:
                name, run = next(iter(self._runs.items()))
                async with self.turn:
                    try:
                        await self._run(name, run)
                    except errors.GpuscaleError as error:
                        _log.warning("cannot continue a backtest", backtest=name, error=error.message)
                        await self._fail(name, _Why.END_REASON_ERROR, for_caller(error).message)
                    finally:
                        run.stop.set()  # for its thread

    async def history(self, request: api.BacktestRequest | api.BacktestSpec) -> Sequence[Request]:
        """The workload of the endpoint in a request, or none; FailedPreconditionError if none is known."""
        if not request.endpoint:
            return ()
        endpoint = parse(ENDPOINT, request.endpoint, "endpoint")["endpoint"]
        await self._store.read(partial(find_endpoint, endpoint_id=endpoint))
        service = optional_seconds(request, "service_time")
        return await self._histories.workload(endpoint, service, self._clock.wall())

    async def create(self, messages: AsyncIterable[api.CreateBacktestRequest], creator: str) -> api.Backtest:
        """Queue a backtest, or return the one that this request id created; raises like `history`.

        ResourceExhaustedError (BACKTESTS_WAITING) if too many wait, DeadlineExceededError if the workload arrives too slowly.
        """
        if len(self._runs) + self._sending >= MOST_WAITING:
            text = f"{MOST_WAITING} backtests wait already"
            raise errors.ResourceExhaustedError(text, reason="BACKTESTS_WAITING", retry_after=10.0)
        self._sending += 1
        try:
            try:
                async with asyncio.timeout(LONGEST_SENDING):
                    asked = await AskedBacktest.of(messages)
            except TimeoutError:
                text = f"the workload did not come within {LONGEST_SENDING:g} s"
                raise errors.DeadlineExceededError(text) from None
            digest = await asyncio.to_thread(asked.fingerprint)
            if (known := self._known(asked.request_id, digest)) is not None:
                return known
            if asked.spec.endpoint and asked.workload.arrivals:
                raise errors.InvalidArgumentError(
                    "spec.endpoint cannot be combined with a workload", field="spec.endpoint"
                )
            for one in await self.history(asked.spec):
                asked.workload.arrivals.append(one.arrival)
                asked.workload.service_seconds.append(one.service)
            message = await asyncio.to_thread(asked.message)
            message.creator = creator
            message.create_time.CopyFrom(to_timestamp(self._clock.wall()))
            return await self._begin(StoredBacktest(message, asked.request_id, digest), asked)
        finally:
            self._sending -= 1

    def get(self, name: str) -> api.Backtest:
        """One backtest; NotFoundError if there is none."""
        return self._find(name).message

    def every(self) -> Sequence[api.Backtest]:
        """All backtests."""
        return [one.message for one in self._stored.values()]

    async def reports(self, name: str) -> AsyncGenerator[api.BacktestReport]:
        """The reports so far, in the order of the policies; NotFoundError if there is no backtest."""
        for place in range(self._find(name).message.done_count):
            found = await self._store.read(partial(backtest_store.report, name=name, place=place))
            yield errors.NotFoundError.unless(found, name)

    async def cancel(self, name: str) -> api.Backtest:
        """Stop a backtest, if it has not ended; NotFoundError if there is none."""
        self._find(name)
        await self._change(name, self._ended(_State.STATE_CANCELLED, _Why.END_REASON_CANCELLED))
        return self.get(name)

    @uninterrupted
    async def delete(self, name: str) -> None:
        """Stop a backtest, and remove it; NotFoundError if there is none."""
        async with self._changing:
            self._find(name)
            await self._store.write(partial(backtest_store.remove, names=[name]), frees=True)
            self._forget(name)

    @uninterrupted
    async def _begin(self, one: StoredBacktest, asked: AskedBacktest) -> api.Backtest:
        """Store and queue a new backtest, removing surplus ended ones."""
        async with self._changing:
            if (known := self._known(one.request_id, one.fingerprint)) is not None:
                return known
            name = one.message.name
            if name in self._stored:
                raise errors.AlreadyExistsError(f"{name} exists", metadata={"name": name})
            over = [one for one in self._stored.values() if one.message.HasField("end_time")]
            over.sort(key=lambda one: one.message.end_time.ToNanoseconds())
            size = sum(one.message.ByteSize() + one.report_bytes for one in self._stored.values())
            old: list[str] = []
            while over and (len(over) >= KEPT or size > KEPT_BYTES):
                first = over.pop(0)  # the first made of those that ended at once
                old.append(first.message.name)
                size -= first.message.ByteSize() + first.report_bytes

            def put(connection: Connection) -> None:
                backtest_store.remove(connection, old)
                backtest_store.save(connection, one)

            await self._store.write(put)
            for gone in old:
                self._forget(gone)
            self._stored[name] = one
            self.feed.put(name, one.message)
            self._runs[name] = _Run(asked)
            self._some.set()
            return one.message

    async def _run(self, name: str, run: _Run) -> None:
        wall = to_timestamp(self._clock.wall())
        await self._change(name, api.Backtest(state=_State.STATE_RUNNING, start_time=wall))
        job, until = await _in_thread(run.asked.job), time.monotonic() + LONGEST_RUN
        names, done = [one.name for one in run.asked.spec.policies], 0
        for step in [job] if job.shared else [replace(job, parts=[part]) for part in job.parts]:
            figures = await _in_thread(
                partial(backtest_jobs.run_job, step, lambda: run.stop.is_set() or time.monotonic() > until)
            )
            if figures is None:
                text = f"it ran for more than {LONGEST_RUN:g} s"
                await self._fail(name, _Why.END_REASON_TOO_LONG, text)  # unless it was ended
                return
            found = zip(names[done:], step.parts, figures, strict=False)
            reports = [backtest_jobs.report_to_wire(of, part.spec, one) for of, part, one in found]
            done += len(reports)
            await self._change(name, api.Backtest(done_count=done), reports)
        await self._change(name, self._ended(_State.STATE_SUCCEEDED))

    def _ended(
        self,
        state: api.Backtest.State.ValueType,
        why: api.Backtest.EndReason.ValueType = _Why.END_REASON_UNSPECIFIED,
        text: str = "",
    ) -> api.Backtest:
        wall = to_timestamp(self._clock.wall())
        return api.Backtest(state=state, end_reason=why, message=text, end_time=wall)

    async def _fail(self, name: str, why: api.Backtest.EndReason.ValueType, text: str) -> None:
        """Record that a backtest was cut off; in memory alone if it cannot be written: the next start does the same."""
        await self._change(name, self._ended(_State.STATE_FAILED, why, text), written=False)

    @uninterrupted
    async def _change(
        self,
        name: str,
        changes: api.Backtest,
        reports: Sequence[api.BacktestReport] = (),
        *,
        written: bool = True,
    ) -> None:
        """Change a backtest and add reports to it, if it runs; UnavailableError if it cannot be `written`."""
        async with self._changing:
            one = self._stored.get(name)
            if one is None or one.message.HasField("end_time"):
                return
            message = api.Backtest()
            message.CopyFrom(one.message)
            message.MergeFrom(changes)
            size = one.report_bytes + sum(report.ByteSize() for report in reports)
            changed, over = replace(one, message=message, report_bytes=size), message.HasField("end_time")
            placed = list(enumerate(reports, one.message.done_count))
            try:
                await self._store.write(partial(backtest_store.save, one=changed, reports=placed), frees=over)
            except errors.GpuscaleError as error:
                if written:
                    raise
                _log.warning("cannot write the end of a backtest", backtest=name, error=error.message)
            self._stored[name] = changed
            self.feed.put(name, message)
            if over:
                self._stop(name)

    def _find(self, name: str) -> StoredBacktest:
        parse(BACKTEST, name)
        return errors.NotFoundError.unless(self._stored.get(name), name)

    def _known(self, request_id: str, digest: str) -> api.Backtest | None:
        """What a request with this id created, if it is kept; AlreadyExistsError for a different request."""
        known = next((one for one in self._stored.values() if one.request_id == request_id), None)
        if known is None:
            return None
        if known.fingerprint != digest:
            raise errors.request_id_reused(request_id)
        return known.message

    def _stop(self, name: str) -> None:
        run = self._runs.pop(name, None)
        if run is not None:
            run.stop.set()

    def _forget(self, name: str) -> None:
        self._stop(name)
        del self._stored[name]
        self.feed.remove(name)


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of a thread; InternalError for a bug there, which ends nothing else."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    await asyncio.wait([task])
    error = task.exception()
    if error is not None and not isinstance(error, errors.GpuscaleError):
        _log.error("a backtest failed because of a bug", exc_info=error)
        raise errors.InternalError("a bug; the log of the autoscaler has details") from error
    return task.result()


LONGEST_CALL = 120.0
"""Most seconds of a run whose caller waits for it."""
_ANSWERING = 0.2
"""Seconds of a call's deadline reserved for its answer."""


async def run_within(job: backtest_jobs.BacktestJob, budget: float, turn: asyncio.Lock) -> list[Report]:
    """The figures of each policy, within `budget` seconds.

    ResourceExhaustedError (BACKTEST_RUNNING) if another holds the `turn`, DeadlineExceededError if it takes longer.
    """
    if turn.locked():
        raise errors.ResourceExhaustedError(
            "another backtest is running", reason="BACKTEST_RUNNING", retry_after=1.0
        )
    await turn.acquire()
    stop = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(backtest_jobs.run_job, job, stop.is_set))

    def ended(_: object) -> None:
        turn.release()
        if not work.cancelled():
            work.exception()  # the caller has it; without a caller it is useless

    work.add_done_callback(ended)
    try:
        # Shielded, because a thread ends on its own, soon after it is told to.
        reports = await asyncio.wait_for(asyncio.shield(work), min(budget, LONGEST_CALL))
    except TimeoutError as error:
        raise errors.DeadlineExceededError(
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
            raise errors.InvalidArgumentError("endpoint cannot be combined with arrivals", field="endpoint")
        history = await self._backtests.history(request)

        def read() -> backtest_jobs.BacktestJob:
            return backtest_jobs.job_from_wire(request, history or backtest_jobs.requests_from_wire(request))

        job = await asyncio.to_thread(read)  # there may be many requests
        budget = LONGEST_CALL if left is None else left - _ANSWERING
        reports = await run_within(job, budget, self._backtests.turn)
        named = zip(request.policies, job.parts, reports, strict=True)
        return api.BacktestResponse(
            reports=[
                backtest_jobs.report_to_wire(policy.name, part.spec, report) for policy, part, report in named
            ],
            work_gpu_hours=backtest_jobs.least_gpu_hours(job),
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
        def age(one: api.Backtest) -> str:
            return f"{one.create_time.ToMicroseconds():020} {one.name}"

        every = sorted(self._backtests.every(), key=age, reverse=True)
        found, token = listed(every, request, api.Backtest, key=age, encode=lambda one: one, descending=True)
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

"""Backtests as resources: they outlive the call that asks for them, wait for their turn, and end truthfully."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.servicers import backtest_jobs, backtests
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.rpc.wrapped_channel import sending
from gpuscale.common.secrets import DatabaseUnavailableError
from gpuscale.common.wire import to_duration
from tests.support.asking_autoscaler import Asking, asking
from tests.support.autoscaler_app import TIMEOUT
from tests.support.waiting import eventually

State, Why = api.Backtest.State, api.Backtest.EndReason
SHORT = api.Workload(arrivals=[float(second) for second in range(100)], service_seconds=[4.0] * 100)
# As long as a backtest may be: a million evaluations, so that it runs until it is ended.
LONG = api.Workload(arrivals=[0.0, 96_000.0], service_seconds=[1.0, 1.0])
FAST = api.EndpointSpec(min_replicas=1, max_replicas=1, tick=to_duration(0.1))


def policies(*names: str) -> api.BacktestSpec:
    keda = api.PresetWish(preset="keda")
    return api.BacktestSpec(policies=[api.BacktestPolicy(name=name, preset=keda) for name in names], slots=2)


def parts(
    spec: api.BacktestSpec, workload: api.Workload, size: int = 100_000, **more: Any
) -> list[api.CreateBacktestRequest]:
    messages = [api.CreateBacktestRequest(spec=spec, **{"request_id": str(uuid.uuid4()), **more})]
    for begin in range(0, len(workload.arrivals), size):
        of = slice(begin, begin + size)
        work = api.Workload(arrivals=workload.arrivals[of], service_seconds=workload.service_seconds[of])
        messages.append(api.CreateBacktestRequest(workload=work))
    return messages


async def flowing(messages: list[api.CreateBacktestRequest]) -> AsyncIterator[api.CreateBacktestRequest]:
    for message in messages:
        yield message


async def create(asked: Asking, messages: list[api.CreateBacktestRequest]) -> api.Backtest:
    with rpc_errors():
        call = asked.backtests.CreateBacktest(timeout=TIMEOUT)
        async with sending(call, flowing(messages)):
            return (await call).backtest


async def get(asked: Asking, name: str) -> api.Backtest:
    request = api.GetBacktestRequest(name=name)
    with rpc_errors():
        return (await asked.backtests.GetBacktest(request, timeout=TIMEOUT)).backtest


async def reports(asked: Asking, name: str) -> list[api.BacktestReport]:
    call = asked.backtests.ReadBacktestReports(api.ReadBacktestReportsRequest(name=name), timeout=TIMEOUT)
    return [one.report async for one in call]


async def listed(asked: Asking, **request: Any) -> list[str]:
    found = await asked.backtests.ListBacktests(api.ListBacktestsRequest(**request), timeout=TIMEOUT)
    return [one.name for one in found.backtests]


async def until(asked: Asking, name: str, *states: api.Backtest.State.ValueType) -> api.Backtest:
    return await eventually(lambda: get(asked, name), lambda found: found if found.state in states else None)


async def test_it_outlives_its_call_and_comes_to_what_the_call_that_waits_comes_to(asked: Asking) -> None:
    messages = parts(policies("a", "b"), SHORT)
    begun = await create(asked, messages)
    assert begun.state in {State.STATE_PENDING, State.STATE_RUNNING}
    assert [one.name for one in begun.spec.policies] == ["a", "b"]
    told: list[api.Backtest] = []
    watched = asked.backtests.WatchBacktests(
        api.WatchBacktestsRequest(filter=f'name = "{begun.name}"'), timeout=TIMEOUT
    )
    async for update in watched:
        told += update.backtests
        if told and told[-1].HasField("end_time"):
            break
    done = told[-1]
    assert (done.state, done.done_count, done.request_count) == (State.STATE_SUCCEEDED, 2, 100)
    assert (
        done.create_time.ToNanoseconds() <= done.start_time.ToNanoseconds() <= done.end_time.ToNanoseconds()
    )
    at_once = api.BacktestRequest.FromString(policies("a", "b").SerializeToString())
    at_once.arrivals.extend(SHORT.arrivals)
    at_once.service_seconds.extend(SHORT.service_seconds)
    waited = await asked.backtests.Backtest(at_once, timeout=TIMEOUT)
    assert await reports(asked, begun.name) == list(waited.reports)
    assert done.work_gpu_hours == waited.work_gpu_hours
    assert await create(asked, messages) == done
    with pytest.raises(GpuscaleError) as refused:
        await create(asked, parts(policies("a"), SHORT, request_id=messages[0].request_id))
    assert refused.value.reason == "REQUEST_ID_REUSED"
    assert await listed(asked, filter="state = SUCCEEDED AND done_count = 2") == [begun.name]


async def test_they_wait_for_their_turn_and_each_can_be_ended(asked: Asking) -> None:
    long = api.BacktestSpec(policies=[api.BacktestPolicy(name="p", spec=FAST)])
    first = await create(asked, parts(long, LONG, backtest_id="first"))
    await until(asked, first.name, State.STATE_RUNNING)
    second = await create(asked, parts(long, LONG, backtest_id="second"))
    third = await create(asked, parts(policies("a"), SHORT, backtest_id="third"))
    assert (second.state, third.state) == (State.STATE_PENDING, State.STATE_PENDING)
    assert await listed(asked) == ["backtests/third", "backtests/second", "backtests/first"]
    with pytest.raises(GpuscaleError) as taken:
        await create(asked, parts(policies("a"), SHORT, backtest_id="third"))
    assert taken.value.reason == "ALREADY_EXISTS"
    for _ in range(backtests.MOST_WAITING - 3):
        await create(asked, parts(policies("a"), SHORT))
    with pytest.raises(GpuscaleError) as full:
        await create(asked, parts(policies("a"), SHORT))
    assert full.value.reason == "BACKTESTS_WAITING"
    for name in (second.name, first.name):
        request = api.CancelBacktestRequest(name=name)
        ended = (await asked.backtests.CancelBacktest(request, timeout=TIMEOUT)).backtest
        assert (ended.state, ended.end_reason) == (State.STATE_CANCELLED, Why.END_REASON_CANCELLED)
        assert (await asked.backtests.CancelBacktest(request, timeout=TIMEOUT)).backtest == ended
    await until(asked, third.name, State.STATE_SUCCEEDED)
    delete = api.DeleteBacktestRequest(name=third.name)
    await asked.backtests.DeleteBacktest(delete, timeout=TIMEOUT)
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await reports(asked, third.name)
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_restart_tells_what_it_cut_and_keeps_the_figures(tmp_path: Path) -> None:
    async with asking(tmp_path) as asked:
        both = policies("a")
        both.policies.append(api.BacktestPolicy(name="endless", spec=FAST, workload=LONG))
        running = await create(asked, parts(both, SHORT))
        waiting = await create(asked, parts(policies("a"), SHORT))
        await eventually(lambda: get(asked, running.name), lambda found: found.done_count == 1)
        kept = await reports(asked, running.name)
    async with asking(tmp_path) as asked:
        for name, done in ((running.name, 1), (waiting.name, 0)):
            found = await get(asked, name)
            assert (found.state, found.end_reason) == (State.STATE_FAILED, Why.END_REASON_SERVICE_ENDED)
            assert (found.done_count, bool(found.message), found.HasField("end_time")) == (done, True, True)
        assert await reports(asked, running.name) == kept != []
        after = await create(asked, parts(policies("a"), SHORT))
        await until(asked, after.name, State.STATE_SUCCEEDED)
    async with asking(tmp_path) as asked:
        assert (await get(asked, after.name)).state == State.STATE_SUCCEEDED


@pytest.mark.parametrize("bound", [{"KEPT": 2}, {"KEPT_BYTES": 1}])
async def test_no_more_are_kept_than_a_number_and_their_bytes(
    asked: Asking, monkeypatch: pytest.MonkeyPatch, bound: dict[str, int]
) -> None:
    """The oldest go first, the first made of those that ended at the same time."""
    monkeypatch.setattr("google.protobuf.internal.well_known_types.Timestamp.ToNanoseconds", lambda _: 0)
    for name, value in bound.items():
        monkeypatch.setattr(backtests, name, value)
    made: list[str] = []
    for _ in range(5):
        one = await create(asked, parts(policies("a", "b"), SHORT))
        made.append(one.name)
        await until(asked, one.name, State.STATE_SUCCEEDED)
    left = await listed(asked)
    assert left == made[: -len(left) - 1 : -1]
    assert 1 <= len(left) <= 2
    assert len(await reports(asked, made[-1])) == 2
    with pytest.raises(GpuscaleError):
        await get(asked, made[0])


async def test_a_workload_comes_in_parts_however_it_is_cut(asked: Asking) -> None:
    key = str(uuid.uuid4())
    whole = await create(asked, parts(policies("a"), SHORT, request_id=key))
    cut = await create(asked, parts(policies("a"), SHORT, size=7, request_id=key))
    assert (cut.name, cut.request_count) == (whole.name, 100)
    done = await until(asked, whole.name, State.STATE_SUCCEEDED)
    assert [one.request_count for one in await reports(asked, done.name)] == [100]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ZeroDivisionError(), "a bug; the log of the autoscaler has details"),
        (DatabaseUnavailableError("it is away: server at 10.0.0.1"), "the state cannot be used now"),
    ],
    ids=["a bug", "a database that is away"],
)
async def test_what_breaks_one_ends_that_one_alone_and_tells_no_details(
    asked: Asking, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def broken(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(backtest_jobs, "run_job", broken)
        one = await create(asked, parts(policies("a"), SHORT))
        failed = await until(asked, one.name, State.STATE_FAILED)
    assert failed.end_reason == Why.END_REASON_ERROR
    assert failed.message == told
    other = await create(asked, parts(policies("a"), SHORT))
    await until(asked, other.name, State.STATE_SUCCEEDED)


async def test_one_that_runs_for_too_long_is_cut(asked: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backtests, "LONGEST_RUN", 0.2)
    long = api.BacktestSpec(policies=[api.BacktestPolicy(name="p", spec=FAST)])
    one = await create(asked, parts(long, LONG))
    found = await until(asked, one.name, State.STATE_FAILED)
    assert found.end_reason == Why.END_REASON_TOO_LONG


def wrong() -> Iterator[Any]:
    good = api.CreateBacktestRequest(spec=policies("a"), request_id=str(uuid.uuid4()))
    work = api.CreateBacktestRequest(workload=SHORT)
    yield [], "spec"
    yield [work], "spec"
    yield [api.CreateBacktestRequest(spec=policies("a"))], "request_id"
    yield [good], "workload.arrivals"
    yield [good, api.CreateBacktestRequest(workload=SHORT, policy="b")], "policy"
    yield [good, work, work], "workload.arrivals"
    yield [good, api.CreateBacktestRequest(workload=api.Workload(arrivals=[1]))], "workload.service_seconds"
    own = api.CreateBacktestRequest(workload=api.Workload(arrivals=[1]), policy="a")
    yield [good, own], "spec.policies[0].workload.service_seconds"
    yield [good, api.CreateBacktestRequest(workload=api.Workload(arrivals=[-1]))], "workload.arrivals[0]"
    twice = api.CreateBacktestRequest(spec=policies("a", "a"), request_id=str(uuid.uuid4()))
    yield [twice, work], "spec.policies[1].name"


async def test_what_cannot_be_run_is_refused(asked: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    for messages, field in wrong():
        with pytest.raises(GpuscaleError) as refused:
            await create(asked, messages)
        assert [one.field for one in getattr(refused.value, "violations", ())] == [field]
    assert await listed(asked) == []
    monkeypatch.setattr(backtests, "MOST_REQUESTS", 150)
    await create(asked, parts(policies("a"), SHORT))
    with pytest.raises(GpuscaleError, match="more than 150 requests"):
        await create(asked, [*parts(policies("a"), SHORT), api.CreateBacktestRequest(workload=SHORT)])


async def test_a_caller_that_sends_nothing_more_makes_room_again(
    asked: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backtests, "MOST_WAITING", 1)

    async def silent() -> AsyncIterator[api.CreateBacktestRequest]:
        yield parts(policies("a"), SHORT)[0]
        await asyncio.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr(backtests, "LONGEST_SENDING", 0.2)
        with pytest.raises(GpuscaleError) as late, rpc_errors():
            await asked.backtests.CreateBacktest(silent(), timeout=TIMEOUT)
    assert late.value.reason == "DEADLINE_EXCEEDED"
    await create(asked, parts(policies("a"), SHORT))

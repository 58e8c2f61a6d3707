"""Recordings, history and health of a fleet over real gRPC, with a clock that the test moves."""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import seconds, to_duration, to_timestamp
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.app import fleet as observing
from gpuscale.monitor.fleet.nodes import Nodes
from tests.support.clock import ManualClock
from tests.support.monitor import RunningFleet, running_fleet
from tests.support.monitor_values import DEFAULT_TIERS, hello, snapshot, telemetry
from tests.support.waiting import eventually

Call = grpc.aio.StreamStreamCall[
    monitor_internal.StreamTelemetryRequest, monitor_internal.StreamTelemetryResponse
]


def gpus(percent: float | None) -> tuple[types_api.Gpu, ...]:
    """GPUs 1 and 2 of a node, read this moment; the second one says nothing but its temperature."""
    first = types_api.GpuReading(
        utilization_percent=percent, memory_total_bytes=1000, memory_used_bytes=250, age=to_duration(0)
    )
    second = types_api.GpuReading(temperature_celsius=40, age=to_duration(0))
    return (
        types_api.Gpu(uuid="GPU-1", index=0, model="A", state="GPU_STATE_OK", reading=first),
        types_api.Gpu(uuid="GPU-2", index=1, model="B", state="GPU_STATE_OK", reading=second),
    )


@dataclass
class Site:
    """A fleet, one agent's stream to it, and stubs."""

    clock: ManualClock
    fleet: RunningFleet
    call: Call
    recordings: api.RecordingServiceStub
    history: api.HistoryServiceStub
    health: api.HealthServiceStub
    seq: int = 0

    async def send(self, shown: tuple[types_api.Gpu, ...], passing: float = 1.0) -> None:
        """Let time pass, then stream a snapshot and wait until it is taken in."""
        self.clock.advance(passing)
        self.seq += 1
        await self.call.write(telemetry(snapshot("alpha", seq=self.seq, gpus=shown)))
        await self.fleet.until("alpha", api.NodeState.NODE_STATE_ONLINE, above_seq=self.seq - 1)

    async def record(self, *names: str, **fields: object) -> api.Recording:
        request = api.StartRecordingRequest(request_id=str(uuid.uuid4()), names=names, **fields)
        return (await self.recordings.StartRecording(request, timeout=30)).recording

    async def events(self, **fields: object) -> list[api.HealthEvent]:
        answer = await self.health.ListHealthEvents(api.ListHealthEventsRequest(**fields), timeout=30)
        return list(answer.health_events)

    async def quarantine(self) -> str:
        return (await self.fleet.node("alpha")).snapshot.gpus[0].quarantine


@asynccontextmanager
async def open_site(clock: ManualClock, data_dir: Path | None = None) -> AsyncGenerator[Site, None]:
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(clock=clock, data_dir=data_dir))
        channel = await stack.enter_async_context(open_channel(fleet.address))
        call = fleet.telemetry.StreamTelemetry()
        stack.callback(call.cancel)
        await call.write(telemetry(hello("alpha")))
        found = Site(
            clock,
            fleet,
            call,
            api.RecordingServiceStub(channel),
            api.HistoryServiceStub(channel),
            api.HealthServiceStub(channel),
        )
        yield found


@pytest.fixture
def tick() -> float:
    return 0.02


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch, tick: float) -> AsyncGenerator[Site, None]:
    monkeypatch.setattr(observing, "TICK_SECONDS", tick)
    async with open_site(ManualClock(10_000.0)) as found:
        await found.send(gpus(10.0))
        yield found


async def status(call: "grpc.aio.UnaryUnaryCall[object, object]") -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def test_a_recording_tells_minimum_maximum_mean_and_count_of_what_was_read(site: Site) -> None:
    begun = await site.record("nodes/alpha")
    for percent in (20.0, None, 60.0):
        await site.send(gpus(percent))
    stopped = await site.recordings.StopRecording(api.StopRecordingRequest(name=begun.name), timeout=30)
    recording = stopped.recording
    assert recording.state == api.Recording.STATE_STOPPED
    assert (recording.sample_count, seconds(recording.duration)) == (3, 3.0)
    first, second = recording.gpus
    figures = {one.metric: (one.min, one.max, one.mean, one.sample_count) for one in first.stats}
    assert figures[api.Metric.METRIC_UTILIZATION_PERCENT] == (20.0, 60.0, 40.0, 2)
    assert figures[api.Metric.METRIC_MEMORY_USED_PERCENT] == (25.0, 25.0, 25.0, 3)
    assert api.Metric.METRIC_POWER_WATTS not in figures
    assert [one.metric for one in second.stats] == [api.Metric.METRIC_TEMPERATURE_CELSIUS]


async def test_recordings_are_listed_and_deleted_and_refusals_say_why(site: Site) -> None:
    begun = await site.record(recording_id="mine", uuids=["GPU-2"])
    assert [gpu.uuid for gpu in begun.gpus] == ["GPU-2"]
    listed = await site.recordings.ListRecordings(api.ListRecordingsRequest(), timeout=30)
    assert [one.name for one in listed.recordings] == ["recordings/mine"]
    await site.record("nodes/alpha", recording_id="yours")
    await site.recordings.StopRecording(api.StopRecordingRequest(name="recordings/yours"), timeout=30)
    for fields, names in (
        ({"filter": "state = RUNNING"}, ["mine"]),
        ({"filter": 'gpus.uuid:"GPU-1"'}, ["yours"]),
        ({"order_by": "name desc"}, ["yours", "mine"]),
    ):
        listed = await site.recordings.ListRecordings(api.ListRecordingsRequest(**fields), timeout=30)
        assert [one.name for one in listed.recordings] == [f"recordings/{name}" for name in names]
        assert all(one.gpus for one in listed.recordings)
    await site.recordings.DeleteRecording(api.DeleteRecordingRequest(name="recordings/mine"), timeout=30)
    get = site.recordings.GetRecording(api.GetRecordingRequest(name="recordings/mine"), timeout=30)
    assert await status(get) is grpc.StatusCode.NOT_FOUND

    def start(**fields: object) -> "grpc.aio.UnaryUnaryCall[object, object]":
        request = api.StartRecordingRequest(request_id=str(uuid.uuid4()), **fields)
        return site.recordings.StartRecording(request, timeout=30)

    assert await status(start()) is grpc.StatusCode.INVALID_ARGUMENT
    assert await status(start(names=["alpha"])) is grpc.StatusCode.INVALID_ARGUMENT
    assert await status(start(names=["nodes/beta"])) is grpc.StatusCode.NOT_FOUND
    assert await status(start(uuids=["GPU-9"])) is grpc.StatusCode.NOT_FOUND
    too_fast = start(names=["nodes/alpha"], interval=to_duration(0.5))
    assert await status(too_fast) is grpc.StatusCode.FAILED_PRECONDITION


async def test_history_is_by_gpu_and_node_and_absent_is_not_zero(site: Site) -> None:
    for percent in (20.0, None, 60.0):
        await site.send(gpus(percent))
    request = api.QueryHistoryRequest(names=["nodes/alpha"], uuids=["GPU-1", "gpu-2"])
    answer = await site.history.QueryHistory(request, timeout=30)
    found = {(one.name, one.metric): [point.mean for point in one.points] for one in answer.series}
    gpu = "nodes/alpha/gpus/gpu-1"
    assert found[gpu, api.Metric.METRIC_UTILIZATION_PERCENT] == [10.0, 20.0, 60.0]
    assert found[gpu, api.Metric.METRIC_MEMORY_USED_BYTES] == [250.0] * 4
    assert (gpu, api.Metric.METRIC_POWER_WATTS) not in found
    assert found["nodes/alpha", api.Metric.METRIC_CPU_PERCENT] == [5.0] * 4
    assert (seconds(answer.step), list(answer.not_kept)) == (1.0, [])
    assert answer.oldest_time.seconds == to_timestamp(site.clock.wall()).seconds - 4
    only = api.QueryHistoryRequest(
        uuids=["GPU-1"],
        metrics=[api.Metric.METRIC_UTILIZATION_PERCENT],
        span=api.HistorySpan(last=to_duration(3600)),
        step=to_duration(60),
    )
    coarse = await site.history.QueryHistory(only, timeout=30)
    [series] = coarse.series
    assert sum(point.sample_count for point in series.points) == 3
    assert (series.points[0].min, series.points[-1].max) == (10.0, 60.0)


async def test_history_that_finds_no_memory_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observing, "TICK_SECONDS", 0.0)
    clock = ManualClock()
    one = observing.Observing(Nodes(clock, 9), clock, DEFAULT_TIERS, 1)
    running = asyncio.create_task(one.run())
    for _ in range(3):
        one.history.add("gpu-1", clock.now(), (1.0,) * 7)
        await asyncio.sleep(0.01)
    running.cancel()
    assert one.history.left_out == 3
    assert [str(line.msg).count("no memory left") for line in caplog.records] == [1]


async def test_trends_tell_where_metrics_are_going(site: Site) -> None:
    for percent in (20.0, 30.0, 40.0):
        await site.send(gpus(percent), passing=60.0)
    request = api.QueryTrendsRequest(uuids=["GPU-1"])
    early = await site.history.QueryTrends(request, timeout=30)
    assert not any(trend.HasField("slope_per_hour") for trend in early.trends), "3 min say nothing of an hour"
    for percent in (50.0, 60.0):
        await site.send(gpus(percent), passing=60.0)
    answer = await site.history.QueryTrends(request, timeout=30)
    trends = {trend.stats.metric: trend for trend in answer.trends}
    assert trends[api.Metric.METRIC_UTILIZATION_PERCENT].slope_per_hour == pytest.approx(600.0)
    assert trends[api.Metric.METRIC_MEMORY_USED_BYTES].slope_per_hour == 0.0


async def test_a_span_must_make_sense(site: Site) -> None:
    moment, names = to_timestamp(site.clock.wall()), ["nodes/alpha"]
    twice = api.HistorySpan(last=to_duration(1), start_time=moment)
    without_begin = api.HistorySpan(end_time=moment)
    empty = api.HistorySpan(start_time=moment, end_time=moment)
    for span in (twice, without_begin, empty):
        query = site.history.QueryHistory(api.QueryHistoryRequest(names=names, span=span), timeout=30)
        assert await status(query) is grpc.StatusCode.INVALID_ARGUMENT
        trends = site.history.QueryTrends(api.QueryTrendsRequest(names=names, span=span), timeout=30)
        assert await status(trends) is grpc.StatusCode.INVALID_ARGUMENT


def faults(xid: int, seq: int = 0) -> monitor_internal.StreamTelemetryRequest:
    fault = monitor_internal.ReportedFault(uuid="GPU-1", xid=xid, seq=seq, age=to_duration(0.1))
    return monitor_internal.StreamTelemetryRequest(faults=monitor_internal.ReportedFaults(faults=[fault]))


async def test_a_watch_goes_on_with_what_was_resolved_meanwhile(site: Site) -> None:
    request = api.WatchHealthRequest(filter="fatal = true")
    watch = site.health.WatchHealth(request)
    async with asyncio.timeout(30):
        await watch.read()
        await site.call.write(faults(48))
        told = await watch.read()
        assert isinstance(told, api.WatchHealthResponse)
        watch.cancel()
        clear = api.ClearQuarantineRequest(name="nodes/alpha/gpus/gpu-1")
        await site.health.ClearQuarantine(clear, timeout=30)
        request.resume_token = told.resume_token
        since = await site.health.WatchHealth(request).read()
        assert isinstance(since, api.WatchHealthResponse)
        assert [one.HasField("resolved_time") for one in since.health_events] == [True]
    assert not await site.events()


async def test_recordings_are_watched_from_their_begin_to_their_end(site: Site) -> None:
    before = await site.record("nodes/alpha", recording_id="before")
    watch = site.recordings.WatchRecordings(api.WatchRecordingsRequest())

    async def told() -> api.WatchRecordingsResponse:
        found = await watch.read()
        assert isinstance(found, api.WatchRecordingsResponse)
        return found

    async with asyncio.timeout(30):
        first = await told()
        assert (first.full, [one.name for one in first.recordings]) == (True, [before.name])
        await site.record("nodes/alpha", recording_id="brief", max_duration=to_duration(5))
        assert [one.state for one in (await told()).recordings] == [api.Recording.STATE_RUNNING]
        await site.send(gpus(1.0), passing=6)
        [expired] = (await told()).recordings
        assert (expired.name, expired.state) == ("recordings/brief", api.Recording.STATE_EXPIRED)
        await site.recordings.StopRecording(api.StopRecordingRequest(name=before.name), timeout=30)
        [stopped] = (await told()).recordings
        assert (stopped.state, stopped.sample_count, len(stopped.gpus)) == (api.Recording.STATE_STOPPED, 1, 2)
        await site.recordings.DeleteRecording(api.DeleteRecordingRequest(name=before.name), timeout=30)
        assert list((await told()).removed) == [before.name]
    watch.cancel()


async def _both(site: Site) -> list[api.HealthEvent]:
    found = await site.events(show_resolved=True)
    return found if len(found) == 2 else []


@pytest.mark.parametrize("tick", [3600.0], ids=["nobody looks for silence"])
async def test_events_of_a_time_and_of_a_gpu(site: Site) -> None:
    """At any moment at which they lasted; those that were dropped are said."""
    begin = site.clock.wall()
    await site.call.write(faults(119))
    await eventually(lambda: site.events(uuid="gpu-1"))
    of_other = site.health.WatchHealth(api.WatchHealthRequest(uuid="GPU-2"))
    async with asyncio.timeout(30):
        first = await of_other.read()
    assert isinstance(first, api.WatchHealthResponse)
    assert (first.full, len(first.health_events)) == (True, 0)
    of_other.cancel()

    def later(seconds: float) -> Timestamp:
        return to_timestamp(begin + timedelta(seconds=seconds))

    assert await site.events(since=later(3600), until=later(7200)), "it lasts"
    assert not await site.events(until=later(-60))
    site.clock.advance(60)
    await site.health.ClearQuarantine(api.ClearQuarantineRequest(name="nodes/alpha/gpus/gpu-1"), timeout=30)
    assert await site.events(show_resolved=True, since=later(30), until=later(40))
    assert not await site.events(show_resolved=True, since=later(3600))
    request = api.ListHealthEventsRequest(since=later(1), until=later(0))
    refused = site.health.ListHealthEvents(request, timeout=30)
    assert await status(refused) is grpc.StatusCode.INVALID_ARGUMENT
    await site.call.write(faults(48, seq=1))
    [newest, oldest] = await eventually(lambda: _both(site))
    assert (newest.xid, oldest.xid) == (48, 119)
    by_age = api.ListHealthEventsRequest(show_resolved=True, order_by="start_time", page_size=1)
    for xid, late in ((119, -1e-6), (48, 1e-6)):
        site.clock.step_wall(late)  # the clocks are read one after the other
        page = await site.health.ListHealthEvents(by_age, timeout=30)
        assert [one.xid for one in page.health_events] == [xid]
        by_age.page_token = page.next_page_token
    stale = [api.HealthCheck.HEALTH_CHECK_COLLECTION_STALE]
    assert not await site.events(show_resolved=True, checks=stale)
    lasts = await site.events(show_resolved=True, filter='NOT resolved_time:* AND node = "nodes/alpha"')
    assert [one.xid for one in lasts] == [48]
    got = await site.health.GetHealthEvent(api.GetHealthEventRequest(name=newest.name), timeout=30)
    assert got.health_event == newest
    unknown = api.GetHealthEventRequest(name="healthEvents/0")
    assert await status(site.health.GetHealthEvent(unknown, timeout=30)) is grpc.StatusCode.NOT_FOUND


async def test_a_quarantine_outlives_the_fleet(tmp_path: Path) -> None:
    """When it ends, and that no silence of its node ends it, is said in tests/unit/monitor."""
    clock = ManualClock(10_000.0)
    async with open_site(clock, tmp_path) as before:
        await before.send(gpus(10.0))
        await before.call.write(faults(79))
        await eventually(before.quarantine)
        [begun] = await before.events(uuid="GPU-1")
    async with open_site(clock, tmp_path) as after:
        assert [one.name for one in await after.events(uuid="GPU-1")] == [begun.name]
        await after.send(gpus(10.0), passing=60.0)
        assert "XID 79" in await after.quarantine()

"""RecordingService on the wire."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.filters import compile_filter, listed
from gpuscale.common.names import RECORDING, parse
from gpuscale.common.rpc.feed import FeedView, ResourceFeed
from gpuscale.common.runtime.tasks import Clock, uninterrupted
from gpuscale.common.security.auth import Context
from gpuscale.common.wire import absence_allowed, fingerprint, optional_seconds, page_limit, to_duration
from gpuscale.monitor.fleet.nodes import Directory
from gpuscale.monitor.observing.samples import Dates, to_stats
from gpuscale.monitor.recording import RecordedGpu, Recording, RecordingOrder, Recordings, RecordingState

DEFAULT_INTERVAL_SECONDS = 1.0
DEFAULT_MAX_DURATION_SECONDS = 3_600.0
MOST_GPUS_OF_A_PAGE = 4_096
"""Maximum number of GPUs in a page of recordings; a message has room for some 8,000."""
GPUS_AT_ONCE = 64
"""GPUs written into a message before other tasks can run."""

Keep = Callable[[str], Awaitable[None]]
"""Stores a recording, by id, after it began, ended or was deleted."""


async def forget(_: str) -> None:
    """Store nothing, for a fleet without a data directory."""


class RecordingFeed:
    """The feed of recordings. Call `tell` after each change, and now and then for expired ones."""

    def __init__(self, recordings: Recordings, clock: Clock) -> None:
        self.recordings = recordings
        self.feed: ResourceFeed[Recording] = ResourceFeed(
            api.WatchRecordingsResponse,
            lambda one, _: to_recording(one, Dates.of(clock), one.gpus),
            shared=1.0,
        )
        self._clock = clock
        self._told: dict[str, RecordingState] = {}

    def tell(self) -> None:
        """Publish what began, ended or was dropped since the last call."""
        kept = {f"recordings/{one.order.id}": one for one in self.recordings.all(self._clock.now())}
        for name in self._told.keys() - kept:
            del self._told[name]
            self.feed.remove(name)
        for name, one in kept.items():
            if self._told.get(name) is not one.state:
                self._told[name] = one.state
                self.feed.put(name, one)


class RecordingServicer(api.RecordingServiceServicer):
    """Starts, stops and serves recordings."""

    def __init__(self, told: RecordingFeed, directory: Directory, clock: Clock, keep: Keep) -> None:
        self._keep = keep
        self._recordings = told.recordings
        self._told = told
        self._directory = directory
        self._clock = clock
        self._dates = Dates.of(clock)

    @uninterrupted
    async def StartRecording(
        self, request: api.StartRecordingRequest, context: Context
    ) -> api.StartRecordingResponse:
        targets = self._directory.gpus(request.names, request.uuids)
        period = max((target.period for target in targets), default=0.0)
        interval = optional_seconds(request, "interval")
        if interval is not None and interval < period:
            raise FailedPreconditionError(
                f"interval is {interval:g} s, but an agent reads only every {period:g} s",
                reason="INTERVAL_BELOW_PERIOD",
            )
        order = RecordingOrder(
            id=request.recording_id or uuid.uuid4().hex[:12],
            request_id=request.request_id.lower(),
            fingerprint=fingerprint(request),
            interval=interval or max(DEFAULT_INTERVAL_SECONDS, period),
            max_duration=optional_seconds(request, "max_duration") or DEFAULT_MAX_DURATION_SECONDS,
            targets=targets,
        )
        dates = Dates.of(self._clock)
        recording = self._recordings.start(order, dates.now)
        self._told.tell()
        await self._keep(recording.order.id)
        return api.StartRecordingResponse(recording=await _whole(recording, dates))

    @uninterrupted
    async def StopRecording(
        self, request: api.StopRecordingRequest, context: Context
    ) -> api.StopRecordingResponse:
        dates = Dates.of(self._clock)
        recording = self._recordings.stop(_id(request.name), dates.now)
        self._told.tell()
        await self._keep(recording.order.id)
        return api.StopRecordingResponse(recording=await _whole(recording, dates))

    async def GetRecording(
        self, request: api.GetRecordingRequest, context: Context
    ) -> api.GetRecordingResponse:
        dates = Dates.of(self._clock)
        recording = self._recordings.get(_id(request.name), dates.now)
        return api.GetRecordingResponse(recording=await _whole(recording, dates))

    async def ListRecordings(
        self, request: api.ListRecordingsRequest, context: Context
    ) -> api.ListRecordingsResponse:
        self._dates = dates = Dates.of(self._clock, self._dates)
        recordings = {f"recordings/{one.order.id}": one for one in self._recordings.all(dates.now)}
        by_gpus, found = "gpus" in request.filter.replace("\\", ""), list[api.Recording]()
        for one in recordings.values():
            found.append(to_recording(one, dates, ()))
            await (_add_gpus(found[-1], one) if by_gpus else asyncio.sleep(0))
        largest = max((len(one.gpus) for one in recordings.values()), default=1)
        request.page_size = min(page_limit(request.page_size), max(MOST_GPUS_OF_A_PAGE // largest, 1))
        shown, token = listed(found, request, api.Recording, key=lambda one: one.name, encode=lambda one: one)
        for message in () if by_gpus else shown:
            await _add_gpus(message, recordings[message.name])
        return api.ListRecordingsResponse(recordings=shown, next_page_token=token)

    async def WatchRecordings(
        self, request: api.WatchRecordingsRequest, context: Context
    ) -> AsyncGenerator[Any]:
        matches = compile_filter(request.filter, api.Recording) if request.filter else None
        self._told.tell()
        async for message in self._told.feed.stream(request, FeedView(matches=matches)):
            yield message

    @uninterrupted
    async def DeleteRecording(
        self, request: api.DeleteRecordingRequest, context: Context
    ) -> api.DeleteRecordingResponse:
        key = _id(request.name)
        with absence_allowed(request):
            self._recordings.delete(key, self._clock.now())
        self._told.tell()
        await self._keep(key)  # even if it is gone, since an earlier call may have failed to write
        return api.DeleteRecordingResponse()


def _id(name: str) -> str:
    return parse(RECORDING, name)["recording"]


async def _whole(recording: Recording, dates: Dates) -> api.Recording:
    message = to_recording(recording, dates, ())
    await _add_gpus(message, recording)
    return message


async def _add_gpus(message: api.Recording, recording: Recording) -> None:
    """Add the GPUs to a message without them; other tasks can run meanwhile."""
    for start in range(0, len(recording.gpus), GPUS_AT_ONCE):
        await asyncio.sleep(0)
        message.gpus.extend(map(_gpu, recording.gpus[start : start + GPUS_AT_ONCE]))
    message.sample_count = max((gpu.sample_count for gpu in message.gpus), default=0)


def _gpu(gpu: RecordedGpu) -> api.RecordedGpu:
    return api.RecordedGpu(
        name=gpu.target.name,
        uuid=gpu.target.uuid,
        index=gpu.target.index,
        model=gpu.target.model,
        sample_count=gpu.figures.sample_count,
        stats=[to_stats(metric, stats) for metric, stats in gpu.figures.stats()],
    )


def to_recording(recording: Recording, dates: Dates, gpus: Sequence[RecordedGpu]) -> api.Recording:
    """A recording as a message, with these of its GPUs."""
    ended = recording.ended_at
    return api.Recording(
        name=f"recordings/{recording.order.id}",
        state=api.Recording.State.Value(f"STATE_{recording.state.name}"),
        interval=to_duration(recording.order.interval),
        max_duration=to_duration(recording.order.max_duration),
        start_time=dates.timestamp(recording.started_at),
        end_time=None if ended is None else dates.timestamp(ended),
        duration=to_duration(recording.duration(dates.now)),
        sample_count=recording.sample_count,
        gpus=map(_gpu, gpus),
    )

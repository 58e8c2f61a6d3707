"""Stores recordings, health events and history across runs of the fleet.

The coarsest tier of history, changed health events and running recordings are written every `SAVE_SECONDS`; a recording also
when it begins, ends or is deleted, before the answer. A crash loses less than a minute: what was read since the last write, and
up to a step of the second coarsest tier. Times in the JSON of recordings and events are of the stored timeline.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import islice
from math import ceil
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Clock, TaskScope
from gpuscale.monitor.health.checks import Event, Finding, HealthAction, HealthCheck, HealthSeverity
from gpuscale.monitor.health.events import Events
from gpuscale.monitor.history.history import History, metrics_of
from gpuscale.monitor.history.ring import CHUNK, Rows, chunks, row_bytes, unpack
from gpuscale.monitor.model.metrics import GPU_METRICS, MetricTally
from gpuscale.monitor.recording import (
    NEVER,
    Figures,
    RecordedGpu,
    Recording,
    RecordingOrder,
    Recordings,
    RecordingState,
    Target,
)
from gpuscale.monitor.state.store import DATABASE, BootTimeline, Chunk, FleetStore, Saving, continued

SAVE_SECONDS = 45.0
SERIES_AT_ONCE = 32
"""Series examined before other tasks can run: the samples that wait are moved too, 0.1 ms of a GPU."""
SERIES_PER_READ = 8

_Text = tuple[Recording, RecordingState, str]
"""A recording, its state, and its JSON in that state."""
_Newest = tuple[int, int]
"""The number of a series' newest saved bucket, and its sample count: it may still grow."""
_LOWEST_NUMBER = -(2**31)

_log = get_logger(__name__)


class Saver:
    """Restores and saves the state; call `restore` first. `failed` counts failed saves."""

    def __init__(
        self, store: FleetStore, history: History, recordings: Recordings, events: Events, clock: Clock
    ) -> None:
        self._store = store
        self._history = history
        self._recordings = recordings
        self._events = events
        self._clock = clock
        self._timeline = BootTimeline("", 0.0)
        self._final: dict[str, Recording] = {}  # recordings whose end is on disk
        self._tier = history.tiers[-1]
        self._saved: dict[str, _Newest] = {}  # by series
        self._failing = False
        self.failed = 0

    async def restore(self) -> None:
        """Restore the state of the last run. FailedPreconditionError (STATE_UNREADABLE) if it is invalid."""
        before, newest = await self._store.boot()
        wall = self._clock.wall().timestamp()
        self._timeline = continued(before, newest, self._clock.boot_id, self._clock.now(), wall)
        try:
            for text in await self._store.bodies("recording"):
                recording = recording_from_text(text, self._timeline.offset)
                self._recordings.restore(recording)
                self._note_final(recording, recording.state)
            offset = self._timeline.offset
            self._events.restore(
                [event_from_text(text, offset) for text in await self._store.bodies("healthevent")]
            )
            async for key, rows in self._series():
                last = _newest(rows, len(metrics_of(key))) if rows.numbers else None
                if last is not None and self._history.restore(key, rows):
                    self._saved[key] = last
        except (ValueError, OverflowError) as error:
            raise FailedPreconditionError(
                f"cannot read {DATABASE} ({error}); it is unchanged", reason="STATE_UNREADABLE"
            ) from error

    async def run(self) -> None:
        """Save at intervals until cancelled."""
        while True:
            await asyncio.sleep(SAVE_SECONDS)
            await self.try_to_save()

    async def try_to_save(self) -> None:
        """Save; failures are logged once, and once when saving works again."""
        try:
            await self.save()
            if self._failing:
                _log.info("recordings, health events and history are saved again")
            self._failing = False
        except (UnavailableError, FailedPreconditionError) as error:
            self.failed += 1
            if not self._failing:
                what = "recordings, health events and history cannot be saved"
                _log.error(what, reason=error.reason, message=error.message)
            self._failing = True

    async def save(self) -> None:
        """Write what has changed. UnavailableError if that fails."""
        texts = [
            await self._text(recording)
            for recording in self._recordings.all(self._clock.now())
            if self._final.get(recording.order.id) is not recording
        ]
        changed, newest = list[Chunk](), dict[str, _Newest]()
        every_series = self._history.all()
        while part := list(islice(every_series, SERIES_AT_ONCE)):
            for key, series in part:
                shift, width, last = self._shift(), len(metrics_of(key)), self._saved.get(key)
                # From the start of the chunk of the last saved bucket.
                first = _LOWEST_NUMBER if last is None else (last[0] + shift) // CHUNK * CHUNK - shift
                rows = series.coarsest(first)
                if rows.numbers and _newest(rows, width) != last:
                    newest[key] = _newest(rows, width)
                    changed += [(key, number, body) for number, body in chunks(rows, width, shift)]
            await asyncio.sleep(0)
        await self._write(texts, changed)
        there = dict(self._history.all())  # `get` would shorten all at once
        self._saved = {key: last for key, last in (self._saved | newest).items() if key in there}

    async def save_recording(self, key: str) -> None:
        """Write one recording, or its deletion. Raises as `save`."""
        recordings = self._recordings.all(self._clock.now())
        await self._write(
            [await self._text(recording) for recording in recordings if recording.order.id == key], ()
        )

    async def _text(self, recording: Recording) -> _Text:
        state, pieces = recording.state, list[str]()
        for piece in recording_to_text(recording, self._timeline.offset):
            pieces.append(piece)
            await asyncio.sleep(0)
        return recording, state, "".join(pieces)

    def _note_final(self, recording: Recording, state: RecordingState) -> None:
        if state is not RecordingState.RUNNING:
            self._final[recording.order.id] = recording

    async def _write(self, texts: Sequence[_Text], found: Sequence[Chunk]) -> None:
        """Write; skips recordings that ended or were deleted meanwhile, as that call writes them."""
        kept = {recording.order.id: recording for recording in self._recordings.all(self._clock.now())}
        texts = [text for text in texts if text[0].state is text[1] and kept.get(text[0].order.id) is text[0]]
        timeline, now = self._timeline, self._timeline.stored(self._clock.now())
        changed, self._events.unsaved = self._events.unsaved, set()
        saving = Saving(
            timeline=timeline,
            newest=now,
            recordings={recording.order.id: text for recording, _, text in texts},
            chunks=found,
            kept=list(kept),
            oldest_chunk=int((now - self._tier.retention) // (self._tier.step * CHUNK)),
            events={
                key: event_to_text(event, timeline.offset) if (event := self._events.get(key)) else ""
                for key in changed
            },
        )
        try:
            await self._store.save(saving)
        except (UnavailableError, FailedPreconditionError):
            self._events.unsaved |= changed
            raise
        self._final = {key: recording for key, recording in self._final.items() if key in kept}
        for recording, state, _ in texts:
            self._note_final(recording, state)

    def _shift(self) -> int:
        """What is added to the number of a bucket where it is stored."""
        return round(self._timeline.offset / self._tier.step)

    async def _series(self) -> AsyncGenerator[tuple[str, Rows], None]:
        """The stored rows of each series, as far as there is memory, without expired ones and those from the future."""
        shift, now, tier = self._shift(), self._clock.now(), self._tier
        kept = range(ceil((now - tier.retention) / tier.step), int(now // tier.step) + 1)
        there = range((kept.start + shift) // CHUNK, (kept.stop + shift - 1) // CHUNK + 1)
        # Room is made before, or the first series would be read whole, and shortened for those that follow.
        keys = await self._store.series(there[1:-1])
        self._history.make_room(count=sum(surely and "/" not in key for key, surely in keys))
        for start in range(0, len(keys), SERIES_PER_READ):
            # One chunk more, as the newest counts for nothing where it ends in the future, and the bucket that may still grow.
            most = self._history.kept[-1].capacity + CHUNK + 1
            part = [key for key, _ in keys[start : start + SERIES_PER_READ]]
            sizes = {key: most * row_bytes(len(metrics_of(key))) for key in part}
            for key, bodies in (await self._store.chunks(sizes, there)).items():
                yield key, unpack(reversed(bodies), len(metrics_of(key)), shift, kept)


def _newest(rows: Rows, width: int) -> _Newest:
    return rows.numbers[-1], sum(rows.counts[-width:])


@asynccontextmanager
async def open_saver(
    directory: Path, history: History, recordings: Recordings, events: Events, clock: Clock
) -> AsyncGenerator[Saver, None]:
    """Restore the state in a directory, which the caller has locked, and save it until the block ends.

    FailedPreconditionError if the file is damaged or of another version; it is unchanged.
    """
    async with FleetStore.open(directory) as store:
        saver = Saver(store, history, recordings, events, clock)
        await saver.restore()
        async with TaskScope() as tasks:
            tasks.spawn("fleet save", saver.run())
            yield saver
        await saver.try_to_save()


GPUS_AT_ONCE = 64
"""GPUs of a recording written before other tasks can run."""
_EVENT_TIMES = ("started_at", "last_at", "resolved_at")


def recording_to_text(recording: Recording, shift: float) -> Iterator[str]:
    """A recording as JSON with `shift` seconds added to its times, in pieces: a large one has a megabyte."""
    ended = recording.ended_at
    head = {
        "state": recording.state.name,
        "started_at": recording.started_at + shift,
        "ended_at": None if ended is None else ended + shift,
        "order": recording.order,
    }
    yield json.dumps(head, default=_fields).removesuffix("}") + ', "gpus": ['
    for start in range(0, len(recording.gpus), GPUS_AT_ONCE):
        part = [
            {
                "sample_count": figures.sample_count,
                "last_at": figures.last_at + shift if figures.sample_count else None,
                "tallies": {
                    metric.name: tally
                    for metric, tally in zip(GPU_METRICS, figures.tallies, strict=False)
                    if tally.count
                },
            }
            for figures in (gpu.figures for gpu in recording.gpus[start : start + GPUS_AT_ONCE])
        ]
        yield (", " if start else "") + json.dumps(part, default=_fields)[1:-1]
    yield "]}"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


def recording_from_text(text: str, shift: float) -> Recording:
    """Parse a recording, subtracting `shift` seconds from its times. ValueError if it is invalid."""
    try:
        found: dict[str, Any] = json.loads(text)
        order = found["order"]
        targets = tuple(Target(**target) for target in order.pop("targets"))
        gpus: list[RecordedGpu] = []
        for target, gpu in zip(targets, found["gpus"], strict=True):
            last, kept = gpu["last_at"], gpu["tallies"]
            tallies = [MetricTally(**kept.get(metric.name, {})) for metric in GPU_METRICS]
            last_at = NEVER if last is None else last - shift
            gpus.append(RecordedGpu(target, Figures(gpu["sample_count"], last_at, tallies)))
        ended = found["ended_at"]
        return Recording(
            RecordingOrder(targets=targets, **order),
            found["started_at"] - shift,
            gpus,
            RecordingState[found["state"]],
            None if ended is None else ended - shift,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid recording: {error}") from error


def event_to_text(event: Event, shift: float) -> str:
    """An event as JSON with `shift` seconds added to its times."""
    fields = asdict(event)
    fields |= fields.pop("finding")
    fields |= {name: fields[name] + shift for name in _EVENT_TIMES if fields[name] is not None}
    return json.dumps(fields, default=attrgetter("name"))  # of enums


def event_from_text(text: str, shift: float) -> Event:
    """Parse an event, subtracting `shift` seconds from its times. ValueError if it is invalid."""
    try:
        found: dict[str, Any] = {"boot_id": ""} | json.loads(text)
        found |= {name: found[name] - shift for name in _EVENT_TIMES if found[name] is not None}
        found["check"] = HealthCheck[found["check"]]
        severity, action = HealthSeverity[found.pop("severity")], HealthAction[found.pop("action")]
        found["finding"] = Finding(severity, action, found.pop("message"), found.pop("fatal"))
        return Event(**found)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"invalid health event: {error}") from error

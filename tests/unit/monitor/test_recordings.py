"""Recordings: which samples they take in, what they come to, and how they stand on disk."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import TypeVar
from unittest.mock import AsyncMock, Mock

import pytest

from gpuscale.api.monitor import v1 as api
from gpuscale.common.errors import ResourceExhaustedError
from gpuscale.common.rpc.channel import MAX_MESSAGE_BYTES
from gpuscale.monitor.fleet.nodes import MOST_GPUS, Directory, Nodes
from gpuscale.monitor.health.events import Events
from gpuscale.monitor.model.metrics import ABSENT, Sample
from gpuscale.monitor.observing import recording_servicer as servicer
from gpuscale.monitor.observing.recording_servicer import RecordingFeed, RecordingServicer, forget
from gpuscale.monitor.recording import RecordingOrder, Recordings, RecordingState, Target
from gpuscale.monitor.state.saver import Saver, recording_from_text
from tests.support.clock import ManualClock
from tests.support.monitor_values import DEFAULT_TIERS

T = TypeVar("T")
NOTHING: Sample = (ABSENT,) * 7


def order(key: str = "r1", *, interval: float = 1.0, most: float = 100.0) -> RecordingOrder:
    targets = [Target(f"nodes/alpha/gpus/gpu-{i}", f"GPU-{i}", i, "Test GPU", period=1.0) for i in range(2)]
    return RecordingOrder(key, f"request of {key}", "same", interval, most, targets)


def busy(percent: float) -> Sample:
    return (percent, *NOTHING[1:])


def test_it_ends_by_itself_at_its_longest_duration() -> None:
    recordings = Recordings()
    recordings.start(order(most=5.0), 10.0)
    assert recordings.get("r1", 15.0).state is RecordingState.RUNNING
    found = recordings.get("r1", 99.0)
    assert (found.state, found.ended_at, found.duration(99.0)) == (RecordingState.EXPIRED, 15.0, 5.0)
    assert recordings.stop("r1", 100.0).state is RecordingState.EXPIRED


def test_stopping_twice_changes_nothing() -> None:
    recordings = Recordings()
    recordings.start(order(), 10.0)
    assert recordings.stop("r1", 12.0).duration(12.0) == 2.0
    assert recordings.stop("r1", 50.0).duration(50.0) == 2.0


def test_the_one_that_ended_first_makes_room_and_running_ones_never_do() -> None:
    recordings = Recordings(most_kept=2)
    recordings.start(order("a"), 1.0)
    recordings.start(order("b"), 1.0)
    with pytest.raises(ResourceExhaustedError):
        recordings.start(order("c"), 2.0)
    recordings.stop("b", 3.0)
    recordings.start(order("c"), 4.0)
    assert [one.order.id for one in recordings.all(4.0)] == ["a", "c"]


def test_running_recordings_have_a_limited_number_of_gpus_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuscale.monitor.recording.MOST_RECORDED", 5)
    recordings = Recordings()
    for key in ("a", "b"):
        recordings.start(order(key), 1.0)
    with pytest.raises(ResourceExhaustedError):
        recordings.start(order("c"), 2.0)
    recordings.stop("a", 3.0)
    recordings.start(order("c"), 4.0)


def recorder(recordings: Recordings, clock: ManualClock) -> RecordingServicer:
    return RecordingServicer(RecordingFeed(recordings, clock), Directory(Nodes(clock, 1)), clock, forget)


async def test_a_page_has_as_many_recordings_as_there_is_room_for_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one at least."""
    monkeypatch.setattr(servicer, "MOST_GPUS_OF_A_PAGE", 5)
    recordings = Recordings()
    service = recorder(recordings, ManualClock(1.0))

    async def pages() -> list[int]:
        """How many recordings each page has."""
        found, token = list[int](), ""
        while token or not found:
            request = api.ListRecordingsRequest(page_size=3, page_token=token)
            answer = await service.ListRecordings(request, Mock())
            found.append(len(answer.recordings))
            token = answer.next_page_token
        return found

    for number in range(5):
        recordings.start(order(f"r{number}"), 1.0)  # of two GPUs each
    assert await pages() == [2, 2, 1]
    targets = [Target(f"nodes/a/gpus/{i}", f"GPU-{i}", i, "Test GPU", 1.0) for i in range(9)]
    recordings.start(replace(order("r5"), targets=targets), 1.0)
    assert await pages() == [1] * 6


async def turns_during(work: Awaitable[T]) -> tuple[int, T]:
    """How often another task had its turn meanwhile, and what came of it."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    found = await work
    counting.cancel()
    return turns, found


def large() -> Recordings:
    """A recording `r1` of as many GPUs as there can be."""
    recordings = Recordings()
    targets = [
        Target(f"nodes/{'a' * 60}/gpus/{i}", f"GPU-{i:036}", i, "T" * 64, 1.0) for i in range(MOST_GPUS)
    ]
    recordings.start(replace(order(), targets=targets), 1.0)
    for target in targets:
        recordings.add(target.uuid.lower(), 1.5, (100 / 3,) * 7)
    return recordings


async def test_other_work_has_its_turn_while_a_large_recording_is_saved() -> None:
    store = AsyncMock()
    saver = Saver(store, Mock(tiers=DEFAULT_TIERS), large(), Events("1"), ManualClock(2.0))
    turns, _ = await turns_during(saver.save_recording("r1"))
    assert turns >= MOST_GPUS / 64 - 1
    [saving] = store.save.await_args.args
    assert len(recording_from_text(saving.recordings["r1"], 0.0).gpus) == MOST_GPUS


@pytest.mark.parametrize("matching", ["", "state = RUNNING", 'gpus.index:"3"'])
async def test_other_work_has_its_turn_while_a_large_recording_is_shown(matching: str) -> None:
    """And a page has room for it, and for others."""
    service = recorder(large(), ManualClock(2.0))
    got, answer = await turns_during(
        service.GetRecording(api.GetRecordingRequest(name="recordings/r1"), Mock())
    )
    request = api.ListRecordingsRequest(filter=matching)
    listing, page = await turns_during(service.ListRecordings(request, Mock()))
    assert min(got, listing) >= MOST_GPUS / 64 - 1
    message = answer.recording
    assert page.recordings == [message]
    assert (len(message.gpus), message.sample_count) == (MOST_GPUS, 1)
    assert message.ByteSize() * servicer.MOST_GPUS_OF_A_PAGE / MOST_GPUS < MAX_MESSAGE_BYTES


async def test_recordings_listed_by_time_are_each_on_one_page() -> None:
    """The clocks are read one after the other, so that dates differed by microseconds from page to page."""
    clock, recordings = ManualClock(), Recordings()
    for number in range(3):
        recordings.start(order(f"r{number}"), clock.now() - number)
    service, seen, token = recorder(recordings, clock), list[str](), ""
    for _ in range(3):
        clock.step_wall(1e-6)
        request = api.ListRecordingsRequest(page_size=1, page_token=token, order_by="start_time")
        answer = await service.ListRecordings(request, Mock())
        seen += [one.name for one in answer.recordings]
        token = answer.next_page_token
    assert (seen, token) == ([f"recordings/r{number}" for number in (2, 1, 0)], "")


TARGETS = tuple(Target(f"nodes/a/gpus/gpu-{one}", f"GPU-{one}", one, "H100", 1.0) for one in (1, 2))
ORDER = RecordingOrder("r1", "id", "print", 1.0, 600.0, TARGETS)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"order": {}}', "7"])
def test_what_is_no_recording_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        recording_from_text(text, 0.0)

"""What the fleet keeps on disk, through ends of its process of every kind."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.monitor.app.fleet import serve
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.monitor.exposition.fleet import add_history
from gpuscale.monitor.health.checks import Event, HealthCheck
from gpuscale.monitor.health.events import Events, xid_finding
from gpuscale.monitor.history.history import History, HistorySeries, Tier, most_bytes, shorter
from gpuscale.monitor.history.ring import CHUNK, Point
from gpuscale.monitor.recording import RecordingOrder, Recordings, RecordingState, Target
from gpuscale.monitor.state.saver import Saver, open_saver, recording_to_text
from gpuscale.monitor.state.store import DATABASE, FleetStore, Saving
from tests.support.clock import ManualClock
from tests.support.monitor_values import DEFAULT_TIERS
from tests.support.promtool import value

SAMPLE = (10.0, 20.0, 5.0, 50.0, 40.0, 300.0, 900.0)
HOUR, DAY = 3600.0, 86_400.0


class Fleet:
    """What one run of a fleet knows."""

    def __init__(
        self,
        saver: Saver | None,
        clock: ManualClock,
        history: History,
        recordings: Recordings,
        events: Events,
    ):
        self.history, self.recordings, self.clock, self.events = history, recordings, clock, events
        self._keeper = saver

    @property
    def saver(self) -> Saver:
        assert self._keeper is not None
        return self._keeper

    def pass_time(self, seconds: int, step: float = 5.0) -> None:
        """Let samples come in."""
        for _ in range(int(seconds / step)):
            self.clock.advance(step)
            self.history.add("gpu-1", self.clock.now(), SAMPLE)
            self.recordings.add("gpu-1", self.clock.now(), SAMPLE)

    def samples(self, last: float = DAY) -> int:
        """How many there are of the GPU in the last so many seconds."""
        series, now = self.history.get("gpu-1"), self.clock.now()
        points = series.points(0, len(self.history.tiers) - 1, now - last, now + 1) if series else []
        return sum(point.samples for point in points)


class _EndError(Exception):
    """The process ends here: nothing is written any more."""


@asynccontextmanager
async def run(
    directory: Path,
    clock: ManualClock,
    *,
    crash: bool = False,
    tiers: tuple[Tier, ...] = DEFAULT_TIERS,
    budget: int = 1 << 30,
) -> AsyncGenerator[Fleet, None]:
    history, recordings, events = History(tiers, budget), Recordings(), Events("65000000")
    with suppress(_EndError):
        async with open_saver(directory, history, recordings, events, clock) as saver:
            yield Fleet(saver, clock, history, recordings, events)
            if crash:
                raise _EndError


def order(key: str = "r1") -> RecordingOrder:
    target = Target("nodes/alpha/gpus/gpu-1", "GPU-1", 0, "H100", 1.0)
    return RecordingOrder(key, f"request-{key}", "print", 1.0, 10 * DAY, (target,))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(start=50_000.0)


async def test_a_stop_keeps_history_and_recordings(tmp_path: Path, clock: ManualClock) -> None:
    async with run(tmp_path, clock) as fleet:
        fleet.recordings.start(order(), clock.now())
        fleet.pass_time(1_000)
        fleet.recordings.start(order("r2"), clock.now())
        ended = fleet.recordings.stop("r2", clock.now())
        await fleet.saver.save_recording("r2")
        seen = fleet.samples()
    async with run(tmp_path, clock) as fleet:
        assert seen - 3 <= fleet.samples() <= seen
        kept = fleet.recordings.get("r2", clock.now())
        assert list(recording_to_text(kept, 0.0)) == list(recording_to_text(ended, 0.0))
        running = fleet.recordings.get("r1", clock.now())
        assert (running.state, running.sample_count) == (RecordingState.RUNNING, 200)
        fleet.pass_time(100)
        assert running.sample_count == 220
        assert fleet.samples(last=240.0) >= 28


async def test_a_crash_loses_what_came_after_the_last_write_and_no_more(
    tmp_path: Path, clock: ManualClock
) -> None:
    async with run(tmp_path, clock, crash=True) as fleet:
        fleet.recordings.start(order(), clock.now())
        fleet.pass_time(300)
        await fleet.saver.save()
        fleet.pass_time(40)
    async with run(tmp_path, clock) as fleet:
        assert 60 - 3 <= fleet.samples() <= 60
        assert fleet.recordings.get("r1", clock.now()).sample_count == 60


@pytest.mark.parametrize("wall_step", [0.0, -30 * DAY])
async def test_a_boot_begins_a_new_count_and_history_stays_in_order(
    tmp_path: Path, clock: ManualClock, wall_step: float
) -> None:
    async with run(tmp_path, clock) as fleet:
        fleet.recordings.start(order(), clock.now())
        fleet.pass_time(600)
    clock.advance(HOUR)
    clock.step_wall(wall_step)
    clock.reboot()
    async with run(tmp_path, clock) as fleet:
        fleet.pass_time(600)
        assert 2 * (120 - 3) <= fleet.samples() <= 240
        passed = 600.0 + (HOUR if wall_step == 0.0 else 60.0)
        assert fleet.samples(last=passed - 60.0) <= 121, "what was before is not now"
        assert fleet.recordings.get("r1", clock.now()).started_at < 0.0


async def test_the_file_stays_within_the_retention(tmp_path: Path, clock: ManualClock) -> None:
    tiers = (Tier(1.0, 60.0), Tier(10.0, 600.0), Tier(60.0, 2 * HOUR))
    async with run(tmp_path, clock, tiers=tiers) as fleet:
        for _ in range(20):
            fleet.pass_time(1_800, step=20.0)
            await fleet.saver.save()
    async with FleetStore.open(tmp_path) as store:
        chunks = await store.chunks({"gpu-1": 1 << 30}, range(1 << 30))
    assert 4 <= len(chunks["gpu-1"]) <= 6
    clock.advance(3 * HOUR)
    async with run(tmp_path, clock, tiers=tiers) as fleet:
        assert len(fleet.history) == 0
        await fleet.saver.save()
    async with FleetStore.open(tmp_path) as store:
        assert await store.series(range(0)) == []


async def test_a_recording_that_was_deleted_or_made_room_stays_away(
    tmp_path: Path, clock: ManualClock
) -> None:
    async with run(tmp_path, clock, crash=True) as fleet:
        for key in ("r1", "r2"):
            fleet.recordings.start(order(key), clock.now())
            await fleet.saver.save_recording(key)
        fleet.recordings.delete("r1", clock.now())
        await fleet.saver.save_recording("r1")
    async with run(tmp_path, clock) as fleet:
        assert [one.order.id for one in fleet.recordings.all(clock.now())] == ["r2"]


@pytest.mark.parametrize("turns", [0, 3, 12])
async def test_a_recording_that_is_stopped_while_all_are_written_has_ended_on_disk(
    tmp_path: Path, clock: ManualClock, turns: int
) -> None:
    """And one of the same name that was begun then is not the one before."""
    async with run(tmp_path, clock, crash=True) as fleet:
        for number in range(1, 9):
            most = 20.0 if number == 2 else DAY
            fleet.recordings.start(replace(order(f"r{number}"), max_duration=most), clock.now())
        fleet.pass_time(60)
        saving = asyncio.create_task(fleet.saver.save())
        for _ in range(turns):
            await asyncio.sleep(0)
        fleet.recordings.stop("r1", clock.now())
        fleet.recordings.delete("r2", clock.now())
        fleet.recordings.start(replace(order("r2"), request_id="other"), clock.now())
        await asyncio.gather(*(fleet.saver.save_recording(key) for key in ("r1", "r2")), saving)
    async with run(tmp_path, clock) as fleet:
        found = fleet.recordings.all(clock.now())
        assert [(one.state, one.sample_count) for one in found] == [
            (RecordingState.STOPPED, 12),
            (RecordingState.RUNNING, 0),
            *[(RecordingState.RUNNING, 12)] * 6,
        ]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("PRAGMA user_version=99", "STATE_VERSION"),
        ("UPDATE recording SET body='{}'", "STATE_UNREADABLE"),
        ("UPDATE historychunk SET body=x'0102030405'", "STATE_UNREADABLE"),
        (f"UPDATE historychunk SET body=x'{'80' * 102}'", "STATE_UNREADABLE"),
        ("INSERT INTO healthevent VALUES ('a-1', '{}')", "STATE_UNREADABLE"),
        ("INSERT INTO healthevent VALUES ('a-1', '{\"id\":')", "STATE_UNREADABLE"),
    ],
    ids=["version", "recording", "rows", "numbers", "event", "torn event"],
)
async def test_a_file_of_another_version_or_with_nonsense_is_refused_and_stays(
    tmp_path: Path, clock: ManualClock, damage: str, reason: str
) -> None:
    async with run(tmp_path, clock) as fleet:
        fleet.recordings.start(order(), clock.now())
        fleet.pass_time(600)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        connection.execute(damage)
    connection.close()
    with pytest.raises(FailedPreconditionError) as refused:
        async with run(tmp_path, clock):
            pass
    assert (refused.value.reason, DATABASE in refused.value.message) == (reason, True)
    with sqlite3.connect(tmp_path / DATABASE) as connection:
        assert connection.execute("SELECT count(*) FROM recording").fetchone() == (1,)
    connection.close()


async def test_a_second_fleet_on_the_directory_is_refused(tmp_path: Path) -> None:
    settings = FleetSettings(listen="127.0.0.1:0", data_dir=tmp_path)
    with DirectoryLock(tmp_path), pytest.raises(FailedPreconditionError, match="is in use by process"):
        await serve(settings, asyncio.Event())


async def test_a_disk_that_fails_ends_nothing_and_is_tried_again(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted, and said once, as is that it works again."""
    caplog.set_level("INFO", "gpuscale.monitor.state.saver")
    async with run(tmp_path, clock) as fleet:
        fleet.recordings.start(order(), clock.now())

        async def full(*_: object) -> None:
            raise UnavailableError("the disk of the state is full", reason="DISK_FULL")

        with monkeypatch.context() as patch:
            patch.setattr(FleetStore, "save", full)
            await fleet.saver.try_to_save()
            await fleet.saver.try_to_save()
            with pytest.raises(UnavailableError):
                await fleet.saver.save_recording("r1")
        await add_history(fleet.history, fleet.saver, tmp_path, page := MetricsPage())
        text = b"".join(page.chunks()).decode()
        assert value(text, "gpuscale_fleet_saves_failed_total") == 2
        assert value(text, "gpuscale_fleet_store_free_bytes") > 0
        await fleet.saver.try_to_save()
        fleet.pass_time(600)
    told = [
        (line["level"], line["event"], line.get("reason"))
        for record in caplog.records
        if isinstance(line := record.msg, dict)
    ]
    what = "recordings, health events and history"
    assert told == [
        ("error", f"{what} cannot be saved", "DISK_FULL"),
        ("info", f"{what} are saved again", None),
    ]
    async with run(tmp_path, clock) as fleet:
        assert fleet.samples() >= 117
        assert fleet.recordings.get("r1", clock.now()).sample_count == 120


def fault(fleet: Fleet, xid: int) -> Event:
    return fleet.events.begin(HealthCheck.XID, "alpha", "GPU-1", xid_finding(xid), fleet.clock.now(), xid)


async def test_health_events_outlive_the_fleet(tmp_path: Path, clock: ManualClock) -> None:
    """Those that are over, and those that last, as they were."""
    async with run(tmp_path, clock, crash=True) as fleet:
        over, lasts = fault(fleet, 13), fault(fleet, 79)
        fleet.events.resolve(over, clock.now())
        await fleet.saver.save()
        lasts.boot_id = "boot 7"
        fleet.events.clear([lasts])
        await fleet.saver.save()
    clock.advance(100.0)
    async with run(tmp_path, clock) as fleet:
        assert [(one.id, one.resolved_at, one.cleared) for one in fleet.events.newest_first()] == [
            (lasts.id, None, True),
            (over.id, clock.now() - 100.0, False),
        ]
        assert [one.boot_id for one in fleet.events.lasting()] == ["boot 7"]
        assert fault(fleet, 48).id > lasts.id


async def test_events_that_are_not_kept_any_more_leave_the_disk(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that went while a write failed."""
    full = UnavailableError("the disk is full", reason="DISK_FULL")
    for times in range(3):
        async with run(tmp_path, clock) as fleet:
            fleet.events._most_resolved = 5
            for _ in range(20):
                fleet.events.resolve(fault(fleet, 13), clock.now())
            with monkeypatch.context() as patch:
                patch.setattr(FleetStore, "save", AsyncMock(side_effect=full))
                await fleet.saver.try_to_save()
            kept = {one.id for one in fleet.events.newest_first()}
            assert len(kept) == 5, times
            await fleet.saver.save()
        with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
            assert {key for (key,) in connection.execute("SELECT id FROM healthevent")} == kept


async def test_a_minute_that_goes_on_is_written_again(tmp_path: Path, clock: ManualClock) -> None:
    """Although the bucket that it goes into is on disk already."""
    begin = clock.now() // 60 * 60 + 60
    clock.advance(begin - clock.now())
    async with run(tmp_path, clock, crash=True) as fleet:
        fleet.pass_time(25)
        await fleet.saver.save()
        fleet.pass_time(30)
        await fleet.saver.save()
    async with run(tmp_path, clock) as fleet:
        assert fleet.samples() >= 9


async def test_only_what_is_new_is_written_also_after_a_restart(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run(tmp_path, clock) as fleet:
        fleet.pass_time(7_200)
    written: list[Saving] = []

    async def save(_store: FleetStore, saving: Saving) -> None:
        written.append(saving)

    async with run(tmp_path, clock, crash=True) as fleet:
        fleet.pass_time(30)
        monkeypatch.setattr(FleetStore, "save", save)
        monkeypatch.setattr(HistorySeries, "shorten", lambda *_: pytest.fail("all series at once"))
        await fleet.saver.save()
        await fleet.saver.save()
    assert len(written[0].chunks) <= 2
    assert written[1].chunks == []


async def test_every_series_comes_back_however_many_reads_it_takes(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.monitor.state.saver.SERIES_PER_READ", 2)
    async with run(tmp_path, clock) as fleet:
        for number in range(700):
            clock.advance(10.0)
            for key in ("gpu-1", "gpu-2", "gpu-3"):
                fleet.history.add(key, clock.now(), (float(number),) * len(SAMPLE))
    async with run(tmp_path, clock) as fleet:
        for key in ("gpu-1", "gpu-2", "gpu-3"):
            series = fleet.history.get(key)
            assert series is not None
            for tier in (1, 2):
                points = series.points(0, tier, 0.0, clock.now())
                assert 690 <= sum(point.samples for point in points) <= 700
                assert [point.start for point in points] == sorted({point.start for point in points})


async def test_no_more_is_read_than_there_is_memory_for(
    tmp_path: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large fleet has a day in memory and a week on disk: all of it would take minutes to read. The newest is kept, however old."""
    tiers, read = (Tier(1.0, 20.0), Tier(10.0, 120.0), Tier(60.0, 2 * DAY)), dict[str, int]()
    minutes = 2 * 24 * 60
    told = {
        "gpu-all": range(minutes),
        "gpu-away": range(minutes - 12 * 60),
        "gpu-gaps": range(0, minutes, 3),
        "gpu-old": range(100),
    }
    async with run(tmp_path, clock, tiers=tiers) as fleet:
        for minute in range(minutes):
            clock.advance(60.0)
            for key in (key for key, those in told.items() if minute in those):
                fleet.history.add(key, clock.now(), SAMPLE)
    chunks = FleetStore.chunks

    async def counted(store: FleetStore, sizes: Mapping[str, int], numbers: range) -> dict[str, list[bytes]]:
        found = await chunks(store, sizes, numbers)
        read.update({key: len(bodies) for key, bodies in found.items()})
        return found

    monkeypatch.setattr(FleetStore, "chunks", counted)

    def points(fleet: Fleet) -> dict[str, list[Point]]:
        every = {key: fleet.history.get(key) for key, _ in fleet.history.all()}
        return {key: one.points(0, 2, 0.0, clock.now() + 1.0) for key, one in every.items() if one}

    budget = len(told) * most_bytes(len(SAMPLE), (*tiers[:2], Tier(60.0, DAY / 4)))
    for down, count in ((0.0, 4), (3 * HOUR, 3), (5 * HOUR, 3), (16 * HOUR, 3), (17 * HOUR, 2)):
        clock.advance(down)
        async with run(tmp_path, clock, tiers=tiers, crash=True) as fleet:
            whole = points(fleet)
        async with run(tmp_path, clock, tiers=tiers, crash=True, budget=budget) as fleet:
            fits = next(one for one in shorter(tiers) if count * most_bytes(len(SAMPLE), one) <= budget)
            assert fleet.history.kept == fits
            kept = fits[-1].capacity
            assert points(fleet) == {key: found[-kept - 1 :] for key, found in whole.items()}
            assert len(whole) == count
        assert max(read["gpu-all"], read["gpu-gaps"] / 3) <= kept // CHUNK + 3 < minutes / CHUNK / 2


async def test_a_file_of_the_first_version_is_taken_over(tmp_path: Path, clock: ManualClock) -> None:
    """It kept no health events; the second kept history in steps of 10 s too."""
    async with run(tmp_path, clock) as fleet:
        fleet.recordings.start(order(), clock.now())
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection, connection:
        connection.execute("DROP TABLE healthevent")
        connection.execute("CREATE TABLE finerchunk (key, number, body)")
        connection.execute("PRAGMA user_version=1")
    async with run(tmp_path, clock) as fleet:
        assert fleet.recordings.get("r1", clock.now()).state is RecordingState.RUNNING
        fault(fleet, 79)
    async with run(tmp_path, clock) as fleet:
        assert len(fleet.events) == 1
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    assert ("finerchunk",) not in names


async def test_nothing_is_kept_in_memory_of_series_that_ended(tmp_path: Path, clock: ManualClock) -> None:
    """GPUs come and go for as long as the fleet runs."""
    async with run(tmp_path, clock) as fleet:
        fleet.pass_time(300)
        await fleet.saver.save()
        assert fleet.saver._saved.keys() == {"gpu-1"}
        clock.advance(8 * DAY)
        fleet.history.forget_ended(clock.now())
        await fleet.saver.save()
        assert not fleet.saver._saved

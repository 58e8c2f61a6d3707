"""What the queues of an endpoint were like is kept for a day, through restarts and clocks that are set, and is in nobody's way."""

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from sqlmodel import func, select

from gpuscale.autoscaler.backtest import world
from gpuscale.autoscaler.backtest.world import KEPT, SPACING, UNKNOWN, RecordedReading
from gpuscale.autoscaler.domain.replicas import Moment
from gpuscale.autoscaler.domain.signals import QueueReading, QueueState, Rates
from gpuscale.autoscaler.domain.spec import EndpointSpec
from gpuscale.autoscaler.signals.sources import Histories
from gpuscale.autoscaler.state import store as autoscaler_store
from gpuscale.autoscaler.state import watcher_store
from gpuscale.autoscaler.state.store import Connection
from gpuscale.autoscaler.state.watcher_store import ReadingRow
from gpuscale.common.errors import FailedPreconditionError, UnavailableError
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store
from tests.support.autoscaler_values import signal, spec
from tests.support.clock import ManualClock

DAY = SPACING * KEPT


class Site:
    """Histories over a store; `queues` is what its watchers read last."""

    def __init__(self, store: Store) -> None:
        self.queues: dict[str, QueueReading] = {}
        self.clock = ManualClock()
        self.store = store
        self.histories = Histories(self.queues.get, store)

    async def note(self, wanted: EndpointSpec, endpoint: str = "e") -> None:
        await self.histories.note(endpoint, wanted, Moment(self.clock.now(), self.clock.wall()))

    async def kept(self, endpoint: str = "e") -> list[RecordedReading]:
        until = self.clock.wall().timestamp()
        own = partial(watcher_store.readings, endpoint=endpoint, since=until - DAY, until=until)
        return await self.store.read(own)

    async def rows(self) -> int:
        def count(connection: Connection) -> int:
            return connection.execute(select(func.count()).select_from(ReadingRow)).scalar_one()

        return await self.store.read(count)


def opened(path: Path) -> AbstractAsyncContextManager[Store]:
    metadata, migrations = autoscaler_store.METADATA, autoscaler_store.MIGRATIONS
    return Store.open(Sqlite(path, metadata, autoscaler_store.VERSION, migrations), name="autoscaler")


@pytest.fixture
async def site(tmp_path: Path) -> AsyncGenerator[Site]:
    async with opened(tmp_path / "a.db") as store:
        yield Site(store)


def watches(*watchers: str) -> EndpointSpec:
    return spec(signals=tuple(signal(f"s{at}", watcher=one) for at, one in enumerate(watchers)))


def reading(ready: int, unacked: int | None = 2, rates: Rates | None = None) -> QueueReading:
    return QueueReading(QueueState.OK, ready, unacked, observed_at=1.0, rates=rates)


async def test_it_is_kept_now_and_then_where_every_queue_is_known(site: Site) -> None:
    two = watches("jobs", "more")
    site.queues["jobs"] = reading(3, rates=Rates(2.0, 1.5, 1.0))
    await site.note(two)
    assert await site.kept() == [], "no such watcher"
    site.queues["more"] = reading(1, None, Rates(1.0, 1.0, 1.0))
    await site.note(two)
    assert await site.kept() == [], "unknown is not 0"
    site.queues["more"] = reading(1, 5, Rates(1.0, 1.0, 1.0))
    begin = site.clock.wall().timestamp()
    await site.note(two)
    site.clock.advance(SPACING - 0.1)
    await site.note(two)
    site.clock.advance(0.1)
    site.queues["more"] = reading(1, 5)
    await site.note(two)
    assert await site.kept() == [
        RecordedReading(begin, 4, 7, 3.0, 2.5),
        RecordedReading(begin + SPACING, 4, 7, UNKNOWN, UNKNOWN),
    ]
    assert await site.kept("other") == []


async def test_a_day_is_kept_and_the_oldest_goes_as_the_newest_comes(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "KEPT", 20)
    for number in range(50):
        site.queues["jobs"] = reading(number)
        await site.note(watches("jobs"))
        site.clock.advance(SPACING)
    assert [one.ready for one in await site.kept()] == list(range(30, 50))
    assert await site.rows() == 20
    await site.store.write(partial(watcher_store.remove_readings, endpoint="e"))
    assert await site.rows() == 0


async def test_what_stays_as_it_is_is_kept_once_an_hour_and_when_it_changes(site: Site) -> None:
    begin = site.clock.wall().timestamp()
    rates = Rates(2.0, 2.0, 1.0)
    for minute in range(100):
        site.queues["jobs"] = reading(3 if minute < 90 else 7, rates=rates)
        await site.note(watches("jobs"))
        site.clock.advance(60)
    hour = RecordedReading(begin + 3_600, 3, 2, 2.0, 2.0, begin)
    ended = RecordedReading(begin + 89 * 60, 3, 2, 2.0, 2.0, begin + 3_600)
    assert await site.kept() == [
        RecordedReading(begin, 3, 2, 2.0, 2.0), hour, ended, RecordedReading(begin + 90 * 60, 7, 2, 2.0, 2.0),
    ]  # fmt: skip
    found = await site.histories.workload("e", None, site.clock.wall())
    assert len(found) == 5 + 2 * 99 * 60, "what was held until now counts too"
    assert {one.service for one in found} == {1.0}
    async with site.histories.kept():
        pass
    assert (await site.kept())[-1] == RecordedReading(begin + 99 * 60, 7, 2, 2.0, 2.0, begin + 90 * 60)


async def test_what_was_not_seen_is_not_held(site: Site) -> None:
    """The same before and after a time that nobody read the queue in: what came between is left out."""
    begin = site.clock.wall().timestamp()
    for away in (30, 7_200, 30):
        site.queues["jobs"] = reading(0, 0, Rates(1.0, 1.0, 1.0))
        await site.note(watches("jobs"))
        site.queues["jobs"] = QueueReading(QueueState.UNREACHABLE)
        await site.note(watches("jobs"))
        site.clock.advance(away)
    assert [one.since for one in await site.kept()] == [None, begin, None]
    found = await site.histories.workload("e", 1.0, site.clock.wall())
    assert len(found) == 30


@pytest.mark.parametrize("step", [-3_600.0, 36 * 3_600.0, 400 * 86_400.0])
async def test_a_clock_that_was_wrong_for_a_while_leaves_no_readings_of_another_time(
    site: Site, step: float
) -> None:
    """Rows stay as few as a day has, and what was written with a date that is still to come is not told."""
    site.queues["jobs"] = reading(1)
    site.clock.step_wall(step)
    for _ in range(4):
        await site.note(watches("jobs"))
        site.clock.advance(SPACING)
    site.clock.step_wall(-step)
    for number in range(4):
        site.queues["jobs"] = reading(10 + number)
        await site.note(watches("jobs"))
        site.clock.advance(SPACING)
    found = await site.kept()
    assert [one.ready for one in found][-4:] == [10, 11, 12, 13]
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert await site.rows() <= 8


async def test_a_reading_that_cannot_be_written_holds_up_nobody(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endpoint is looked after all the same: what was decided is to be carried out."""
    site.queues["jobs"] = reading(1)
    with monkeypatch.context() as patch:
        full = UnavailableError("the disk is full", reason="DISK_FULL")
        patch.setattr(Store, "write", AsyncMock(side_effect=full))
        await site.note(watches("jobs"))
    assert await site.kept() == []
    site.clock.advance(SPACING)
    await site.note(watches("jobs"))
    assert len(await site.kept()) == 1


async def test_a_workload_is_that_of_the_last_day_and_not_too_much_to_run(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "MOST_REQUESTS", 1_000)
    for ready in (500, 0, 0):
        site.queues["jobs"] = reading(ready, 0, Rates(1.0, 1.0, 1.0))
        await site.note(watches("jobs"))
        site.clock.advance(SPACING)
    found = await site.histories.workload("e", 2.0, site.clock.wall())
    assert (len(found), {one.service for one in found}) == (500 + 2 * SPACING, {2.0})
    site.queues["jobs"] = reading(0, 0, Rates(1e12, 1.0, 1.0))
    await site.note(watches("jobs"))
    with pytest.raises(FailedPreconditionError, match="more than 1000 requests") as refused:
        await site.histories.workload("e", 2.0, site.clock.wall())
    assert refused.value.reason == "NO_HISTORY"
    with pytest.raises(FailedPreconditionError, match="less than 60 s"):
        await site.histories.workload("e", 2.0, site.clock.wall() + timedelta(days=2))

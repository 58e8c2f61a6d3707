"""Sweeps in virtual time: what the counts of queues wait for, and how often a broker is asked for more than counts."""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import pytest

from gpuscale.autoscaler.domain.signals import PENDING, QueueFailure, QueueState, QueueTarget
from gpuscale.autoscaler.signals.brokers import Broker, VirtualHostError
from gpuscale.autoscaler.signals.rabbitmq import AmqpSession, Counted, ManagementClient, Measured
from gpuscale.autoscaler.signals.watchers import BrokerSweeps
from gpuscale.common.runtime.tasks import SystemClock, TaskScope
from gpuscale.common.secrets import SecretUrl

pytestmark = pytest.mark.looptime
SECONDS = 60
BROKER = Broker(
    "default", SecretUrl("amqp://user:word@localhost"), SecretUrl("http://user:word@localhost:15672")
)

AWAY = QueueFailure(QueueState.UNREACHABLE, "the management API cannot be reached")


class Asked:
    """How often the broker was asked for counts and for statistics, which take it so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, statistics_seconds: float) -> None:
        self.counts, self.statistics = 0, 0
        self._seconds = statistics_seconds
        monkeypatch.setattr(ManagementClient, "totals", self._totals)
        monkeypatch.setattr(ManagementClient, "statistics", self._statistics)

    async def _totals(self, _virtual_host: str) -> dict[str, Counted]:
        self.counts += 1
        await asyncio.sleep(0.05)
        return {"jobs": Counted("jobs", 3, 0)}

    async def _statistics(self, _virtual_host: str) -> dict[str, Measured]:
        self.statistics += 1
        await asyncio.sleep(self._seconds)
        return {"jobs": Measured(2, 1.5, 1.0, None)}


@asynccontextmanager
async def sweeping(intervals: Mapping[QueueTarget, float]) -> AsyncGenerator[BrokerSweeps]:
    """Watch targets from half a second on."""
    await asyncio.sleep(0.5)
    sweeps = BrokerSweeps(BROKER, SystemClock())
    sweeps.watch(intervals)
    async with TaskScope() as tasks:
        tasks.spawn("sweeps", sweeps.run())
        yield sweeps


async def swept(targets: Collection[QueueTarget], seconds: float) -> BrokerSweeps:
    """Watch the targets every second for so many seconds."""
    async with sweeping(dict.fromkeys(targets, 1.0)) as sweeps:
        await asyncio.sleep(seconds)
    return sweeps


async def test_statistics_that_take_long_delay_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, statistics_seconds=4.0)
    target = QueueTarget("default", "/", "jobs", rates=True)
    sweeps = await swept([target], SECONDS)
    assert asked.counts == SECONDS + 1
    assert asked.statistics == SECONDS // 5
    reading = sweeps.reading(target)
    assert (reading.ready, reading.consumers) == (3, 2)
    assert reading.rates is not None


async def test_a_broker_is_asked_for_statistics_rarely_where_nobody_reads_rates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, statistics_seconds=0.2)
    target = QueueTarget("default", "/", "jobs")
    sweeps = await swept([target], SECONDS)
    assert asked.counts == SECONDS + 1
    assert asked.statistics == SECONDS // 30
    assert sweeps.reading(target).consumers == 2


async def test_a_queue_that_is_to_be_read_more_often_is_read_so_from_now_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not when the long interval that it had before is over."""
    asked = Asked(monkeypatch, statistics_seconds=0.2)
    target, other = QueueTarget("default", "/", "jobs"), QueueTarget("default", "/", "more")
    async with sweeping({target: 3600.0}) as sweeps:
        await asyncio.sleep(10)
        assert asked.counts == 1
        sweeps.watch({target: 1.0})
        await asyncio.sleep(10)
        assert asked.counts == 12
        sweeps.watch({target: 3600.0, other: 3600.0})
        await asyncio.sleep(10)
        assert asked.counts == 14, "the new one at once, and the other once more as it would have been"


async def test_a_queue_that_is_gone_keeps_the_time_of_its_last_count_and_one_that_nobody_watches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Asked(monkeypatch, statistics_seconds=0.1)
    target, other = QueueTarget("default", "/", "jobs"), QueueTarget("default", "/", "gone")
    async with sweeping({target: 1.0, other: 1.0}) as sweeps:
        await asyncio.sleep(2)
        seen = sweeps.reading(target).observed_at
        assert (seen is None, sweeps.reading(other).observed_at) == (False, None)
        with monkeypatch.context() as patch:
            patch.setattr(ManagementClient, "totals", AsyncMock(return_value={}))
            await asyncio.sleep(2)
        gone = sweeps.reading(target)
        assert (gone.state, gone.ready, gone.observed_at is None) == (QueueState.NOT_FOUND, None, False)
        await asyncio.sleep(0.52)  # in the middle of a sweep
        sweeps.watch({other: 1.0})
        await asyncio.sleep(2)
        assert sweeps.reading(target) is PENDING


async def test_no_rates_are_told_while_the_management_api_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the time before are as old as it is away, and the counts beside them are fresh."""
    Asked(monkeypatch, statistics_seconds=0.1)
    target, away = QueueTarget("default", "/", "jobs", rates=True), VirtualHostError(AWAY)
    monkeypatch.setattr(AmqpSession, "declare", AsyncMock(return_value=(4, 1)))
    async with sweeping({target: 1.0}) as sweeps:
        await asyncio.sleep(10)
        assert sweeps.reading(target).rates is not None
        with monkeypatch.context() as patch:
            patch.setattr(ManagementClient, "totals", AsyncMock(side_effect=away))
            await asyncio.sleep(60)
            found = sweeps.reading(target)
            assert (found.ready, found.unacked, found.rates) == (4, None, None)
        await asyncio.sleep(10)
        found = sweeps.reading(target)
        assert (found.ready, found.unacked) == (3, 0)
        assert found.rates is not None


async def test_a_pattern_that_an_earlier_version_took_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Asked(monkeypatch, statistics_seconds=0.2)
    stored, other = (
        QueueTarget("default", "/", "(?=job)jobs", pattern=True),
        QueueTarget("default", "/", "jobs"),
    )
    sweeps = await swept([stored, other], 3)
    assert sweeps.reading(stored).state is QueueState.ERROR
    assert "invalid perl operator" in sweeps.reading(stored).message
    assert sweeps.reading(other).ready == 3


async def test_a_count_beyond_64_bits_is_the_trouble_of_its_queue_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = {"jobs": (3, 1), "ready": (2**63, 0), "held": (0, 2**70)}
    queues = [
        {"name": name, "messages_ready": ready, "messages_unacknowledged": unacked}
        for name, (ready, unacked) in counts.items()
    ]
    monkeypatch.setattr(ManagementClient, "_get", AsyncMock(return_value=json.dumps(queues).encode()))
    broken = QueueFailure(QueueState.ERROR, "it counts without end")
    monkeypatch.setattr(AmqpSession, "declare", AsyncMock(return_value=broken))
    one, *wrong = targets = [QueueTarget("default", "/", name) for name in counts]
    pattern = QueueTarget("default", "/", ".*", pattern=True)
    sweeps = await swept([*targets, pattern], 2)
    assert sweeps.reading(one).total == 4
    for target in (*wrong, pattern):
        reading = sweeps.reading(target)
        assert (reading.state, reading.ready, reading.unacked) == (QueueState.ERROR, None, None)


@pytest.mark.parametrize("virtual_host", [".", ".."])
async def test_no_virtual_host_is_a_way_to_another_page_of_the_api(
    virtual_host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path that ends with a dot is that of the folder: there are the queues of all virtual hosts."""

    async def asked(_client: ManagementClient, path: str, _params: object) -> bytes:
        raise AssertionError(path)

    monkeypatch.setattr(ManagementClient, "_get", asked)
    client = ManagementClient(BROKER, SecretUrl("http://user:word@localhost:15672"))
    with pytest.raises(VirtualHostError) as failed:
        await client.totals(virtual_host)
    assert failed.value.failure.state is QueueState.NOT_FOUND
    await client.close()

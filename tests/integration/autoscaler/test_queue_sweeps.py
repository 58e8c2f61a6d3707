"""Sweeps in virtual time: what the counts of queues wait for, and how often a broker is asked for more than counts."""

import asyncio
from collections.abc import Collection

import pytest

from gpuscale.autoscaler.queues.brokers import Broker
from gpuscale.autoscaler.queues.management import Counted, ManagementClient, Measured
from gpuscale.autoscaler.queues.model import QueueTarget
from gpuscale.autoscaler.queues.sweeps import BrokerSweeps
from gpuscale.common.clock import SystemClock
from gpuscale.common.secrets import SecretUrl

pytestmark = pytest.mark.looptime
SECONDS = 60
BROKER = Broker(
    "default", SecretUrl("amqp://user:word@localhost"), SecretUrl("http://user:word@localhost:15672")
)


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


async def swept(targets: Collection[QueueTarget], seconds: float) -> BrokerSweeps:
    """Watch the targets every second for so many seconds, from half a second on."""
    await asyncio.sleep(0.5)
    sweeps = BrokerSweeps(BROKER, SystemClock())
    sweeps.watch(dict.fromkeys(targets, 1.0))
    task = asyncio.create_task(sweeps.run())
    await asyncio.sleep(seconds)
    task.cancel()
    await asyncio.wait([task])
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

"""A queue watcher as the autoscaler runs it, over a store of its own, for tests with a real broker."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sqlmodel import SQLModel

from gpuscale.autoscaler.domain.signals import QueueReading, QueueState, WatchSpec
from gpuscale.autoscaler.signals.brokers import BrokerSettings
from gpuscale.autoscaler.signals.watchers import QueueWatchers, open_watchers
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store
from tests.support.rabbitmq import RabbitBroker
from tests.support.waiting import eventually

BROKER = "default"


def nobody(watcher_id: str) -> Sequence[str]:
    """No endpoint reads any watcher."""
    return ()


def broker_settings(broker: RabbitBroker, *, management: bool = True, password: str = "") -> BrokerSettings:
    """How a private broker stands in the configuration; `password` replaces the right one."""
    password = password or broker.password
    management_url = f"http://{broker.user}:{password}@127.0.0.1:{broker.management_port}"
    return BrokerSettings(
        amqp_url=SecretUrl(f"amqp://{broker.user}:{password}@127.0.0.1:{broker.amqp_port}/"),
        management_url=SecretUrl(management_url) if management else None,
    )


@asynccontextmanager
async def watching(folder: Path, brokers: Mapping[str, BrokerSettings]) -> AsyncIterator[QueueWatchers]:
    """Watchers over a store in the folder."""
    path = folder / "watchers.db"
    async with (
        Store.open(Sqlite(path, SQLModel.metadata, 1), name="autoscaler") as store,
        open_watchers(store, brokers, SystemClock(), nobody, environment={}) as watchers,
    ):
        yield watchers


def spec(
    queue: str,
    *more: str,
    broker: str = BROKER,
    virtual_host: str = "/",
    interval: float = 0.1,
    **fields: Any,
) -> WatchSpec:
    """A queue, or several, to be watched ten times a second."""
    return WatchSpec(broker, virtual_host, (queue, *more), interval=interval, **fields)


async def shows(
    watchers: QueueWatchers, watcher_id: str, state: QueueState, **counts: int | None
) -> QueueReading:
    """Wait until a watcher shows this state and these counts."""

    def reading() -> QueueReading:
        found = watchers.reading(watcher_id)
        assert found is not None
        assert found.state is state, found
        for name, count in counts.items():
            assert getattr(found, name) == count, found
        return found

    return await eventually(reading)

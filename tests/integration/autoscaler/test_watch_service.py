"""QueueWatcherService over gRPC: what it keeps, what it refuses, and that it keeps it over a restart."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock
from uuid import uuid4

import pytest
from sqlmodel import SQLModel

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.servicers.watcher_servicer import QueueWatcherServicer
from gpuscale.autoscaler.signals.brokers import BrokerSettings
from gpuscale.autoscaler.signals.watchers import open_watchers
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.store.sqlite_store import Sqlite
from gpuscale.common.store.store import Store
from tests.support.autoscaler_app import TIMEOUT
from tests.support.ports import free_port
from tests.support.waiting import eventually

SERVICE = "gpuscale.api.autoscaler.v1.QueueWatcherService"
CANARY = "canary-7f3a"


class Watchers:
    """The service's client, with errors of our own tree."""

    def __init__(self, stub: object) -> None:
        self._stub = stub

    async def call(self, method: str, request: object) -> object:
        with rpc_errors():
            return await getattr(self._stub, method)(request, timeout=TIMEOUT)

    async def create(self, name: str, queue: str = "jobs", **spec: object) -> api.QueueWatcher:
        watcher = api.QueueWatcher(
            name=name, spec=api.QueueWatcherSpec(**{"broker": "default", "queue": queue, **spec})
        )
        request = api.CreateQueueWatcherRequest(queue_watcher=watcher, request_id=str(uuid4()))
        return (await self.call("CreateQueueWatcher", request)).queue_watcher

    async def get(self, name: str) -> api.QueueWatcher:
        return (await self.call("GetQueueWatcher", api.GetQueueWatcherRequest(name=name))).queue_watcher

    async def update(self, watcher: api.QueueWatcher, **fields: object) -> api.QueueWatcher:
        request = api.UpdateQueueWatcherRequest(queue_watcher=watcher, **fields)
        return (await self.call("UpdateQueueWatcher", request)).queue_watcher

    async def delete(self, name: str, **fields: object) -> None:
        await self.call("DeleteQueueWatcher", api.DeleteQueueWatcherRequest(name=name, **fields))

    async def list(self) -> api.ListQueueWatchersResponse:
        return await self.call("ListQueueWatchers", api.ListQueueWatchersRequest())


@asynccontextmanager
async def service(
    folder: Path,
    brokers: Mapping[str, BrokerSettings] | None = None,
    readers: Mapping[str, Sequence[str]] | None = None,
) -> AsyncIterator[Watchers]:
    """The service with one broker that cannot be reached; `readers` are the endpoints that read a watcher."""
    nowhere = SecretUrl(f"amqp://user:{CANARY}@127.0.0.1:{free_port()}/")
    known = {"default": BrokerSettings(amqp_url=nowhere)} if brokers is None else brokers
    clock = SystemClock()

    def in_use(watcher_id: str) -> Sequence[str]:
        return (readers or {}).get(watcher_id, ())

    async with (
        Store.open(Sqlite(folder / "autoscaler.db", SQLModel.metadata, 1), name="autoscaler") as store,
        open_watchers(store, known, clock, in_use, environment={}) as watchers,
    ):
        add = partial(
            api.add_QueueWatcherServiceServicer_to_server, QueueWatcherServicer(watchers, clock, MagicMock())
        )
        server = Server(ServerOptions(), Authenticator())
        server.add(Registration(SERVICE, add))
        address = server.bind()
        async with server, open_channel(address) as channel:
            yield Watchers(api.QueueWatcherServiceStub(channel))


async def test_a_watcher_is_created_with_its_defaults_and_its_failing_state(tmp_path: Path) -> None:
    async with service(tmp_path) as watchers:
        created = await watchers.create("watchers/jobs")
        assert created.spec.virtual_host == "/"
        assert created.spec.interval.ToMilliseconds() == 1000
        assert created.etag
        assert created.create_time.ToSeconds() > 0
        assert created.status.state == api.QueueWatcherStatus.STATE_PENDING

        async def unreachable() -> bool:
            status = (await watchers.get("watchers/jobs")).status
            assert not status.HasField("ready_count")
            assert not status.HasField("age")
            assert CANARY not in str(status)
            return status.state == api.QueueWatcherStatus.STATE_UNREACHABLE

        await eventually(unreachable)
    assert all(CANARY.encode() not in path.read_bytes() for path in tmp_path.iterdir())


async def test_an_update_outlives_a_restart_and_its_broker(tmp_path: Path) -> None:
    async with service(tmp_path) as watchers:
        first = await watchers.create("watchers/jobs")
        unchanged = await watchers.update(first)
        assert unchanged.etag == first.etag
        changed = api.QueueWatcher()
        changed.CopyFrom(first)
        changed.spec.queue, changed.spec.virtual_host = "others", "/w"
        second = await watchers.update(changed, update_mask={"paths": ["spec.queue"]})
        assert (second.spec.queue, second.spec.virtual_host) == ("others", "/")
        assert second.etag != first.etag
        assert second.create_time == first.create_time
        changed.etag = ""
        changed.spec.queue = "jobs"
        third = await watchers.update(changed)
        changed.spec.broker = "other"
        with pytest.raises(errors.FailedPreconditionError):
            await watchers.update(changed)
        assert third.etag not in {first.etag, second.etag}
        several = await watchers.create("watchers/several", "", queues=["a", "b"])
        assert (list(several.spec.queues), several.spec.queue) == (["a", "b"], "")
    async with service(tmp_path) as watchers:
        kept = await watchers.get("watchers/jobs")
        assert (kept.etag, kept.spec) == (third.etag, third.spec)
        assert (await watchers.get("watchers/several")).spec == several.spec
        several.spec.queues[:] = ["a"]
        assert (await watchers.update(several)).spec.queue == "a"
    async with service(tmp_path, brokers={}) as watchers:
        status = (await watchers.get("watchers/jobs")).status
        assert status.state == api.QueueWatcherStatus.STATE_ERROR
        assert "names no broker 'default' any more" in status.message
        assert not status.HasField("ready_count")


async def test_a_watcher_that_an_endpoint_reads_stays(tmp_path: Path) -> None:
    async with service(tmp_path, readers={"jobs": ["endpoints/a", "endpoints/b"]}) as watchers:
        await watchers.create("watchers/jobs")
        await watchers.create("watchers/other")
        with pytest.raises(errors.FailedPreconditionError) as caught:
            await watchers.delete("watchers/jobs")
        assert caught.value.reason == "WATCHER_IN_USE"
        assert "endpoints/a, endpoints/b" in caught.value.message
        await watchers.delete("watchers/other")
        assert [one.name for one in (await watchers.list()).queue_watchers] == ["watchers/jobs"]


async def test_what_cannot_be_watched_is_refused(tmp_path: Path) -> None:
    """200 characters keep the contract's limit and may have 400 bytes, which AMQP cannot carry."""
    long = "ä" * 200
    async with service(tmp_path) as watchers:
        for queue, more, field in (
            ("", {}, "queue"),
            ("", {"queues": ["a"], "queue_pattern": "a"}, "queue"),
            ("", {"queue_pattern": "(a+"}, "queue_pattern"),
            ("", {"queues": ["a", long]}, "queues"),
            ("", {"queues": ["a", ""]}, "queues"),
            (long, {}, "queue"),
            ("jobs", {"virtual_host": long}, "virtual_host"),
        ):
            with pytest.raises(errors.InvalidArgumentError) as caught:
                await watchers.create("watchers/jobs", queue, **more)
            assert [one.field for one in caught.value.violations] == [f"queue_watcher.spec.{field}"]
        for queue, more in (("", {"queue_pattern": "jobs.*"}), ("jobs", {"rates": True})):
            with pytest.raises(errors.FailedPreconditionError) as refused:
                await watchers.create("watchers/jobs", queue, **more)
            assert refused.value.reason == "NO_MANAGEMENT_API"
        with pytest.raises(errors.FailedPreconditionError, match="'other'") as refused:
            await watchers.create("watchers/jobs", broker="other")
        assert refused.value.reason == "UNKNOWN_BROKER"

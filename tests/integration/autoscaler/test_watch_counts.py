"""What a queue watcher reads of a real broker: ready and unacknowledged messages apart, and unknown is never zero."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import aio_pika
import httpx
import pytest
from aio_pika.abc import AbstractIncomingMessage

from gpuscale.autoscaler.domain.signals import QueueState, Rates
from gpuscale.autoscaler.signals.brokers import Broker, BrokerSettings
from gpuscale.autoscaler.signals.rabbitmq import ManagementClient, QueueStatistics
from gpuscale.common.secrets import SecretUrl
from tests.support.clock import ManualClock
from tests.support.ports import free_port
from tests.support.prometheus import FakePrometheus, serving
from tests.support.queue_watching import broker_settings, shows, spec, watching
from tests.support.rabbitmq import RabbitBroker
from tests.support.rabbitmq_queues import (
    declare_queue,
    delete_queue,
    held_messages,
    open_channel,
    publish,
    unique_queue_name,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("statistics_often")


def request_id() -> str:
    return str(uuid4())


async def ignore(message: AbstractIncomingMessage) -> None:
    """Consume nothing of it."""


async def test_without_a_management_api_or_while_it_fails_unacked_is_unknown_and_not_zero(
    tmp_path: Path, rabbitmq: RabbitBroker
) -> None:
    queue = unique_queue_name()
    await declare_queue(rabbitmq, queue)
    await publish(rabbitmq, queue, 5)
    nowhere = SecretUrl(f"http://user:secret-canary@127.0.0.1:{free_port()}")
    brokers = {
        "default": broker_settings(rabbitmq, management=False),
        "broken": BrokerSettings(amqp_url=broker_settings(rabbitmq).amqp_url, management_url=nowhere),
    }
    async with held_messages(rabbitmq, queue, 5), watching(tmp_path, brokers) as watchers:
        for broker, why in (
            ("default", "no management API"),
            ("broken", "the management API of broker broken cannot be reached"),
        ):
            own = spec(queue, broker=broker)
            await watchers.create(broker, own, request_id=request_id())
            reading = await shows(watchers, broker, QueueState.OK, ready=0, unacked=None, consumers=0)
            assert reading.total is None
            assert why in reading.message
            assert "canary" not in reading.message
        pattern = spec("jobs.*", pattern=True, broker="broken")
        await watchers.create("pattern", pattern, request_id=request_id())
        await shows(watchers, "pattern", QueueState.UNREACHABLE, ready=None)


async def test_a_missing_queue_is_told_and_found_once_it_is_declared(
    tmp_path: Path, rabbitmq: RabbitBroker
) -> None:
    for management in (True, False):
        queue = unique_queue_name()
        brokers = {"default": broker_settings(rabbitmq, management=management)}
        async with watching(tmp_path / str(management), brokers) as watchers:
            await watchers.create("jobs", spec(queue), request_id=request_id())
            missing = await shows(
                watchers, "jobs", QueueState.NOT_FOUND, ready=None, unacked=None, consumers=None
            )
            assert missing.observed_at is None
            assert queue in missing.message
            await declare_queue(rabbitmq, queue)
            found = await shows(watchers, "jobs", QueueState.OK, ready=0)
            await delete_queue(rabbitmq, queue)
            gone = await shows(watchers, "jobs", QueueState.NOT_FOUND, ready=None)
            assert gone.observed_at is not None
            assert found.observed_at is not None
            assert gone.observed_at >= found.observed_at


async def test_a_wrong_password_is_told_without_showing_it(tmp_path: Path, rabbitmq: RabbitBroker) -> None:
    brokers = {"default": broker_settings(rabbitmq, password="wrong-canary")}
    async with watching(tmp_path, brokers) as watchers:
        await watchers.create("jobs", spec("jobs"), request_id=request_id())
        reading = await shows(watchers, "jobs", QueueState.AUTH_FAILED, ready=None, unacked=None)
        assert reading.message == "broker default refuses the user or password over AMQP"


async def test_a_missing_virtual_host_is_told(tmp_path: Path, rabbitmq: RabbitBroker) -> None:
    async with watching(tmp_path, {"default": broker_settings(rabbitmq)}) as watchers:
        await watchers.create("jobs", spec("jobs", virtual_host="nowhere"), request_id=request_id())
        reading = await shows(watchers, "jobs", QueueState.NOT_FOUND)
        assert "virtual host 'nowhere'" in reading.message


async def test_virtual_hosts_are_read_apart(tmp_path: Path, rabbitmq: RabbitBroker) -> None:
    """The same queue name in two virtual hosts is two queues; odd names survive the trip through both protocols."""
    host, queue = f"team a/50%-{unique_queue_name()}", unique_queue_name()
    await declare_queue(rabbitmq, queue)
    await publish(rabbitmq, queue, 4)
    async with httpx.AsyncClient(
        base_url=rabbitmq.management_url, auth=(rabbitmq.user, rabbitmq.password)
    ) as client:
        vhost = quote(host, safe="")
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        for path, body in (
            (f"/api/vhosts/{vhost}", {}),
            (f"/api/permissions/{vhost}/{rabbitmq.user}", everything),
            (f"/api/queues/{vhost}/{queue}", {"durable": True}),
        ):
            (await client.put(path, json=body)).raise_for_status()
    for management in (True, False):
        brokers = {"default": broker_settings(rabbitmq, management=management)}
        async with watching(tmp_path / str(management), brokers) as watchers:
            await watchers.create("root", spec(queue), request_id=request_id())
            await watchers.create("team", spec(queue, virtual_host=host), request_id=request_id())
            await shows(watchers, "root", QueueState.OK, ready=4)
            await shows(watchers, "team", QueueState.OK, ready=0)


async def test_several_queues_and_all_that_match_are_read_as_one(
    tmp_path: Path, rabbitmq: RabbitBroker
) -> None:
    prefix = unique_queue_name("many")
    for number in range(3):
        await declare_queue(rabbitmq, f"{prefix}-{number}")
        await publish(rabbitmq, f"{prefix}-{number}", number + 1)
    async with watching(tmp_path, {"default": broker_settings(rabbitmq)}) as watchers:
        await watchers.create("two", spec(f"{prefix}-0", f"{prefix}-2"), request_id=request_id())
        await watchers.create("all", spec(rf"{prefix}-\d", pattern=True), request_id=request_id())
        await watchers.create("none", spec(f"{prefix}-x.*", pattern=True), request_id=request_id())
        assert (await shows(watchers, "two", QueueState.OK, ready=4, unacked=0)).queue_count == 2
        await shows(watchers, "all", QueueState.OK, ready=6, unacked=0, queue_count=3)
        assert "no queue matches" in (await shows(watchers, "none", QueueState.NOT_FOUND)).message
        async with held_messages(rabbitmq, f"{prefix}-2", 2):
            await shows(watchers, "all", QueueState.OK, ready=4, unacked=2)
        await delete_queue(rabbitmq, f"{prefix}-2")
        await shows(watchers, "two", QueueState.NOT_FOUND, ready=None)
        await shows(watchers, "all", QueueState.OK, ready=3, queue_count=2)
    async with watching(tmp_path, {"default": broker_settings(rabbitmq)}) as watchers:
        await shows(watchers, "all", QueueState.OK, ready=3, queue_count=2)


async def test_consumers_rates_and_the_age_of_the_oldest_message_are_known_once_the_broker_has_statistics(
    tmp_path: Path, rabbitmq: RabbitBroker
) -> None:
    """Of a message without a time, or none at all, no age is known, and not 0.

    AMQP is not needed for any of it.
    """
    nowhere = SecretUrl(f"amqp://user:secret-canary@127.0.0.1:{free_port()}/")
    broken = BrokerSettings(amqp_url=nowhere, management_url=broker_settings(rabbitmq).management_url)
    dated, plain, empty = (unique_queue_name() for _ in range(3))
    for queue in (dated, plain, empty):
        await declare_queue(rabbitmq, queue)
    async with open_channel(rabbitmq) as channel, watching(tmp_path, {"default": broken}) as watchers:
        for queue, sent in ((dated, datetime.now(UTC) - timedelta(hours=1)), (plain, None)):
            message = aio_pika.Message(b"work", timestamp=sent)
            await channel.default_exchange.publish(message, routing_key=queue, mandatory=True, timeout=60)
        await (await channel.get_queue(empty)).consume(ignore, no_ack=True)
        for name, queue in (("dated", dated), ("plain", plain), ("empty", empty)):
            await watchers.create(name, spec(queue, rates=True), request_id=request_id())
        await watchers.create("rateless", spec(empty), request_id=request_id())
        await shows(watchers, "empty", QueueState.OK, ready=0)

        def ages() -> list[float | None] | None:
            found = [watchers.reading(name) for name in ("dated", "plain", "empty")]
            rates = [one.rates for one in found if one is not None and one.rates is not None]
            known = [one.oldest_age for one in rates]
            return known if len(known) == 3 and known[0] is not None else None

        age, *others = await eventually(ages)
        assert age is not None
        assert 3600 <= age < 3600 + 120
        assert others == [None, None]
        counted = await shows(watchers, "rateless", QueueState.OK, ready=0, unacked=0, consumers=1)
        assert (counted.rates, counted.message) == (None, "")


async def test_rates_are_those_of_the_brokers_statistics_and_unknown_where_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers are those of RabbitMQ 3.10."""
    monkeypatch.setattr("gpuscale.autoscaler.signals.rabbitmq.STATISTICS_PERIOD", 3600.0)
    canned = FakePrometheus()
    canned.answer = (
        '[{"name":"new"},{"messages":0,"name":"idle","head_message_timestamp":""},{"message_stats":'
        '{"publish_details":{"rate":12.4},"deliver_get_details":{"rate":3.0}},"messages":200,"name":"jobs",'
        '"head_message_timestamp":1700000000,"consumers":2},'
        '{"messages":1,"name":"ahead","head_message_timestamp":99999999999}]'
    )
    async with serving(canned) as url:
        address = SecretUrl(url.replace("http://", "http://user:word@"))
        client = ManagementClient(
            Broker("default", SecretUrl("amqp://user:word@localhost"), address), address
        )
        try:
            clock = ManualClock()
            found = QueueStatistics(client, "a/b", clock)
            assert found.consumers("jobs") == "consumers unknown yet"
            assert await found.refresh(rates=True) is None
            assert "GET /api/queues/a%2Fb?columns=name%2Cmessages" in canned.requests[0][0]
            assert (found.rates("new"), found.rates("gone")) == (None, None)
            assert found.rates("idle") == Rates(0.0, 0.0, clock.now())
            old = clock.wall().timestamp() - 1_700_000_000
            assert found.rates("jobs") == Rates(12.4, 3.0, clock.now(), oldest_age=old)
            assert found.rates("ahead") == Rates(0.0, 0.0, clock.now()), "another clock tells no age"
            assert (found.consumers("jobs"), found.consumers("idle")) == (2, 0)
            assert await found.refresh(rates=True) is None
            assert len(canned.requests) == 1  # it is not time
            monkeypatch.setattr("gpuscale.autoscaler.signals.rabbitmq.STATISTICS_PERIOD", 0.0)
            found = QueueStatistics(client, "a/b", clock)
            await found.refresh(rates=True)
            canned.status = "500 Oops"
            failure = await found.refresh(rates=True)
            assert failure is not None
            assert failure.state is QueueState.ERROR
            assert found.rates("jobs") is None
            assert "consumers unknown: the management API of broker default answers" in str(
                found.consumers("jobs")
            )
        finally:
            await client.close()

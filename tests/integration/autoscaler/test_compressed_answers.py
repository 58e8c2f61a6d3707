"""A few bytes that unfold to gigabytes: what answers queries is asked for plain text, and nothing else is unfolded."""

import gzip
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager

import pytest

from gpuscale.autoscaler.domain.queues import QueueState
from gpuscale.autoscaler.signals.brokers import Broker, VirtualHostError
from gpuscale.autoscaler.signals.polling import NoAnswerError
from gpuscale.autoscaler.signals.prometheus import InstantQuery, PrometheusServer, PrometheusSettings
from gpuscale.autoscaler.signals.rabbitmq import ManagementClient
from gpuscale.common.secrets import SecretUrl
from tests.support.prometheus import FakePrometheus, serving

UNFOLDED = 32 * 1024 * 1024
MOST = 4 * 1024 * 1024


@pytest.fixture
async def bomb() -> AsyncGenerator[FakePrometheus]:
    """A server whose every answer is some hundred bytes, compressed twice."""
    one = FakePrometheus()
    one.answer = gzip.compress(gzip.compress(bytes(UNFOLDED)))
    one.header = "Content-Encoding: gzip, gzip\r\n"
    async with serving(one):
        yield one


@contextmanager
def little_memory() -> Generator[None]:
    """What is done inside takes less than a small part of what the answer would unfold to."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


async def test_an_answer_of_prometheus_is_not_unfolded(bomb: FakePrometheus) -> None:
    url = SecretUrl(f"http://127.0.0.1:{bomb.port}")
    server = PrometheusServer("main", PrometheusSettings(url=url, allow_private=True))
    with little_memory(), pytest.raises(NoAnswerError, match="neither a vector nor a scalar"):
        await server.fetch(InstantQuery("up", 90.0))
    await server.close()
    assert "accept-encoding: identity" in bomb.requests[-1][0].lower()


async def test_an_answer_of_a_management_api_is_not_unfolded(
    bomb: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked, with the password, through a proxy that the environment happens to name."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    url = SecretUrl(f"http://user:word@127.0.0.1:{bomb.port}")
    client = ManagementClient(Broker("b", SecretUrl("amqp://user:word@127.0.0.1:1"), url), url)
    with little_memory(), pytest.raises(VirtualHostError) as caught:
        await client.totals("/")
    await client.close()
    assert caught.value.failure.state is QueueState.ERROR
    assert "accept-encoding: identity" in bomb.requests[-1][0].lower()

"""Fixtures with a real broker, one for each process of the run: `rabbitmq`, and `rabbitmq_private` to do harm to it."""

import os
from collections.abc import Iterator

import pytest

from tests.support.rabbitmq import RabbitBroker, why_unavailable


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitBroker]:
    """A broker shared by all tests; use queues with unique names and never stop or pause it."""
    _require_broker()
    with RabbitBroker() as broker:
        yield broker


@pytest.fixture
def rabbitmq_private(rabbitmq: RabbitBroker) -> Iterator[RabbitBroker]:
    """The same broker without a queue, to kill, pause and restart: tests of a process run one after the other."""
    rabbitmq.clear()
    yield rabbitmq
    rabbitmq.resume()
    rabbitmq.start()


def _require_broker() -> None:
    """Skip the test where no broker can run, but fail where one is expected."""
    reason = why_unavailable()
    if reason is None:
        return
    if os.environ.get("CI") == "true" or os.environ.get("GPUSCALE_REQUIRE_BROKER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)

"""Fixtures with a real broker: `rabbitmq` (one for the whole run) and `rabbitmq_private` (one for one test)."""

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
def rabbitmq_private() -> Iterator[RabbitBroker]:
    """A broker of the test's own, to kill, pause and restart; it takes some seconds to start."""
    _require_broker()
    with RabbitBroker() as broker:
        yield broker


def _require_broker() -> None:
    """Skip the test where no broker can run, but fail where one is expected."""
    reason = why_unavailable()
    if reason is None:
        return
    if os.environ.get("CI") == "true" or os.environ.get("GPUSCALE_REQUIRE_BROKER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)

"""What every test shares: private servers that live as long as the tests that need them."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.support.nvml_fixture",
    "tests.support.podman_fixture",
    "tests.support.postgresql_fixture",
    "tests.support.rabbitmq_fixture",
]

# Python 3.11 makes an event loop for the main thread when pytest-asyncio first asks for the current one, and nobody
# closes it; with warnings as errors an arbitrary test would fail.
asyncio.set_event_loop(None)

# A busy machine makes examples slow, not wrong.
settings.register_profile("gpuscale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpuscale")

REAL = {"fault", "integration", "e2e"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests over real processes, servers and clocks may be run once more; that they were is printed (RERUN).

    A machine that stands still for seconds breaks any bound on real time. What is wrong fails twice.
    """
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in REAL:
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=1))

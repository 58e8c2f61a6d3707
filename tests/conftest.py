"""What every test shares: private servers that live as long as the tests that need them."""

import asyncio

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.support.nvml_fixture", "tests.support.rabbitmq_fixture"]

# Python 3.11 makes an event loop for the main thread when pytest-asyncio first asks for the current one, and nobody
# closes it; with warnings as errors an arbitrary test would fail.
asyncio.set_event_loop(None)

# A busy machine makes examples slow, not wrong.
settings.register_profile("gpuscale", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gpuscale")

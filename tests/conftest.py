"""What every test shares: private servers that live as long as the tests that need them."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from itertools import accumulate
from pathlib import Path

import pytest
import pytest_asyncio.plugin
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants
from looptime._internal import plugin as looptime_plugin

pytest_plugins = ["tests.support.fixtures"]

# Python 3.11 makes an event loop for the main thread when pytest-asyncio first asks for the current one, and nobody
# closes it; with warnings as errors an arbitrary test would fail.
asyncio.set_event_loop(None)

# A run that a script starts in the background ignores Ctrl-C, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine makes examples slow, not wrong. The same tree gets the same examples, so that what lands is what was
# tested: they are few, as more of them show no more the next time; `make properties` looks further, with new ones.
settings.register_profile(
    "gpuscale", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("gpuscale"), derandomize=False, max_examples=1000)
settings.load_profile(chosen := os.environ.get("GPUSCALE_TEST_EXAMPLES", "gpuscale"))
if chosen != "search":  # hypothesis draws constants too of whatever modules other tests have loaded before
    vars(providers)["_get_local_constants"] = Constants

# looptime would look through all of pytest-asyncio for the loops that it makes, at each fixture of each test.
vars(looptime_plugin)["_should_patch"] = lambda made, _: (
    made.func.__module__ == pytest_asyncio.plugin.__name__
)


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    """Programs that run in this process configure the root logger for the rest of it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: each look for garbage among it would cost each worker of `make test` seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


SECONDS = {"e2e": 68, "interop": 25, "fault": 17, "contract": 6, "integration": 4, "property": 3, "unit": 0.6}
"""What a file of a folder takes in `make test`, on average; one of an add-on takes as long as one of `contract`."""
WAITING = ("e2e", "interop", "fault")
"""Folders of tests over whole programs, which mostly wait; the others compute, those of `integration` too."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait come among those that compute, by the time that they take, the longest first.

    Workers take one file after the other (`make test`): at any time some of them wait while others compute. The last file
    that waits begins after three quarters of the time: none is left to be waited for alone.
    """
    here, limits, places = Path(__file__).parent, dict[Path, float](), dict[Path, float]()
    for item in items:
        limit = item.get_closest_marker("timeout")  # what takes long may take longer
        told = (*limit.args, limit.kwargs.get("timeout", 0.0)) if limit else (0.0,)
        limits[item.path] = max(limits.get(item.path, 0.0), told[0])
    folders = {path: path.relative_to(here).parts[0] if path.is_relative_to(here) else "" for path in limits}
    seconds = {path: SECONDS.get(folder, SECONDS["contract"]) for path, folder in folders.items()}
    for waits, part in ((True, 0.75), (False, 1.0)):
        paths = [path for path in limits if (folders[path] in WAITING) is waits]
        paths.sort(key=lambda path: (-limits[path], -seconds[path]))
        before = list(accumulate((seconds[path] for path in paths), initial=0.0))
        places |= {path: part * at / before[-1] for path, at in zip(paths, before, strict=False)}
    items.sort(key=lambda item: places[item.path])

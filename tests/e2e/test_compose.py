"""docker-compose.yml is what it says: all of it comes up, one allocator may die, and all ends when it is asked to."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.compose import Compose, why_unavailable
from tests.support.fixtures import need
from tests.support.waiting import eventually_sync

LEADING = '"event": "leading"'


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    need(why_unavailable())
    with ExitStack() as stack:
        try:
            services = stack.enter_context(Compose(tmp_path))
        except subprocess.CalledProcessError as error:
            need(f"this machine runs no containers: {error.stderr}")
        yield services


@pytest.mark.timeout(600)
def test_everything_comes_up_and_the_standby_takes_over(compose: Compose) -> None:
    """GPUs are seen and reserved, the adapter is connected, and the reservation outlives the allocator that granted it."""
    compose.up()

    def node() -> bool:
        [one] = compose.ctl("get", "nodes")["nodes"]
        return str(one["state"]).endswith("ONLINE")

    def adapter() -> bool:
        return len(compose.ctl("get", "adapters")["adapters"]) == 1

    for ready in (node, adapter):
        eventually_sync(ready, timeout=180.0, interval=3.0, retry_on=(AssertionError, ValueError))
    granted = compose.ctl("reserve", "--gpus", "1")
    assert "gpuscale" in compose.page("127.0.0.1:7080")
    assert "gpuscale_adapter_" in compose.page("127.0.0.1:7078/metrics")  # what its health check connects to
    both = ("allocator", "allocator-standby")
    leader, standby = both if LEADING in compose.logs(both[0]) else both[::-1]
    assert LEADING not in compose.logs(standby)
    compose.kill(leader)

    def there() -> bool:
        held = compose.ctl("get", "reservations")["reservations"]
        return [one["name"] for one in held] == [granted["name"]]

    eventually_sync(there, timeout=120.0, interval=1.0)
    compose.ctl("reserve", "--gpus", "1")
    assert LEADING in compose.logs(standby)
    for first_process, service in (("an init", "adapter"), ("of the host", "agent")):
        assert compose.stop(service) == 0, first_process

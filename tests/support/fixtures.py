"""Real servers as fixtures, one for each process of the run, and a machine with GPUs. Where one cannot run, its tests are skipped."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpuscale.common.secrets import SecretUrl
from tests.support import nvml_double as nvml
from tests.support import podman as containers
from tests.support import postgresql as databases
from tests.support import rabbitmq as brokers


def need(why_not: str | None, variable: str = "CI") -> None:
    """Skip the test where what it needs is missing, but fail where that is expected to be there."""
    if why_not is None:
        return
    if os.environ.get("CI") == "true" or os.environ.get(variable) == "1":
        pytest.fail(why_not)
    pytest.skip(why_not)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[brokers.RabbitBroker]:
    """A broker shared by all tests; use queues with unique names and never stop or pause it."""
    need(brokers.why_unavailable(), "GPUSCALE_REQUIRE_BROKER")
    with brokers.RabbitBroker() as broker:
        yield broker


@pytest.fixture
def rabbitmq_private(rabbitmq: brokers.RabbitBroker) -> Iterator[brokers.RabbitBroker]:
    """The same broker without a queue, to kill, pause and restart: tests of a process run one after the other."""
    rabbitmq.clear()
    yield rabbitmq
    rabbitmq.resume()
    rabbitmq.start()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[databases.PostgresServer]:
    """A server shared by all tests; use a database of your own, and never stop it."""
    need(databases.why_unavailable(), "GPUSCALE_REQUIRE_POSTGRESQL")
    with databases.PostgresServer() as server:
        yield server


@pytest.fixture
def url(postgresql: databases.PostgresServer) -> SecretUrl:
    """A database of a test's own."""
    return postgresql.database()


@pytest.fixture
def lead_outlasts_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that stands still on a busy machine keeps its lead of a PostgreSQL state."""
    for module in ("postgres", "leadership"):
        monkeypatch.setattr(f"gpuscale.common.store.{module}.LEASE", 60.0)


@pytest.fixture
def postgresql_private() -> Iterator[databases.PostgresServer]:
    """A server of the test's own, to stop and start."""
    need(databases.why_unavailable(), "GPUSCALE_REQUIRE_POSTGRESQL")
    with databases.PostgresServer() as server:
        yield server


@pytest.fixture
def reports_stay_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that report often are not taken for silent where a busy machine stands still: three periods are half a second."""
    monkeypatch.setattr("gpuscale.allocator.usecases.fleet.FRESH_PERIODS", 300)
    monkeypatch.setattr("gpuscale.monitor.model.nodes.STALE_PERIODS", 300)


@pytest.fixture
def statistics_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are read as often as the broker has new ones."""
    monkeypatch.setattr("gpuscale.autoscaler.signals.rabbitmq.STATISTICS_PERIOD", 0.2)
    monkeypatch.setattr("gpuscale.autoscaler.signals.rabbitmq.CONSUMERS_PERIOD", 0.2)


@pytest.fixture(scope="module")
def podman() -> Iterator[containers.Podman]:
    """A private Podman that the tests of a file share."""
    need(containers.missing_programs())
    if os.geteuid() != 0:
        need("a private Podman needs root here")
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(containers.Podman())
        except subprocess.CalledProcessError as error:
            need(f"this machine runs no containers: {error.stderr}")
        yield engine


@pytest.fixture
def nvml_double(tmp_path: Path) -> Iterator[nvml.NvmlDouble]:
    """A machine with two idle GPUs that this process finds in the place of a driver.

    Change `gpus` and `write`; after the test the library is "not found" again, as without a driver.
    """
    need(nvml.why_unavailable())
    with nvml.in_process(nvml.NvmlDouble(tmp_path)) as double:
        yield double


@pytest.fixture
def eight(nvml_double: nvml.NvmlDouble) -> nvml.NvmlDouble:
    """The same with eight healthy GPUs on a switch."""
    nvml_double.gpus = nvml.wired_gpus(8)
    nvml_double.write()
    return nvml_double

"""Fixtures with a real PostgreSQL: `postgresql` (one for the whole run) and `postgresql_private` (one for one test)."""

import os
from collections.abc import Iterator

import pytest

from tests.support.postgresql import PostgresServer, why_unavailable


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresServer]:
    """A server shared by all tests; use a database of your own, and never stop it."""
    _require_server()
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgresql_private() -> Iterator[PostgresServer]:
    """A server of the test's own, to stop and start."""
    _require_server()
    with PostgresServer() as server:
        yield server


def _require_server() -> None:
    """Skip the test where no server can run, but fail where one is expected."""
    reason = why_unavailable()
    if reason is None:
        return
    if os.environ.get("CI") == "true" or os.environ.get("GPUSCALE_REQUIRE_POSTGRESQL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)

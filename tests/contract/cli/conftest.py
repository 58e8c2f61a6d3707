"""A gateway with canned answers, and `gpuscalectl` that calls it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.cli import canned_gateway as canned
from tests.support.cli import Ran, run_cli


@pytest.fixture(scope="session")
def running() -> Iterator[tuple[str, canned.World]]:
    with canned.canned_gateway() as one:
        yield one


@pytest.fixture
def gateway(running: tuple[str, canned.World]) -> tuple[str, canned.World]:
    """Its address, and what it answers: for each test as if it had just begun."""
    world = vars(running[1])
    world.clear()
    world.update(vars(canned.World()))
    return running


@pytest.fixture
def world(gateway: tuple[str, canned.World]) -> canned.World:
    return gateway[1]


@pytest.fixture
def ctl(gateway: tuple[str, canned.World]) -> Any:
    def run(*arguments: str, stdin: str = "", **more: Any) -> Ran:
        return run_cli("--address", gateway[0], *arguments, stdin=stdin, **more)

    return run

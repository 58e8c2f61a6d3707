"""A gateway with canned answers, and `gpuscalectl` that calls it."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.cli import canned_gateway as canned
from tests.support.cli import Ran, run_cli


@pytest.fixture
def gateway() -> Iterator[tuple[str, canned.World]]:
    """Its address, and what it answers."""
    with canned.canned_gateway() as running:
        yield running


@pytest.fixture
def world(gateway: tuple[str, canned.World]) -> canned.World:
    return gateway[1]


@pytest.fixture
def ctl(gateway: tuple[str, canned.World]) -> Any:
    def run(*arguments: str, stdin: str = "", **more: Any) -> Ran:
        return run_cli("--address", gateway[0], *arguments, stdin=stdin, **more)

    return run

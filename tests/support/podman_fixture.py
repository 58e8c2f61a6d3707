"""Fixture with a real container engine: `podman`, one for each file of tests."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.podman import Podman, missing_programs


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """A private Podman that the tests of a file share; skips them where this machine runs no containers."""
    if (missing := missing_programs()) is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    if os.geteuid() != 0:
        pytest.skip("a private Podman needs root here")
    with ExitStack() as stack:
        try:
            engine = stack.enter_context(Podman())
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine runs no containers: {error.stderr}")
        yield engine

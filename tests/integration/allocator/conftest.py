"""What the tests of this folder share: allocators that begin to sweep soon, since tests are short."""

import pytest

from gpuscale.allocator.usecases import endings as sweeper


@pytest.fixture(autouse=True)
def swept_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the program's two seconds; tests/unit/allocator/test_endings.py is about those."""
    monkeypatch.setattr(sweeper, "START_DELAY", sweeper.START_DELAY / 10)

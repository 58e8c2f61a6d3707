"""A fake server that the tests of a file share."""

from collections.abc import Iterator

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.testing import FakeServer


class SharedServer(FakeServer):
    """Each test sees the reservations that were made since it began. There are GPUs enough for tests that lose some."""

    def __init__(self) -> None:
        super().__init__(gpus=16)
        self._before = 0

    def begin(self) -> None:
        self._before += len(self.reservations)

    @property
    def reservations(self) -> list[api.Reservation]:
        return super().reservations[self._before :]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[SharedServer]:
    with SharedServer() as running:
        yield running


@pytest.fixture
def server(shared_server: SharedServer) -> FakeServer:
    shared_server.begin()
    return shared_server

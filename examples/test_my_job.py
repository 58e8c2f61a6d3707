"""How a program that uses gpuscale is tested: `pytest examples/test_my_job.py` needs no GPU and no server."""

import sys
import threading
from collections.abc import Iterator

import pytest

from examples.my_job import train
from gpuscale.api.allocator.v1 import Reservation
from gpuscale.testing import FakeServer

SHOW = "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
FOREVER = "import time; time.sleep(600)"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Four GPUs that are nobody's."""
    with FakeServer(gpus=4) as running:
        yield running


def test_the_job_runs_on_its_gpus(server: FakeServer, capfd: pytest.CaptureFixture[str]) -> None:
    """It sees two GPUs, and gives them back."""
    with server.connect() as client:
        assert train(client, [sys.executable, "-c", SHOW]) == 0
    assert capfd.readouterr().out == "2\n"
    assert server.reservations[0].state == Reservation.STATE_RELEASED


def test_the_job_stops_when_its_gpus_are_lost(server: FakeServer) -> None:
    """A job that would run for ever ends, and asks to be tried again."""

    def lose_the_first() -> None:
        while not server.reservations:
            threading.Event().wait(0.01)
        server.lose(server.reservations[0].name)

    thief = threading.Thread(target=lose_the_first)
    thief.start()
    with server.connect() as client:
        assert train(client, [sys.executable, "-c", FOREVER]) == 75
    thief.join()


def test_the_job_waits_for_room(server: FakeServer) -> None:
    """Where there is none in time, it asks to be tried again."""
    with server.connect() as client, client.reserve(gpus=3):
        assert train(client, [sys.executable, "-c", SHOW], patience=0.1) == 75

"""A program that gpuscale starts: what it was given, its admission, and how it drains."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpuscale.client import FailedPreconditionError
from gpuscale.client.worker import Worker
from gpuscale.testing import FakeServer


def test_it_knows_what_it_was_given() -> None:
    worker = Worker(
        {
            "GPUSCALE_REPLICA": "endpoints/jobs/replicas/r1",
            "GPUSCALE_ENDPOINT": "endpoints/jobs",
            "GPUSCALE_GPU_UUIDS": "GPU-a,GPU-b",
            "GPUSCALE_FENCE": "7",
        }
    )
    assert (worker.replica, worker.endpoint) == ("endpoints/jobs/replicas/r1", "endpoints/jobs")
    assert (worker.gpu_uuids, worker.fence) == (["GPU-a", "GPU-b"], 7)
    nothing = Worker({})
    assert (nothing.replica, nothing.gpu_uuids, nothing.fence) == ("", [], None)
    nothing.admit()


def test_work_of_a_reservation_that_is_over_is_not_admitted() -> None:
    with FakeServer(gpus=1) as server, server.connect() as client:
        older = client.reserve(1)
        older.release()
        newer = client.reserve(1)
        work = {"GPUSCALE_WORK_ADDRESS": server.address}
        Worker(newer.env(work)).admit()
        with pytest.raises(FailedPreconditionError) as caught:
            Worker(older.env({})).admit(server.address)
    assert caught.value.reason == "RESERVATION_ENDED"


def test_a_signal_drains_and_does_not_kill(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    file = tmp_path / "ready"
    with Worker({"GPUSCALE_READY_FILE": str(file)}) as worker:
        assert not file.exists()
        worker.ready()
        assert file.exists()
        assert not worker.draining.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert worker.draining.wait(30)
    assert not file.exists()
    assert signal.getsignal(signal.SIGTERM) == before

"""What is read of a replica's log: the part that was asked for, and of nothing but its own file."""

import os
from pathlib import Path

import pytest

from gpuscale.autoscaler.adapters.replica_logs import ReplicaLogs
from gpuscale.autoscaler.asked_logs import LogPart

NAME = "endpoints/jobs/replicas/r1"


@pytest.fixture
def logs(tmp_path: Path) -> ReplicaLogs:
    """A replica that wrote ten bytes."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "r1.log").write_bytes(b"0123456789")
    return ReplicaLogs(tmp_path, 1000)


@pytest.mark.parametrize(
    ("offset", "most", "part"),
    [
        (None, 4, LogPart(b"6789", 6)),
        (None, 40, LogPart(b"0123456789", 0)),
        (2, 3, LogPart(b"234", 2)),
        (10, 3, LogPart(b"", 10)),
    ],
)
def test_the_part_that_was_asked_for(logs: ReplicaLogs, offset: int | None, most: int, part: LogPart) -> None:
    assert logs.read(NAME, offset, most) == part


def test_after_a_cut_it_begins_anew(logs: ReplicaLogs) -> None:
    assert logs.read(NAME, 400, 3) == LogPart(b"012", 0)


@pytest.mark.parametrize(
    "name", ["endpoints/jobs/replicas/other", "endpoints/../replicas/r1", "r1", "a/b/c/d"]
)
def test_of_others_there_is_nothing(logs: ReplicaLogs, name: str) -> None:
    found = logs.read(name, None, 100)
    assert found.content == b""
    assert found.problem


@pytest.mark.parametrize("what", ["link", "pipe", "directory"])
def test_a_replica_cannot_have_anything_else_read(logs: ReplicaLogs, tmp_path: Path, what: str) -> None:
    """It owns the folder of its file, and may put there what it likes."""
    path = tmp_path / "jobs" / "r1.log"
    path.unlink()
    (tmp_path / "secret").write_text("canary")
    match what:
        case "link":
            path.symlink_to(tmp_path / "secret")
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    found = logs.read(NAME, None, 100)
    assert found.content == b""
    assert found.problem

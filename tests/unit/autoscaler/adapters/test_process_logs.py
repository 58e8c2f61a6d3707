"""What is read of a replica's log: the part that was asked for, and of nothing but its own file."""

import errno
import os
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from gpuscale.autoscaler.adapters.engines.process.replica import ReplicaLogs
from gpuscale.autoscaler.domain.replicas import LogPart

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


@pytest.mark.parametrize("what", ["link to nothing", "link to a large file", "directory", "pipe"])
def test_what_one_replica_puts_there_keeps_no_other_from_being_bounded(tmp_path: Path, what: str) -> None:
    folder, secret = tmp_path / "logs" / "jobs", tmp_path / "large"
    folder.mkdir(parents=True)
    secret.write_bytes(b"x" * 2000)
    odd = folder / "a.log"
    match what:
        case "link to nothing":
            odd.symlink_to(tmp_path / "nothing")
        case "link to a large file":
            odd.symlink_to(secret)
        case "directory":
            odd.mkdir()
        case _:
            os.mkfifo(odd)
    for name in ("b", "c"):
        (folder / f"{name}.log").write_bytes(b"y" * 2000)
    (folder / "b.log.1").symlink_to(secret)
    ReplicaLogs(tmp_path / "logs", 1000).bound({"endpoints/jobs/replicas/b", "endpoints/jobs/replicas/c"})
    assert [(folder / f"{name}.log").stat().st_size for name in ("b", "c")] == [0, 0]
    assert (folder / "b.log.1").read_bytes() == b"y" * 2000
    assert secret.read_bytes() == b"x" * 2000, "nothing but their own files is touched"


@pytest.mark.parametrize(("code", "left"), [(errno.ENOSPC, 0), (errno.EIO, 2000)])
def test_a_log_is_cut_where_the_disk_is_too_full_for_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, left: int
) -> None:
    """Else the one that fills the disk could never be cut. Any other failure is told, and the others are bounded."""
    logs = ReplicaLogs(tmp_path, 1000)
    for endpoint in ("a", "b"):
        (tmp_path / endpoint).mkdir()
        (tmp_path / endpoint / "r.log").write_bytes(b"y" * 2000)

    def copyfile(source: Path, target: Path) -> None:
        target.write_bytes(b"y")
        if source.parent.name == "a":
            raise OSError(code, "cannot be copied")

    monkeypatch.setattr("shutil.copyfile", copyfile)
    with pytest.raises(OSError, match="copied") if left else nullcontext():
        logs.bound(set())
    assert [(tmp_path / one / "r.log").stat().st_size for one in ("a", "b")] == [left, 0]
    assert not (tmp_path / "a" / "r.log.1").exists()


def test_what_ended_long_ago_and_folders_of_endpoints_that_are_gone_are_removed(tmp_path: Path) -> None:
    logs, now = ReplicaLogs(tmp_path, 1000, keep=100.0), time.time()
    for endpoint, name, age in (
        ("jobs", "runs.log", 500.0),
        ("jobs", "old.log", 150.0),
        ("jobs", "old.log.1", 160.0),
        ("jobs", "new.log", 50.0),
        ("gone", "r.log", 150.0),
    ):
        path = tmp_path / endpoint / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"y")
        os.utime(path, (now - age, now - age))
    logs.bound({"endpoints/jobs/replicas/runs"})
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["new.log", "runs.log"]
    assert (tmp_path / "gone").is_dir(), "somebody may be about to write there"
    os.utime(tmp_path / "gone", (now - 150.0, now - 150.0))
    os.utime(tmp_path / "jobs", (now - 150.0, now - 150.0))
    logs.bound({"endpoints/jobs/replicas/runs"})
    assert [path.name for path in tmp_path.iterdir()] == ["jobs"]

"""The journal: what was written is read again, whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from gpuscale.autoscaler.adapters.engines.process.processes import ProcessId
from gpuscale.autoscaler.adapters.engines.process.replica import KEPT, KEPT_PROCESS, KeptProcess, ReplicaLogs
from gpuscale.autoscaler.adapters.journal import Journal, JournalRecord, Phase
from gpuscale.common.errors import FailedPreconditionError

ONE = "endpoints/jobs/replicas/r1"
TWO = "endpoints/jobs.2/replicas/r.1"


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "replicas")
    assert journal.load() == []
    intent = JournalRecord(ONE, Phase.INTENT, "boot")
    ended = JournalRecord(TWO, Phase.ENDED, "boot", 5.5, failed=True, exit_code=-9, reason="gone")
    assert journal.write([intent, ended]) == {}
    assert Journal(tmp_path / "replicas").load() == [ended, intent]
    running = JournalRecord(ONE, Phase.RUNNING, "boot", kept={"process": {"pid": 56}, "ready": True})
    journal.write([running])
    assert journal.load() == [ended, running]
    journal.remove([TWO])
    journal.remove([TWO])
    assert journal.load() == [running]


def test_a_write_that_a_crash_interrupted_leaves_the_record_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    record = JournalRecord(ONE, Phase.RUNNING, "boot", kept={"process": {"pid": 56}, "ready": True})
    journal.write([record])
    for left in (".jobs~r1.json.x7k2", "jobs~r1.json.new"):  # of this version, and of 0.1
        (tmp_path / left).write_text('{"replica": "endp')
    assert journal.load() == [record]
    assert [path.name for path in tmp_path.iterdir()] == ["jobs~r1.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_record_of_a_group_that_the_adapter_is_not_in_is_replaced(tmp_path: Path) -> None:
    """Only root may keep such a group, and a replica whose record cannot be written is not started."""
    journal, file = Journal(tmp_path), tmp_path / "jobs~r1.json"
    for _ in range(2):
        assert journal.write([JournalRecord(ONE, Phase.INTENT, "boot")]) == {}
        assert (file.stat().st_gid, file.stat().st_mode & 0o777) == (os.getegid(), 0o600)
        os.chown(file, -1, 4343)
        file.chmod(0o640)


def test_many_records_are_flushed_once_each_and_their_directory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "replicas")
    journal.load()
    flushed: list[bool] = []

    def flush(descriptor: int) -> None:
        flushed.append(stat.S_ISDIR(os.fstat(descriptor).st_mode))

    monkeypatch.setattr(os, "fsync", flush)
    records = [JournalRecord(f"endpoints/jobs/replicas/r{n:02}", Phase.INTENT, "boot") for n in range(20)]
    assert journal.write(records) == {}
    assert flushed == [False] * 20 + [True]
    assert journal.load() == records


def test_one_record_that_cannot_be_written_holds_up_no_other(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (tmp_path / "jobs~r1.json").mkdir()
    records = [JournalRecord(name, Phase.INTENT, "boot") for name in (ONE, TWO)]
    assert journal.write(records).keys() == {ONE}
    (tmp_path / "jobs~r1.json").rmdir()
    assert journal.load() == records[1:]


def test_a_record_of_version_0_1_is_read(tmp_path: Path) -> None:
    """A worker that runs over an update of the adapter is adopted."""
    process = '"process": {"pid": 5, "start_ticks": 7}, "probe": null, "ready": true'
    (tmp_path / "jobs~r1.json").write_text(
        f'{{"replica": "{ONE}", "phase": "running", "boot_id": "b", {process}}}'
    )
    [found] = Journal(tmp_path).load()
    assert KEPT_PROCESS.validate_python(found.kept) == KeptProcess(ProcessId(5, 7), ready=True)


@pytest.mark.parametrize("text", ["", "{torn", "[]", '{"replica": 1}'])
def test_a_record_that_cannot_be_read_is_kept_and_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "jobs~r1.json"
    path.write_text(text)
    with pytest.raises(FailedPreconditionError) as caught:
        Journal(tmp_path).load()
    assert caught.value.reason == "STATE_UNREADABLE"
    assert str(path) in caught.value.message
    assert path.read_text() == text


def test_logs_of_running_replicas_are_kept_and_those_of_ended_ones_up_to_a_number(tmp_path: Path) -> None:
    logs = ReplicaLogs(tmp_path, max_bytes=10)
    running = "endpoints/jobs/replicas/running"
    logs.path(running).parent.mkdir()
    logs.path(running).write_text("x" * 5)
    for number in range(KEPT + 7):
        logs.path(f"endpoints/jobs/replicas/r{number}").write_text("x" * 20)
    logs.bound({running})
    left = sorted(path.name for path in (tmp_path / "jobs").glob("*.log"))
    assert len(left) == KEPT + 1
    assert "running.log" in left
    assert len(list((tmp_path / "jobs").glob("*.log.1"))) == KEPT
    assert all(path.stat().st_size <= 10 for path in (tmp_path / "jobs").glob("*.log"))

"""A replica's process: what is read of its log, and of nothing but its own file, and what answers to a probe make of it."""

import errno
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessTemplate
from gpuscale.autoscaler.adapters.engines.process.replica import (
    Health,
    Probe,
    ProbeKind,
    ReplicaLogs,
    Timing,
    Verdict,
    probe_environment,
)
from gpuscale.autoscaler.adapters.templates import fill_arguments
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


WELL, ILL = "", "no answer"
READY, GOES_ON, UNHEALTHY = Verdict.READY, Verdict.GOES_ON, Verdict.UNHEALTHY


def verdicts(answers: Sequence[str], *, ready: bool = False) -> list[Verdict]:
    """What each answer makes of it, one every 5 s from its start; it may take 12 s to start."""
    health = Health(Timing(failures=2, start_timeout=12.0), 100.0, ready=ready)
    return [health.answered(answer, 100.0 + 5.0 * index) for index, answer in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "ready", "expected"),
    [
        ([WELL, WELL], False, [READY, GOES_ON]),
        ([ILL, ILL, WELL], False, [GOES_ON, GOES_ON, READY]),
        ([ILL, ILL, ILL, ILL, ILL], False, [GOES_ON, GOES_ON, GOES_ON, GOES_ON, UNHEALTHY]),
        ([WELL, ILL, ILL], False, [READY, GOES_ON, UNHEALTHY]),
        ([WELL, ILL, WELL, ILL, ILL], False, [READY, GOES_ON, GOES_ON, GOES_ON, UNHEALTHY]),
        ([ILL, ILL], True, [GOES_ON, UNHEALTHY]),
    ],
    ids=["first success", "slow start", "never starts", "hangs", "a row is broken", "was ready before"],
)
def test_success_makes_ready_and_failures_in_a_row_make_unhealthy(
    answers: list[str], ready: bool, expected: list[Verdict]
) -> None:
    assert verdicts(answers, ready=ready) == expected


def template(**probe: Any) -> ProcessTemplate:
    return ProcessTemplate.model_validate({"command": ["/bin/worker", "{port:int}"], "probe": probe})


def order(**parameters: str) -> ReplicaOrder:
    return ReplicaOrder("endpoints/e/replicas/r", "endpoints/e", parameters)


def filled(made: ProcessTemplate, **parameters: str) -> Probe:
    assert made.probe
    target = fill_arguments("w", made.probe.target, order(**parameters), "/python", also=made.command)
    return made.probe.filled(target)


def test_a_probe_is_filled_in_as_the_command_is() -> None:
    table = template(http="http://127.0.0.1:{port:int}/healthz", period=2, failures=1)
    assert filled(table, port="8000") == Probe(
        ProbeKind.HTTP, ("http://127.0.0.1:8000/healthz",), Timing(period=2.0, failures=1)
    )
    program = template(exec=["{python}", "-c", "pass"])
    assert filled(program, port="1") == Probe(ProbeKind.EXEC, ("/python", "-c", "pass"), Timing())
    with pytest.raises(LaunchRefusedError, match="whole number"):
        filled(table, port="80/../")


def test_the_environment_of_a_probe_holds_nothing_of_the_template() -> None:
    found = probe_environment("endpoints/e/replicas/r", {"PATH": "/bin", "AMQP_PASSWORD": "canary"})
    assert found == {"PATH": "/bin", "GPUSCALE_REPLICA": "endpoints/e/replicas/r"}


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ({}, "set one of exec, tcp and http"),
        ({"tcp": "h:1", "http": "http://h"}, "set one of exec, tcp and http"),
        ({"http": "https://h/"}, "must begin with http://"),
        ({"tcp": "8000"}, "must be HOST:PORT"),
        ({"http": "http://h/ x"}, "printable characters and no space"),
        ({"exec": ["worker"]}, "must begin with an absolute path"),
        ({"exec": []}, "needs at least a program"),
        ({"tcp": "h:1", "period": 0}, "greater than or equal to 0.1"),
        ({"tcp": "h:1", "failures": 0}, "greater than or equal to 1"),
        ({"tcp": "h:1", "retries": 3}, "Extra inputs"),
    ],
)
def test_a_probe_that_makes_no_sense_is_refused(probe: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        template(**probe)

"""The process adapter against a scripted autoscaler: real processes, a real stream, and which processes are a replica's."""

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process import processes
from gpuscale.common.errors import FailedPreconditionError
from tests.support.scripted_autoscaler import adapter, log_of, processes_of, replica, scripted_autoscaler
from tests.support.waiting import eventually, eventually_sync

READY = api.Replica.STATE_READY
DRAINING = api.Replica.STATE_DRAINING
STOPPED = api.Replica.STATE_STOPPED
FAILED = api.Replica.STATE_FAILED
ONE = replica(1)


def sessions(name: str) -> set[int]:
    """Those of a replica's processes; the shells of the tests start and end some all the time."""
    found: set[int] = set()
    for process in processes_of(name):
        with suppress(ProcessLookupError):
            found.add(os.getsid(process.pid))
    return found


async def test_a_replica_is_started_once_and_is_ready(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "sleeper")
        report = await autoscaler.shows(ONE, READY)
        assert autoscaler.reports[-1].revision == autoscaler.revision
        for _ in range(3):
            await autoscaler.run(ONE, "sleeper")
        await eventually(lambda: autoscaler.reports[-1].revision == autoscaler.revision)
        assert [process.pid for process in processes_of(ONE)] == [report.pid]
        assert autoscaler.states(ONE)[-1] == "READY"
        autoscaler.desired.clear()
        await autoscaler.run(replica(2), "sleeper")
        await autoscaler.shows(replica(2), READY)
        assert autoscaler.report(ONE) == report, "what the autoscaler does not name goes on"


async def test_stop_lets_a_replica_finish_its_work(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "drainer")
        await autoscaler.shows(ONE, READY)
        await eventually(lambda: "up" in log_of(tmp_path, ONE).read_text())
        await autoscaler.stop(ONE)
        await autoscaler.shows(ONE, DRAINING)
        report = await autoscaler.shows(ONE, STOPPED)
        assert report.HasField("exit_code")
        assert (report.exit_code, report.reason, report.pid) == (0, "", 0)
        assert log_of(tmp_path, ONE).read_text() == "up\ndrained\n"
        await autoscaler.forget(ONE)
        await eventually(lambda: autoscaler.report(ONE) is None)
        await eventually(lambda: not list((tmp_path / "adapter" / "replicas").iterdir()))


async def test_without_a_drain_timeout_a_replica_is_never_killed_and_with_one_it_is(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "stubborn")
        await autoscaler.shows(ONE, READY)
        await eventually(lambda: "up" in log_of(tmp_path, ONE).read_text())
        await autoscaler.stop(ONE)
        await autoscaler.shows(ONE, DRAINING)
        assert len(processes_of(ONE)) >= 1
        await autoscaler.stop(ONE, drain_timeout=0.5)
        report = await autoscaler.shows(ONE, STOPPED)
        assert report.exit_code == -signal.SIGKILL
        assert "did not finish its work" in report.reason
        assert not processes_of(ONE)


async def test_a_replica_that_ends_by_itself_has_failed_and_never_starts_again(tmp_path: Path) -> None:
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address, max_replicas=3):
        await autoscaler.run(ONE, "crash", parameters={"code": "7"})
        await autoscaler.run(replica(2), "sleeper")
        report = await autoscaler.shows(ONE, FAILED)
        assert (report.exit_code, report.reason) == (7, "it ended by itself, with exit code 7")
        os.kill((await autoscaler.shows(replica(2), READY)).pid, signal.SIGKILL)
        report = await autoscaler.shows(replica(2), FAILED)
        assert (report.exit_code, report.reason) == (-signal.SIGKILL, "it ended by itself, by signal 9")
        await autoscaler.run(ONE, "sleeper")
        await eventually(lambda: autoscaler.reports[-1].revision == autoscaler.revision)
        assert autoscaler.states(ONE)[-1] == "FAILED"
    register = autoscaler.registered[0]
    assert (register.adapter, register.kind, register.node) == ("here", "process", "here")
    assert register.max_replicas == 3
    assert list(register.templates) == sorted(register.templates)


async def test_nothing_that_a_replica_started_outlives_it(tmp_path: Path) -> None:
    """Neither what is in its process group, nor what went into a session of its own."""
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "family")
        report = await autoscaler.shows(ONE, READY)
        await eventually(lambda: len(processes_of(ONE)) >= 3)
        await eventually(lambda: sessions(ONE) >= {report.pid} and len(sessions(ONE)) == 2)
        await autoscaler.stop(ONE)
        assert (await autoscaler.shows(ONE, STOPPED)).exit_code == 3
        assert not processes_of(ONE)


async def test_the_environment_is_clean_and_names_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HANDED_ON", "yes")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/somewhere")
    monkeypatch.setenv("AMQP_PASSWORD", "canary")
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "environment", gpu_uuids=["GPU-aa", "GPU-bb"], fence=42)
        await autoscaler.shows(ONE, FAILED)
    found = dict(line.split("=", 1) for line in log_of(tmp_path, ONE).read_text().splitlines())
    expected = {"COLOR", "CUDA_VISIBLE_DEVICES", "HANDED_ON"} | {
        f"GPUSCALE_{name}" for name in ("ENDPOINT", "FENCE", "GPU_UUIDS", "REPLICA", "RESERVATION")
    }
    assert found.keys() == expected | ({"PATH", "HOME", "LANG"} & os.environ.keys())
    assert (found["CUDA_VISIBLE_DEVICES"], found["HANDED_ON"]) == ("GPU-aa,GPU-bb", "yes")


async def test_replicas_run_as_a_user_of_their_own_without_the_adapters_rights(tmp_path: Path) -> None:
    """Where the tests may become another user; where they may not, neither may the adapter, and it says so."""
    if os.geteuid() != 0:
        with pytest.raises(FailedPreconditionError, match="CAP_SETUID"):
            processes.WorkerUser.of("root")
        return
    async with (
        scripted_autoscaler() as (autoscaler, address),
        adapter(tmp_path, address, worker_user="nobody"),
    ):
        await autoscaler.run(ONE, "family")
        report = await autoscaler.shows(ONE, READY)
        await eventually(lambda: len(processes_of(ONE)) >= 3)  # it is the program itself by then
        status = Path(f"/proc/{report.pid}/status").read_text()
        nobody = pwd.getpwnam("nobody")
        assert f"Uid:\t{nobody.pw_uid}\t{nobody.pw_uid}\t{nobody.pw_uid}" in status
        assert f"Gid:\t{nobody.pw_gid}\t{nobody.pw_gid}\t{nobody.pw_gid}" in status
        assert all(f"Cap{kind}:\t0000000000000000" in status for kind in ("Inh", "Prm", "Eff", "Amb"))
        await autoscaler.stop(ONE)
        assert (await autoscaler.shows(ONE, STOPPED)).exit_code == 3
        assert not processes_of(ONE)


AS_WORKER = """
import subprocess, sys
from gpuscale.autoscaler.adapters.engines.process.processes import WorkerUser
command = WorkerUser.of("nobody").command(("/bin/cat", "/proc/self/status", *sys.argv[1:]))
sys.exit(subprocess.run(command, check=False).returncode)
"""


def test_workers_have_neither_the_rights_nor_the_files_of_a_service_user() -> None:
    """As by the unit: the adapter is no root, has the capabilities to become another user, and a group that may read its token."""
    if os.geteuid() != 0:
        pytest.skip("only root can be a user with ambient capabilities")
    service, rights = 65533, "+setuid,+setgid,+kill"
    become = [f"--reuid={service}", f"--regid={service}", f"--groups={service}"]
    become += [f"--inh-caps={rights}", f"--ambient-caps={rights}"]
    with TemporaryDirectory() as folder:  # all of whose parents everybody may enter
        Path(folder).chmod(0o755)
        files = [Path(folder, name) for name in ("node.token", "server.key")]
        for file, owner in zip(files, (0, service), strict=True):
            file.write_text("canary")
            os.chown(file, owner, service)
            file.chmod(0o640)
        command = ["setpriv", *become, sys.executable, "-c", AS_WORKER, *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"Uid:\t{pwd.getpwnam('nobody').pw_uid}\t" in done.stdout, done.stderr
    assert all(f"Cap{kind}:\t0000000000000000" in done.stdout for kind in ("Inh", "Prm", "Eff", "Amb"))
    assert "canary" not in done.stdout
    assert done.stderr.count("Permission denied") == len(files)


async def test_a_user_for_replicas_that_cannot_be_had_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="no user who-is-that") as caught:
        async with adapter(tmp_path, "127.0.0.1:1", worker_user="who-is-that"):
            pass
    assert caught.value.reason == "WORKER_USER"


@pytest.mark.parametrize(
    ("template", "parameters", "reason"),
    [
        ("unheard-of", {}, "this adapter has no template unheard-of"),
        ("crash", {"code": "1; reboot"}, "parameter code of template crash must be a whole number"),
        ("missing", {}, "cannot be started: /no/such/program: No such file or directory"),
    ],
)
async def test_what_cannot_be_started_has_failed_and_says_why(
    tmp_path: Path, template: str, parameters: dict[str, str], reason: str
) -> None:
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, template, parameters=parameters)
        report = await autoscaler.shows(ONE, FAILED)
        assert report.reason == reason
        assert not report.HasField("exit_code")


async def test_what_no_system_call_refused_says_why_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError("no /proc to watch processes in")

    monkeypatch.setattr("gpuscale.autoscaler.adapters.engines.process.replica.WorkerProcess.start", refuse)
    async with scripted_autoscaler() as (autoscaler, address), adapter(tmp_path, address):
        await autoscaler.run(ONE, "crash", parameters={"code": "1"})
        report = await autoscaler.shows(ONE, FAILED)
        assert report.reason == "cannot be started: no /proc to watch processes in"


async def test_replicas_outlive_the_autoscaler_and_are_reported_to_the_next(tmp_path: Path) -> None:
    """The stream breaks and the next autoscaler counts from the beginning: nothing happens to what runs."""
    async with scripted_autoscaler() as (first, address), adapter(tmp_path, address):
        await first.run(ONE, "sleeper")
        report = await first.shows(ONE, READY)
        first.desired.clear()
        first.reports.clear()
        await first.drop()
        await eventually(lambda: len(first.registered) == 2)
        again = await eventually(lambda: next((item for item in first.reports if item.revision == 0), None))
        assert again is not None
        assert [item.pid for item in again.replicas] == [report.pid]


async def test_a_large_log_is_cut_and_its_older_part_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.autoscaler.adapters.engines.process.engine.BOUND_LOGS_PERIOD", 0.05)
    async with (
        scripted_autoscaler() as (autoscaler, address),
        adapter(tmp_path, address, replica_log_max_bytes=4096),
    ):
        await autoscaler.run(ONE, "drainer")
        await autoscaler.shows(ONE, READY)
        log = log_of(tmp_path, ONE)
        with log.open("a") as file:
            file.write("x" * 5000)
        older = log.with_name("r1.log.1")
        await eventually(older.exists)
        await eventually(lambda: log.stat().st_size < 4096)
        assert older.stat().st_size >= 5000
        await autoscaler.stop(ONE)
        await autoscaler.shows(ONE, STOPPED)
        assert log.read_text() == "drained\n"


NAME = f"endpoints/procfs-test/replicas/r{os.getpid()}"


@contextmanager
def worker(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads its own session and has a replica's variable, as the adapter starts it."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", script],
        env={"GPUSCALE_REPLICA": NAME, "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    leader = processes.identify(process.pid)
    assert leader is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        processes.kill_members(NAME, leader)


def started(pid: int) -> processes.ProcessId:
    found = processes.identify(pid)
    assert found is not None
    return found


def test_a_leader_is_found_by_its_variable_and_its_family_by_session_and_variable() -> None:
    with worker("sleep 1000 & setsid sleep 1001 & wait") as process:
        leader = started(process.pid)
        eventually_sync(lambda: len(processes.members(NAME, leader)) == 3)
        found = processes.find_leader(NAME)
        assert found is not None
        assert found.start_ticks == leader.start_ticks
        process.kill()
        process.wait()
        assert len(processes.members(NAME, leader)) == 2
        assert processes.kill_members(NAME, leader) == 2
        assert processes.members(NAME, leader) == []
        assert processes.find_leader(NAME) is None


def test_a_member_that_hid_its_environment_is_found_by_its_session() -> None:
    with worker("env -i /bin/sleep 1000 & wait") as process:
        leader = started(process.pid)
        eventually_sync(lambda: len(processes.members(NAME, leader)) == 2)
        process.kill()
        process.wait()
        assert processes.kill_members("endpoints/procfs-test/replicas/another", leader) == 1


@pytest.mark.parametrize("pid", [0, 1, os.getpid(), os.getsid(0)], ids=["none", "init", "own", "session"])
def test_a_number_that_is_not_the_replicas_any_more_has_no_members(pid: int) -> None:
    """Neither a pid that another process has by now, nor session 0, which every kind of process may be in."""
    assert processes.members(NAME, processes.ProcessId(pid, 1)) == []


def test_processes_that_are_older_than_the_replica_are_never_its_members() -> None:
    with worker("sleep 1000") as process:
        leader = started(process.pid)
        assert processes.members(NAME, processes.ProcessId(leader.pid, leader.start_ticks + 100)) == []

"""Process ids that a driver names: which can be believed, and what the programs are called."""

import pwd
import shutil
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from gpuscale.monitor.agent.processes import ProcessNames, UserNames, shown_program
from gpuscale.monitor.model.readings import GpuProcess
from tests.support.clock import ManualClock

POD, HEX = "0f8a6c52-1111-2222-3333-444455556666", "a" * 64


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc of the initial PID namespace, with four processes."""
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/pid_max").write_text("32768\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026531836]")
    add_process(tmp_path, 1, "init", parent=0, started=0)
    add_process(tmp_path, 50, "shell", parent=1, started=900)
    add_process(tmp_path, 101, "trainer", parent=50, started=1234)
    add_process(tmp_path, 102, "a) b (", parent=101, started=5678)
    return tmp_path


def add_process(proc: Path, pid: int, name: str, *, parent: int, started: int) -> None:
    """A process as proc(5) shows it."""
    (proc / str(pid)).mkdir()
    (proc / f"{pid}/status").write_text(f"Name:\t{name}\nUid:\t1000\t1001\t0\t0\n")
    (proc / f"{pid}/cmdline").write_text("")
    between, after = " ".join(["0"] * 17), " ".join(["0"] * 30)
    (proc / f"{pid}/stat").write_text(f"{pid} ({name}) S {parent} {between} {started} {after}\n")


@pytest.mark.parametrize(
    ("pids", "believable"),
    [([], True), ([1, 32768], True), ([101, 0], False), ([101, 32769], False), ([4294967295], False)],
)
def test_only_ids_that_a_process_can_have_are_believed(proc: Path, pids: list[int], believable: bool) -> None:
    assert ProcessNames().believable(pids) is believable


def test_ids_are_believed_once_the_operator_has_raised_the_highest(proc: Path) -> None:
    names = ProcessNames()
    assert not names.believable([100_000])
    (proc / "sys/kernel/pid_max").write_text("4194304\n")
    assert names.believable([100_000])


def test_a_program_that_computes_and_draws_is_one_process(proc: Path) -> None:
    """And memory that nobody tells stays unknown."""
    records = [(101, 5), (102, None), (101, 7), (102, 3), (50, None), (50, None)]
    told = [(one.pid, one.memory_used_bytes, one.command) for one in ProcessNames().merge(records)]
    assert told == [(50, None, "shell"), (101, 7, "trainer"), (102, 3, "a) b (")]


def test_a_process_is_known_by_its_effective_user_and_its_own_reservation_alone(proc: Path) -> None:
    (proc / "101/environ").write_bytes(b"A=1\0GPUSCALE_RESERVATION=reservations/r1\0")
    (proc / "102/environ").write_bytes(b"GPUSCALE_RESERVATION=reservations/../r1\0")
    one, other = ProcessNames().merge([(101, 1), (102, 1)])
    assert (one.user, one.mark, other.mark) == (1001, "reservations/r1", "")


def test_a_pid_that_was_given_anew_names_neither(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the reading of the start and of the name, the process ends and its pid is given anew."""
    own = psutil.Process.name

    def name(process: psutil.Process) -> str:
        found = own(process)
        shutil.rmtree(proc / "101")
        add_process(proc, 101, "another", parent=50, started=99_999)
        return found

    monkeypatch.setattr(psutil.Process, "name", name)
    assert ProcessNames().merge([(101, 5)]) == (GpuProcess(101, 5, holder_unknown=True),)
    monkeypatch.undo()


def test_nothing_of_psutil_is_kept_of_a_process(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands come and go on a host."""
    seen, own = weakref.WeakSet[psutil.Process](), psutil.Process.name
    monkeypatch.setattr(psutil.Process, "name", lambda process: (seen.add(process), own(process))[1])
    names = ProcessNames()
    assert names.merge([(101, 5)])[0].command == "trainer"
    assert not seen


def test_what_all_gpus_have_in_common_is_read_once_a_moment_and_then_anew(proc: Path) -> None:
    clock = ManualClock()
    names = ProcessNames(clock.now)
    names.merge([(101, 1)])
    for pid in (1, 50, 101):
        shutil.rmtree(proc / str(pid))
    [child] = names.merge([(102, 1)])
    assert [key.pid for key in child.lineage] == [102, 101, 50, 1]
    assert names.lineage(101) == ()
    clock.advance(0.5)
    gone, child = names.merge([(102, 1), (101, 1)])
    assert gone.holder_unknown
    assert [key.pid for key in child.lineage] == [102]


def test_in_a_container_no_name_is_told_and_the_highest_id_is_that_of_any_host(proc: Path) -> None:
    """The program with that number is another one, and the highest id that newer kernels tell is about its own ids."""
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026532999]")
    names = ProcessNames()
    assert names.merge([(101, 5)]) == (GpuProcess(101, 5, holder_unknown=True),)
    assert names.believable([4_194_304])
    assert not names.believable([4_194_305])


def test_a_hidden_proc_still_tells_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    names = ProcessNames()
    assert names.believable([4_194_304])
    assert not names.believable([4_194_305])
    assert names.merge([(7, 1)]) == (GpuProcess(7, 1, holder_unknown=True),)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("", ""),
        ("/usr/bin/python3.11 -u /home/ann/train.py --token hunter2", "python3.11 /home/ann/train.py"),
        ("python -uB -m vllm.server --api-key hunter2", "python -m vllm.server"),
        ("python -c print('hunter2')", "python"),
        ("python -X dev -m a", "python"),
        ("vllm serve --api-key hunter2", "vllm serve"),
        ("tool --password hunter2 train", "tool"),
        ("tool -p hunter2", "tool"),
        ("env TOKEN=hunter2 train", "env"),
        ("tool amqp://ann:hunter2@host", "tool"),
    ],
)
def test_of_a_command_line_only_what_runs_is_shown(line: str, shown: str) -> None:
    assert shown_program(line.split()) == shown


def test_a_user_is_looked_up_once_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers = list[int](), threading.Event()

    def slow_directory(user: int) -> SimpleNamespace:
        asked.append(user)
        assert answers.wait(10)
        if user == 7:
            raise KeyError(user)
        return SimpleNamespace(pw_name="ann")

    monkeypatch.setattr(pwd, "getpwuid", slow_directory)
    users = UserNames()
    assert [users.name(user) for user in (1001, 7, 1001)] == ["1001", "7", "1001"]
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "user-name":
            thread.join(10)
    assert [users.name(user) for user in (1001, 7)] == ["ann", "7"]
    assert sorted(asked) == [7, 1001]


@pytest.mark.parametrize(
    ("cgroup", "pod"),
    [
        (f"0::/kubepods/burstable/pod{POD}/{HEX}", POD),
        (f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{HEX}", POD),
        (f"0::/system.slice/docker-{HEX}", ""),
        ("0::/user.slice", ""),
    ],
)
def test_the_cgroup_of_a_process_names_its_pod(proc: Path, cgroup: str, pod: str) -> None:
    (proc / "101/cgroup").write_text(f"{cgroup}\n")
    found = ProcessNames().find(101)
    assert found is not None
    assert found.pod == pod

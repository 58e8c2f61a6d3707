"""Process ids that a driver names: which can be believed, and what the programs are called."""

from pathlib import Path

import pytest

from gpuscale.monitor.agent.model import GpuProcess
from gpuscale.monitor.agent.processes import ProcessNames


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of the initial PID namespace, with one process."""
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/pid_max").write_text("32768\n")
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026531836]")
    (tmp_path / "101").mkdir()
    (tmp_path / "101/comm").write_text("trainer\n")
    return tmp_path


@pytest.mark.parametrize(
    ("pids", "believable"),
    [([], True), ([1, 32768], True), ([101, 0], False), ([101, 32769], False), ([4294967295], False)],
)
def test_only_ids_that_a_process_can_have_are_believed(proc: Path, pids: list[int], believable: bool) -> None:
    assert ProcessNames(proc).believable(pids) is believable


def test_a_program_that_computes_and_draws_is_one_process(proc: Path) -> None:
    merged = ProcessNames(proc).merge([(101, 5), (102, None), (101, 7), (102, 3)])
    assert merged == (GpuProcess(101, 7, "trainer"), GpuProcess(102, 3, None))


def test_memory_that_nobody_tells_stays_unknown(proc: Path) -> None:
    assert ProcessNames(proc).merge([(102, None), (102, None)]) == (GpuProcess(102, None, None),)


def test_no_name_is_told_where_the_ids_are_of_another_namespace(proc: Path) -> None:
    """In a container, the program with that number is another one."""
    (proc / "self/ns/pid").unlink()
    (proc / "self/ns/pid").symlink_to("pid:[4026532999]")
    assert ProcessNames(proc).merge([(101, 5)]) == (GpuProcess(101, 5, None),)


def test_a_host_that_hides_its_proc_still_tells_processes(tmp_path: Path) -> None:
    names = ProcessNames(tmp_path)
    assert names.believable([4_194_304])
    assert not names.believable([4_194_305])
    assert names.merge([(7, 1)]) == (GpuProcess(7, 1, None),)

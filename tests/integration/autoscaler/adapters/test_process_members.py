"""Which processes the adapter takes for a replica's: those are killed, so no other may ever be among them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuscale.autoscaler.adapters.engines.process.processes import (
    ProcessId,
    find_leader,
    identify,
    kill_members,
    members,
)
from tests.support.waiting import eventually_sync

NAME = f"endpoints/procfs-test/replicas/r{os.getpid()}"


@contextmanager
def worker(script: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads its own session and has a replica's variable, as the adapter starts it."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", script],
        env={"GPUSCALE_REPLICA": NAME, "PATH": os.environ["PATH"]},
        start_new_session=True,
    )
    leader = identify(process.pid)
    assert leader is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        kill_members(NAME, leader)


def started(pid: int) -> ProcessId:
    found = identify(pid)
    assert found is not None
    return found


def test_a_leader_is_found_by_its_variable_and_its_family_by_session_and_variable() -> None:
    with worker("sleep 1000 & setsid sleep 1001 & wait") as process:
        leader = started(process.pid)
        eventually_sync(lambda: len(members(NAME, leader)) == 3)
        found = find_leader(NAME)
        assert found is not None
        assert found.start_ticks == leader.start_ticks
        process.kill()
        process.wait()
        assert len(members(NAME, leader)) == 2
        assert kill_members(NAME, leader) == 2
        assert members(NAME, leader) == []
        assert find_leader(NAME) is None


def test_a_member_that_hid_its_environment_is_found_by_its_session() -> None:
    with worker("env -i /bin/sleep 1000 & wait") as process:
        leader = started(process.pid)
        eventually_sync(lambda: len(members(NAME, leader)) == 2)
        process.kill()
        process.wait()
        assert kill_members("endpoints/procfs-test/replicas/another", leader) == 1


@pytest.mark.parametrize("pid", [0, 1, os.getpid(), os.getsid(0)], ids=["none", "init", "own", "session"])
def test_a_number_that_is_not_the_replicas_any_more_has_no_members(pid: int) -> None:
    """Neither a pid that another process has by now, nor session 0, which every kind of process may be in."""
    assert members(NAME, ProcessId(pid, 1)) == []


def test_processes_that_are_older_than_the_replica_are_never_its_members() -> None:
    with worker("sleep 1000") as process:
        leader = started(process.pid)
        assert members(NAME, ProcessId(leader.pid, leader.start_ticks + 100)) == []

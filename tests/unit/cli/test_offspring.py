"""What a command started is found, however /proc changes while it is read."""

import os
import subprocess

import psutil
import pytest

from gpuscale.cli.commands.processes import Offspring
from tests.support.cli import python


def test_one_whose_parent_ends_while_it_is_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil misses it once: its parent was gone, and it was not ours yet when that was read."""
    offspring, children = Offspring(), psutil.Process.children
    looks: list[psutil.Process] = []

    def missing_once(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        if self.pid != os.getpid():  # servers of other tests, which this process had before
            return children(self, recursive)
        looks.append(self)
        return children(self, recursive) if len(looks) > 1 else []

    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(psutil.Process, "children", missing_once)
        found = [one.pid for one in offspring.alive()]
        child.kill()
    assert found == [child.pid]


CHILD = """
import os, sys
from gpuscale.cli.commands.processes import WaitingChild
os.dup2(os.open(os.devnull, os.O_RDONLY), 9, inheritable=True)  # as the lock of a supervisor
for words in (["sh", "-c", "ls -1 /proc/$$/fd; echo $MINE; echo out >&2; kill -9 $$"], ["no-such-command"], ["/"]):
    made = WaitingChild().become(words, {"MINE": "mine"}, (1, 1))
    print(made if isinstance(made, int) else made.wait(), flush=True)
unused = WaitingChild()
os.kill(os.getpid(), 9)
"""


def test_a_waiting_child_becomes_a_command_that_inherits_nothing_else_or_ends_unused() -> None:
    ran = python(CHILD)
    assert ran.out.split() == ["0", "1", "2", "mine", "out", "-9", "127", "126"], ran.err
    assert ran.code == -9  # and what was unused holds no pipe open


def test_a_child_that_another_thread_waits_for_first_does_not_end_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the ssh that tries whether a job could start on another host."""
    look = os.waitid
    with subprocess.Popen(["true"]) as other, subprocess.Popen(["sh", "-c", "exit 7"]) as command:
        found = [look(os.P_PID, one.pid, os.WEXITED | os.WNOWAIT) for one in (other, command)]
        other.wait()
        monkeypatch.setattr(os, "waitid", lambda *_: found.pop(0))
        assert Offspring().wait(command) == 7

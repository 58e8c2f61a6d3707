"""What a command started is found, however /proc changes while it is read."""

import subprocess

import psutil
import pytest

from gpuscale.cli.commands.processes import Offspring


def test_one_whose_parent_ends_while_it_is_looked_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """psutil misses it once: its parent was gone, and it was not ours yet when that was read."""
    offspring, children = Offspring(), psutil.Process.children
    looks: list[psutil.Process] = []

    def missing_once(self: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        looks.append(self)
        return children(self, recursive) if len(looks) > 1 else []

    with subprocess.Popen(["sleep", "60"]) as child:
        monkeypatch.setattr(psutil.Process, "children", missing_once)
        found = [one.pid for one in offspring.alive()]
        child.kill()
    assert found == [child.pid]

"""Hosts for tests are what they promise: apart, joined by a link, and gone with the test."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Hosts, children, why_unavailable
from tests.support.waiting import eventually_sync

NEEDED = why_unavailable()
pytestmark = pytest.mark.skipif(bool(NEEDED), reason=str(NEEDED))
OPENED = """
import sys, time
from pathlib import Path
from tests.support.hosts import Hosts
with Hosts(["one"], Path(sys.argv[1])) as hosts:
    hosts.start("one", "sleep", "7711", log="log")
    print("open", flush=True)
    time.sleep(600)
"""


def test_users_log_in_as_themselves_and_hosts_share_nothing(tmp_path: Path) -> None:
    before = set(children(os.getpid()))  # of other tests
    with Hosts(["one", "two"], tmp_path) as hosts:
        to_two = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", "two")
        said = hosts.run(
            "one", *to_two, "hostname; id -un; pwd; touch /tmp/mine; which gpuscalectl", user="ann"
        )
        assert said.out.split()[:3] == ["two", "ann", "/home/ann"], said.err
        assert said.out.split()[3].endswith("/gpuscalectl")
        assert hosts.run("one", *to_two[:-1], "-l", "ann", "two", "true", user="bob").code == 255
        assert hosts.run("one", "test", "-e", "/tmp/mine").code == 1
        assert not Path("/tmp/mine").exists()
        sleeping = hosts.start("two", "sleep", "7712", log="log", user="bob")
        eventually_sync(lambda: hosts.command_lines("two", "sleep 7712"))
        assert hosts.command_lines("one", "sleep 7712") == []
        hosts.cut("two")
        assert hosts.run("one", *to_two, "true", user="ann").code == 255
        hosts.mend("two")
        eventually_sync(lambda: hosts.run("one", *to_two, "true", user="ann").code == 0)
        sleeping.kill()
        assert sleeping.wait() == -9
        last = hosts.start("two", "sleep", "7713", log="log")
        eventually_sync(lambda: hosts.command_lines("two", "sleep 7713"))
        hosts.kill("two")
        assert last.wait() == -9
        hosts.boot("two")
        assert hosts.run("one", *to_two, "true", user="ann").code == 0
    assert set(children(os.getpid())) <= before


def test_nothing_is_left_of_them_when_their_test_is_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", OPENED, str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == "open\n"
        ours = _below(test.pid)
        assert len(ours) > 4
        test.kill()
    eventually_sync(lambda: not [pid for pid in ours if Path(f"/proc/{pid}").exists()])


def _below(pid: int) -> list[int]:
    return [one for child in children(pid) for one in (child, *_below(child))]

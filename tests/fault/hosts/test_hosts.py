"""Hosts for tests are gone with the test, however that ends."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, children, why_unavailable
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

"""A test run that dies leaves neither processes nor files of its servers behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.guarded import GuardedFolder
from tests.support.waiting import eventually_sync

# A leader with a child, as a server behind a start script.
SERVER = ["/bin/sh", "-c", "sleep 300 & wait"]

ABANDON = """
import os, sys
from tests.support.guarded import GuardedFolder
folder = GuardedFolder("gpuscale-abandoned-")
folder.spawn("server", sys.argv[1:], dict(os.environ))
print(folder.path, (folder.path / "server.pgid").read_text(), flush=True)
os._exit(3)
"""


def test_a_dying_test_run_takes_its_servers_and_files_along() -> None:
    run = subprocess.run(
        [sys.executable, "-c", ABANDON, *SERVER],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert run.returncode == 3, run.stderr
    path, group = run.stdout.split()
    eventually_sync(lambda: not Path(path).exists())
    eventually_sync(lambda: not _members(int(group)))


def test_ending_a_process_ends_its_helpers() -> None:
    folder = GuardedFolder("gpuscale-guarded-")
    try:
        server = folder.spawn("server", SERVER, dict(os.environ))
        group = int((folder.path / "server.pgid").read_text())
        eventually_sync(lambda: len(_members(group)) == 2)
        server.end(signal.SIGKILL, timeout=10)
        assert not server.running
        assert not _members(group)
    finally:
        folder.close()
    assert not folder.path.exists()


def _members(group: int) -> list[int]:
    """The processes of a group that still run."""
    alive: list[int] = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return alive

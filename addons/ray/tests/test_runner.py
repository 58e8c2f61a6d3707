"""The command of a replica in Ray, as its actor keeps it; without Ray."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpuscale_ray.runner import Runner
from tests.support.waiting import eventually_sync

CHILD = (
    "import subprocess, sys; print(subprocess.Popen(['/bin/sleep', '600']).pid, file=open(sys.argv[1], 'w'))"
)
HOLDER = """
import sys, time
from gpuscale_ray.runner import Runner
print(Runner(["/bin/sleep", "600"], {}, "", 0).status()["pid"], flush=True)
time.sleep(600)
"""


def ended(runner: Runner) -> float | None:
    return eventually_sync(
        lambda: (code := runner.status()["exit_code"]) is not None and (code,), timeout=60
    )[0]


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_it_has_the_gpus_that_ray_gave_and_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("SECRET", "of the node")
    for gpus, visible in ((2, "2,3"), (0, "")):
        runner = Runner(["/bin/sh", "-c", "/usr/bin/env > out"], {"MODE": "fast"}, str(tmp_path), gpus)
        assert ended(runner) == 0
        found = dict(line.split("=", 1) for line in (tmp_path / "out").read_text().splitlines())
        assert found.pop("CUDA_VISIBLE_DEVICES") == visible
        assert found["MODE"] == "fast"
        assert found.keys() <= {"MODE", "PATH", "HOME", "LANG", "PWD", "SHLVL", "_", "OLDPWD"}


def test_it_is_asked_and_then_killed() -> None:
    runner = Runner(["/bin/sleep", "600"], {}, "", 0)
    assert runner.status()["exit_code"] is None
    runner.finish()
    assert ended(runner) == -signal.SIGTERM
    runner.finish()
    runner.kill()  # both harmless by now
    runner = Runner(["/bin/sleep", "600"], {}, "", 0)
    runner.kill()
    assert ended(runner) == -signal.SIGKILL


def test_what_it_started_ends_with_it(tmp_path: Path) -> None:
    runner = Runner(["{python}", "-c", CHILD, str(tmp_path / "pid")], {}, "", 0)
    assert ended(runner) == 0
    pid = int((tmp_path / "pid").read_text())
    eventually_sync(lambda: gone(pid), timeout=60)


def test_it_ends_with_its_actor_however_that_ends() -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=dict(os.environ))
    assert holder.stdout is not None
    with holder:
        pid = int(holder.stdout.readline())
        eventually_sync(
            lambda: psutil.Process(pid).name() == "sleep", timeout=60
        )  # it is what it should be by now
        holder.kill()
    eventually_sync(lambda: gone(pid), timeout=60)


def test_a_program_that_is_not_there_ends_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    assert ended(Runner(["/does/not/exist"], {}, "", 0)) == 1
    assert "cannot start /does/not/exist: No such file or directory" in capfd.readouterr().err

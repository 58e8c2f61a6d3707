"""`gpuscalectl logs`: what a worker wrote, of one that runs and of one that has ended."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.up import CTL, Up, ctl_environment
from tests.support.waiting import eventually_sync

TALKS = "import os, time; print('hello from', os.environ['GPUSCALE_REPLICA'], flush=True); time.sleep(600)"
CONFIG = f"""
[templates.talks]
command = ["{{python}}", "-c", "{TALKS}"]
"""
ENDPOINT = """
kind: Endpoint
name: talks
spec: {minReplicas: 1, maxReplicas: 1, tick: 0.2s, template: {template: talks}}
"""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """One with a replica that has something to say."""
    (tmp_path / "gpuscale.toml").write_text(CONFIG)
    with Up(tmp_path, simulate=1, arguments=["--config", str(tmp_path / "gpuscale.toml")]) as running:
        ctl(running, "apply", "-f", "-", stdin=ENDPOINT)
        yield running


def ctl(up: Up, *arguments: str, stdin: str | None = None) -> str:
    """What `gpuscalectl` writes."""
    command = [*CTL, "--address", up.address, *arguments]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, check=True, timeout=120, env=ctl_environment()
    ).stdout


def test_the_log_of_a_replica_is_shown_and_followed_to_its_end(up: Up) -> None:
    def runs() -> list[str]:
        replicas = ctl(up, "get", "replicas", "-o", "jsonpath={.replicas[*].name} {.replicas[*].pid}").split()
        return replicas if len(replicas) == 2 and int(replicas[1]) else []

    name, pid = eventually_sync(runs, timeout=60, interval=0.2)
    eventually_sync(
        lambda: ctl(up, "logs", "replica", name) == f"hello from {name}\n", timeout=60, interval=0.2
    )
    endpoint = name.split("/")[1]
    for typed in (
        [endpoint],
        ["endpoint", endpoint],
        [f"endpoint/{endpoint}"],
        [f"endpoints/{endpoint}"],
        [name],
    ):
        assert ctl(up, "logs", *typed) == f"hello from {name}\n", typed
    short = name.split("/", 1)[1].replace("replicas/", "")
    command = [*CTL, "--address", up.address, "logs", "replica", short, "-f"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ctl_environment()) as followed:
        assert followed.stdout is not None
        assert followed.stdout.readline() == f"hello from {name}\n"
        os.kill(int(pid), signal.SIGKILL)
        assert followed.wait(timeout=120) == 0, "it ends with the replica"
        assert followed.stdout.read() == ""

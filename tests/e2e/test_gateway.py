"""The services one by one, with `gpuscale-gateway` as their one address."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.cli import Ran, run_cli
from tests.support.ports import free_port
from tests.support.up import ctl_environment
from tests.support.waiting import eventually_sync


@contextmanager
def program(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from {module} import main; sys.exit(main())", *arguments],
        env=ctl_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ctl(address: str, *arguments: str) -> Ran:
    return run_cli("--address", address, *arguments)


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def test_calls_reach_the_service_and_its_absence_is_named(address: str) -> None:
    fleet_address = f"127.0.0.1:{free_port()}"
    upstreams = ("--fleet-address", fleet_address, "--allocator-address", f"127.0.0.1:{free_port()}")
    with program("gpuscale.gateway.main", "--listen", address, *upstreams) as gateway:
        eventually_sync(
            lambda: (
                ctl(address, "get", "nodes").code == 7 and "the fleet" in ctl(address, "get", "nodes").err
            ),
            timeout=30,
        )
        with program("gpuscale.monitor.app.fleet", "--listen", fleet_address):
            listed = eventually_sync(lambda: ctl(address, "get", "nodes", "-o", "json").out, timeout=30)
            assert json.loads(listed) == {"nodes": []}
            assert ctl(address, "get", "nodes", "no-such-node").code == 3
            ran = ctl(address, "get", "reservations", "-o", "json")
            assert (ran.code, ran.out) == (7, "")
            assert json.loads(ran.err)["error"]["message"] == "the allocator does not answer"
        gateway.terminate()
        assert gateway.wait(10) == 0


def test_a_wrong_flag_is_one_line() -> None:
    command = [sys.executable, "-m", "gpuscale.gateway.main", "--listn", "x"]
    ran = subprocess.run(
        command, env=ctl_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == "gpuscale-gateway: error: unknown flag --listn (did you mean --listen?)\n"

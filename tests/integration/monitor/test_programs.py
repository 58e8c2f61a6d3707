"""The two programs as processes of their own."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.channel import open_channel
from tests.support.monitor import RunningFleet
from tests.support.ports import free_port

Started = list[subprocess.Popen[str]]


@pytest.fixture
def started() -> Iterator[Started]:
    processes: Started = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: Started, program: str, *flags: str) -> subprocess.Popen[str]:
    code = f"from gpuscale.monitor.app.{program} import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started.append(process)
    return process


async def test_agent_and_fleet_run_find_each_other_and_end_cleanly(started: Started, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    fleet = start(started, "fleet", "--listen", address)
    flags = ("--listen", "127.0.0.1:0", "--node", "alpha", "--source", "simulated")
    flags = (*flags, "--work-socket", str(tmp_path / "agent.sock"))
    agent = start(started, "agent", *flags, "--fleet-address", address)
    async with open_channel(address) as channel:
        running = RunningFleet.over(address, channel)
        await running.until_up()
        node = await running.until("alpha", monitor_api.NodeState.NODE_STATE_ONLINE)
        assert node.snapshot.simulated
        async with open_channel(f"unix:{tmp_path}/agent.sock") as socket:
            snapshot = await monitor_api.AgentServiceStub(socket).GetSnapshot(
                monitor_api.GetSnapshotRequest()
            )
            assert snapshot.snapshot.node == "alpha"
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(10) == 0
        await running.until("alpha", monitor_api.NodeState.NODE_STATE_OFFLINE)
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(10) == 0
    assert fleet.communicate()[0] == agent.communicate()[0] == "", "stdout stays empty"

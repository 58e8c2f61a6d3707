"""An agent that is stopped, not killed: its connection stays, and nobody must take its last words for the present."""

import asyncio
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import open_channel
from tests.support.allocator import Client, allocator
from tests.support.monitor import running_fleet
from tests.support.waiting import eventually

STALE = monitor_api.NodeState.NODE_STATE_STALE
PERIOD = 0.5


async def test_a_stopped_agents_gpus_are_never_offered_and_what_is_held_stays(tmp_path: Path) -> None:
    code = "import sys; from gpuscale.monitor.app.agent import main; sys.exit(main())"
    flags = ("--listen", "127.0.0.1:0", "--node", "alpha", "--source", "simulated")
    async with running_fleet() as fleet, allocator(tmp_path, fleet.address) as address:
        command = [sys.executable, "-c", code, *flags, "--period-seconds", f"{PERIOD}"]
        agent = subprocess.Popen([*command, "--fleet-address", fleet.address])
        try:
            async with open_channel(address) as channel:
                client = Client(allocator_api.AllocatorServiceStub(channel), timeout=30.0)
                held = await eventually(partial(client.reserve, memory=1), 60, retry_on=(GpuscaleError,))
                agent.send_signal(signal.SIGSTOP)
                await fleet.until("alpha", STALE)
                for _ in range(10):
                    with pytest.raises(GpuscaleError):
                        await client.reserve(memory=1)
                    await asyncio.sleep(0.05)
                [left] = await client.live()
                assert (left.name, left.state, left.gpus) == (held.name, held.state, held.gpus)
                agent.send_signal(signal.SIGCONT)
                other = await eventually(partial(client.reserve, memory=1), 60, retry_on=(GpuscaleError,))
                assert other.gpus[0].uuid != held.gpus[0].uuid
        finally:
            agent.kill()
            agent.wait()

"""An agent that is stopped, not killed: its connection stays, and nobody must take its last words for the present."""

import asyncio
import signal
import subprocess
import sys

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from tests.support.monitor import running_fleet

ONLINE = monitor_api.NodeState.NODE_STATE_ONLINE
STALE = monitor_api.NodeState.NODE_STATE_STALE
PERIOD = 0.5


async def test_a_stopped_agent_is_stale_within_three_periods_until_it_goes_on() -> None:
    code = "import sys; from gpuscale.monitor.agent.main import main; sys.exit(main())"
    flags = (
        "--listen",
        "127.0.0.1:0",
        "--node",
        "alpha",
        "--source",
        "simulated",
        "--period-seconds",
        f"{PERIOD}",
    )
    async with running_fleet() as fleet:
        agent = subprocess.Popen([sys.executable, "-c", code, *flags, "--fleet-address", fleet.address])
        try:
            await fleet.until("alpha", ONLINE, above_seq=2)
            agent.send_signal(signal.SIGSTOP)
            last = await fleet.until("alpha", STALE)
            for _ in range(20):
                await asyncio.sleep(0.05)
                node = await fleet.node("alpha")
                assert (node.state, node.snapshot.seq) == (STALE, last.snapshot.seq)
                assert {gpu.state for gpu in node.snapshot.gpus} == {types_api.GpuState.GPU_STATE_STALE}
            agent.send_signal(signal.SIGCONT)
            again = await fleet.until("alpha", ONLINE, above_seq=last.snapshot.seq)
            assert again.snapshot.epoch == last.snapshot.epoch
        finally:
            agent.kill()
            agent.wait()

"""Use policies through real agents over the driver's double, a real fleet and a real allocator, in virtual time."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from gpuscale.allocator.usecases import fleet as following
from gpuscale.allocator.usecases import notifying, policing
from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import to_datetime, to_timestamp
from gpuscale.monitor.agent import collector
from tests.support.allocator import Client, Reservation, allocator, calling
from tests.support.clock import ManualClock
from tests.support.monitor import running_agent, running_fleet
from tests.support.nvml_double import NvmlDouble
from tests.support.policies import Admin, idle_policy
from tests.support.waiting import eventually
from tests.support.webhook import webhook

MINUTE = 60.0
STEP = timedelta(minutes=1)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a driver and a fleet of thousands need."""
    monkeypatch.setattr(policing, "LOOK", 0.01)
    monkeypatch.setattr(notifying, "LOOK", 0.01)
    monkeypatch.setattr(following, "MIN_INTERVAL", 0.0)
    monkeypatch.setattr(collector, "SHORTEST_GAP_SECONDS", 0.0)


class Hosts:
    """Agents of hosts, which read once a minute, and the clock that all programs go by."""

    def __init__(self, clock: ManualClock, admin: Admin, client: Client) -> None:
        self.clock = clock
        self.admin = admin
        self.client = client
        self.agents: dict[str, monitor_api.AgentServiceAsyncStub] = {}

    async def read(self) -> None:
        """Have each agent read now."""
        for agent in self.agents.values():
            await agent.GetSnapshot(monitor_api.GetSnapshotRequest(max_age={"seconds": 0}), timeout=10)

    async def pass_time(self, minutes: int) -> None:
        """Minute by minute; in each, agents read and whoever is counted on is looked at."""
        for _ in range(minutes):
            before = {one.subject: one.held.seconds for one in await self.admin.standings()}
            self.clock.advance(MINUTE)
            await self.read()

            async def looked(before: dict[str, int] = before) -> bool:
                now = await self.admin.standings()
                return all(one.paused or one.held.seconds > before.get(one.subject, -1) for one in now)

            await eventually(looked, timeout=10, interval=0.002)


@asynccontextmanager
async def hosts(data_dir: Path) -> AsyncGenerator[tuple[Hosts, AsyncExitStack, AsyncExitStack]]:
    """The host `alpha` with the double's GPUs, and `mute` with one that is simulated, whose agent ends with the second stack."""
    clock = ManualClock()
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(clock=clock))
        opened = allocator(data_dir, fleet.address, clock=clock, notify_networks=("127.0.0.0/8",))
        address = await stack.enter_async_context(opened)
        channel = await stack.enter_async_context(open_channel(address))
        client = await stack.enter_async_context(calling(address))
        site = Hosts(clock, Admin(channel, clock), client)
        mute = await stack.enter_async_context(AsyncExitStack())
        shared = {"clock": clock, "period_seconds": MINUTE}
        site.agents["alpha"] = await stack.enter_async_context(
            running_agent(fleet.address, node="alpha", source="nvml", **shared)
        )
        site.agents["mute"] = await mute.enter_async_context(
            running_agent(fleet.address, node="mute", simulated_gpu_count=1, **shared)
        )
        await client.ready()
        yield site, stack, mute


async def test_an_idle_holder_is_noted_and_revoked_a_busy_or_silent_one_never_and_a_dry_run_says_the_same(
    tmp_path: Path, nvml_double: NvmlDouble
) -> None:
    async with webhook() as hook, hosts(tmp_path) as (site, _, mute_agent):
        admin, client, clock = site.admin, site.client, site.clock
        idle, busy = (gpu_name("alpha", gpu.uuid) for gpu in nvml_double.gpus)
        asks = {"idle": {"gpus": [idle]}, "busy": {"gpus": [busy]}, "mute": {"nodes": ["nodes/mute"]}}
        found = {who: await client.reserve(1, ttl=86_400, holder=who, **ask) for who, ask in asks.items()}
        nvml_double.gpus[1].utilization_percent = 80
        nvml_double.write()
        clock.advance(MINUTE)
        await site.read()
        await eventually(lambda: _is_busy(client, found["busy"]), timeout=10)
        await admin.target(hook.address)
        begun = clock.wall()
        shadow = idle_policy(active=False)
        shadow.name = "policies/shadow"
        await admin.put(shadow)
        await admin.put(idle_policy())
        await eventually(lambda: _both_followed(admin), timeout=10)
        await site.pass_time(20)
        await mute_agent.aclose()
        del site.agents["mute"]
        await site.pass_time(39)
        assert not (await client.get(found["idle"].name)).notes
        await site.pass_time(2)
        noted = await eventually(lambda: _noted(client, found["idle"]), timeout=10)
        assert "the GPU idle for 1 h" in noted.notes[0]
        await site.pass_time(60)
        revoked = await eventually(lambda: _revoked(client, found["idle"]), timeout=10)
        grace = to_datetime(revoked.revoke_time) - clock.wall()
        assert timedelta(minutes=9) <= grace <= timedelta(minutes=10)
        await site.pass_time(11)
        await eventually(lambda: _ended(client, found["idle"]), timeout=10)
        await eventually(lambda: len(hook.texts("policy")) == 2, timeout=10)
        assert {one["holder"] for one in hook.events if one["event"] != "node_down"} == {"idle"}
        assert [text.partition(":")[0] for text in hook.texts("node_down")] == ["nodes/mute is down"]
        for other in ("busy", "mute"):
            left = await client.get(found[other].name)
            assert (left.state, list(left.notes)) == (Reservation.STATE_ACTIVE, [])

        asked = api.DryRunUsePolicyRequest(use_policy=shadow, start_time=to_timestamp(begun))
        past = await admin.policies.DryRunUsePolicy(asked, timeout=30)
        shown = [one for one in reversed(await admin.acts()) if one.policy == shadow.name]
        assert [(one.stage, one.subject, one.outcome) for one in past.policy_acts] == [
            (one.stage, one.subject, one.outcome) for one in shown
        ]
        assert [one.stage for one in shown] == [1, 2]
        for one, other in zip(past.policy_acts, shown, strict=True):
            assert abs(to_datetime(one.time) - to_datetime(other.time)) <= STEP
        held = 3 * 130 * MINUTE
        assert past.known.seconds + past.unknown.seconds == pytest.approx(held, abs=6 * MINUTE)
        assert past.unknown.seconds == pytest.approx(110 * MINUTE, abs=6 * MINUTE), (
            "of the silent agent, and of it alone"
        )
        assert (past.subject_count, past.act_count, past.step.seconds) == (3, 2, 60)


async def _both_followed(admin: Admin) -> bool:
    return len(await admin.standings()) == 2


async def _is_busy(client: Client, one: Reservation) -> bool:
    [gpu] = (await client.get(one.name)).usage.gpus
    return gpu.state == api.GpuUsage.STATE_BUSY


async def _noted(client: Client, one: Reservation) -> Reservation | None:
    found = await client.get(one.name)
    return found if found.notes else None


async def _revoked(client: Client, one: Reservation) -> Reservation | None:
    found = await client.get(one.name)
    return found if found.HasField("revoke_time") else None


async def _ended(client: Client, one: Reservation) -> Reservation | None:
    found = await client.get(one.name)
    return found if found.HasField("end_time") else None

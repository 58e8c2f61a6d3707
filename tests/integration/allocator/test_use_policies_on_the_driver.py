"""Use policies through real agents over the driver's double, a real fleet and a real allocator, in virtual time."""

import asyncio
import hmac
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from gpuscale.allocator.domain.model import Node
from gpuscale.allocator.usecases import fleet as following
from gpuscale.allocator.usecases import notifying, policing
from gpuscale.allocator.usecases import policing as orders
from gpuscale.allocator.usecases.fleet import FleetView
from gpuscale.allocator.usecases.policing import KillOrders
from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.names import gpu_name
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.wire import to_datetime, to_timestamp
from gpuscale.monitor.agent import collector, helpers
from tests.support import policies
from tests.support.allocator import Client, Reservation, allocator, calling
from tests.support.clock import ManualClock
from tests.support.monitor import running_agent, running_fleet, serving_agent
from tests.support.nvml_double import DoubleProcess, NvmlDouble
from tests.support.policies import KILL, NOTE, NOTIFY, SECRET, Admin, idle_policy
from tests.support.waiting import eventually
from tests.support.webhook import Hook, webhook

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
        self.heard: dict[str, float] = {}  # when the allocator last heard of each node
        self.clock = clock
        self.admin = admin
        self.client = client
        self.agents: dict[str, monitor_api.AgentServiceAsyncStub] = {}

    async def read(self) -> None:
        """Have each agent read now, and wait until the allocator has heard of it."""
        for agent in self.agents.values():
            await agent.GetSnapshot(monitor_api.GetSnapshotRequest(max_age={"seconds": 0}), timeout=60)
        now = self.clock.now()
        await eventually(lambda: all(self.heard.get(one) == now for one in self.agents), interval=0.002)

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        """Note what the allocator hears."""
        apply, renew = FleetView.apply, FleetView.renew

        def noted(names: Iterable[str]) -> None:
            self.heard.update(dict.fromkeys(names, self.clock.now()))

        def applied(view: FleetView, nodes: Sequence[Node], *, full: bool) -> Sequence[Node]:
            noted(one.id for one in nodes)
            return apply(view, nodes, full=full)

        def renewed(view: FleetView, node_ids: Iterable[str], now: float) -> Sequence[str]:
            noted(found := renew(view, node_ids, now))
            return found

        patch.setattr(FleetView, "apply", applied)
        patch.setattr(FleetView, "renew", renewed)


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
        site.listen(stack.enter_context(pytest.MonkeyPatch.context()))
        mute = await stack.enter_async_context(AsyncExitStack())
        shared = {"clock": clock, "period_seconds": MINUTE}
        site.agents["alpha"] = await stack.enter_async_context(
            running_agent(fleet.address, node="alpha", source="nvml", **shared)
        )
        site.agents["mute"] = await mute.enter_async_context(
            running_agent(fleet.address, node="mute", simulated_gpu_count=1, **shared)
        )
        for node, count in (("alpha", 2), ("mute", 1)):
            await client.heard(node, count)
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
        await eventually(
            lambda: client.get(found["busy"].name),
            lambda one: [gpu.state for gpu in one.usage.gpus] == [api.GpuUsage.STATE_BUSY],
        )
        await admin.target(hook.address)
        begun = clock.wall()
        shadow = idle_policy(active=False)
        shadow.name = "policies/shadow"
        await admin.put(shadow)
        await admin.put(idle_policy())
        await eventually(admin.standings, lambda standings: len(standings) == 2)
        await site.admin.pass_time(20, site.read)
        await mute_agent.aclose()
        del site.agents["mute"]
        await site.admin.pass_time(39, site.read)
        assert not (await client.get(found["idle"].name)).notes
        await site.admin.pass_time(2, site.read)
        noted = await eventually(lambda: policies.noted(client, found["idle"]))
        assert "policy idle: the GPU idle for 1 h" in noted.notes[0]
        assert "will be revoked in 1 h 9 min if this continues" in noted.notes[0]
        assert not noted.HasField("revoke_time")
        renewed = await client.renew(found["idle"])
        assert renewed.notes == noted.notes, "who runs it reads that when it renews"
        await site.admin.pass_time(60, site.read)
        revoked = await eventually(lambda: policies.revoked(client, found["idle"]))
        assert revoked.end_reason.startswith("policy idle: the GPU idle for 2 h")
        grace = to_datetime(revoked.revoke_time) - clock.wall()
        assert timedelta(minutes=9) <= grace <= timedelta(minutes=10)
        await site.admin.pass_time(11, site.read)
        ended = await eventually(lambda: client.ended(found["idle"]))
        assert ended.state == Reservation.STATE_CANCELLED
        await eventually(lambda: [len(hook.texts(of)) for of in ("policy", "ending", "revoked")] == [2, 1, 1])
        begins, ends = hook.texts("policy")
        assert f"{ended.name} of idle: the GPU idle for 1 h" in begins
        assert "will be revoked in 10 min" in ends
        all_are_signed(hook)
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


def all_are_signed(hook: Hook) -> None:
    for headers, body in zip(hook.headers, hook.bodies, strict=True):
        stamp, _, mark = headers["gpuscale-signature"].partition(",v1=")
        expected = hmac.digest(SECRET.encode(), stamp.removeprefix("t=").encode() + b"." + body, "sha256")
        assert hmac.compare_digest(mark, expected.hex())


KILL_STAGES = [
    api.PolicyStage(after={"nanos": 10_000_000}, actions=[NOTE, NOTIFY]),
    api.PolicyStage(after={"nanos": 300_000_000}, actions=[KILL, NOTIFY], grace={"nanos": 300_000_000}),
]


@pytest.mark.usefixtures("reports_stay_fresh")
async def test_an_outsider_is_told_of_and_killed_only_where_that_is_opted_in_and_never_a_holders_child(
    tmp_path: Path, nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real processes and real time. One child of the holder uses the GPU that is held, the other one that nobody holds."""
    place, log, taken = tmp_path / "killer.sock", tmp_path / "killer.log", asyncio.Event()
    take, mute = KillOrders.take, list[asyncio.StreamWriter]()

    def noted(self: KillOrders, *asked: Any) -> Any:
        taken.set()
        return take(self, *asked)

    monkeypatch.setattr(KillOrders, "take", noted)
    monkeypatch.setattr(helpers, "LOOK", 0.05)
    monkeypatch.setattr(helpers, "KILL_PATIENCE", 20.0)
    holder = subprocess.Popen(
        ["sh", "-c", "sleep 900 & echo $!; sleep 900 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    outsiders = [subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 900"]) for _ in range(2)]
    started = [holder, *outsiders]
    assert holder.stdout is not None
    children = child, stray = int(holder.stdout.readline()), int(holder.stdout.readline())
    try:
        async with (
            webhook() as hook,
            running_fleet() as fleet,
            allocator(tmp_path / "state", fleet.address, notify_networks=("127.0.0.0/8",)) as address,
            open_channel(address) as channel,
            calling(address) as client,
            agent_of(fleet.address, channel, killer_socket=place, state_dir=tmp_path) as work,
        ):
            await client.heard("alpha", 2)
            admin = Admin(channel, ManualClock())
            gpus = [gpu_name("alpha", gpu.uuid) for gpu in nvml_double.gpus]
            held = await client.reserve(1, gpus=gpus[:1], holder="ann", ttl=3600)
            admit = monitor_api.AdmitWorkRequest(
                gpu_uuids=[nvml_double.gpus[0].uuid], fence=held.fence, pid=holder.pid, reservation=held.name
            )
            await work.AdmitWork(admit, timeout=60)
            nvml_double.gpus[0].processes = [
                DoubleProcess(holder.pid),
                DoubleProcess(child),
                DoubleProcess(outsiders[0].pid),
            ]
            nvml_double.gpus[1].processes = [DoubleProcess(stray), DoubleProcess(outsiders[1].pid)]
            nvml_double.write()
            await admin.target(hook.address)
            spec = api.UsePolicySpec(
                condition=api.UseCondition.USE_CONDITION_OUTSIDER, stages=KILL_STAGES, active=True
            )
            await admin.put(api.UsePolicy(name="policies/outsiders", spec=spec))

            ended = [f"{gpu}/processes/{one.pid}" for gpu, one in zip(gpus, outsiders, strict=True)]
            spared = f"{gpus[1]}/processes/{stray}"
            await eventually(lambda: _told_of(hook, [*ended, spared]))
            refused = await eventually(lambda: _acted(admin, "REFUSED", [*ended, spared]))
            assert all("nodes/alpha has no gpuscale-killer" in one.reason for one in refused)
            assert all(one.poll() is None for one in started), "nobody opted in"

            with monkeypatch.context() as hasty:
                hasty.setattr(orders, "ANSWER", 3.0)  # taken by then on a busy machine too
                hasty.setattr(helpers, "KILL_PATIENCE", 0.1)
                async with await asyncio.start_unix_server(lambda _, writer: mute.append(writer), place):
                    await eventually(taken.is_set)
                    await admin.put(api.UsePolicy(name="policies/mute", spec=spec))
                    await eventually(lambda: _acted(admin, "ASKED", ended, "policies/mute"))
                for one in mute:
                    one.close()
            for name in ("outsiders", "mute"):
                await admin.policies.DeleteUsePolicy(
                    api.DeleteUsePolicyRequest(name=f"policies/{name}"), timeout=60
                )
            words = ["--agent-user", str(os.getuid()), "--first-user", str(os.getuid())]
            command = [sys.executable, "-m", "gpuscale.monitor.killer", "--socket", str(place), *words]
            with log.open("w") as file:
                started.append(subprocess.Popen(command, stderr=file))
            # Until then the socket is the mute one's.
            await eventually(lambda: "serving user" in log.read_text())
            taken.clear()
            await eventually(taken.is_set)
            spec.active = False
            await admin.put(api.UsePolicy(name="policies/shadow", spec=spec))
            await eventually(lambda: _acted(admin, "SHADOW", [*ended, spared]))
            assert all(one.poll() is None for one in started), "a shadow kills nobody"
            spec.active = True
            await admin.put(api.UsePolicy(name="policies/active", spec=spec))
            await eventually(lambda: _acted(admin, "DONE", ended))
            [act] = await eventually(lambda: _acted(admin, "REFUSED", [spared], "policies/active"))
            assert f"it descends from process {holder.pid}, which was admitted for {held.name}" in act.reason
            for one in outsiders:
                assert await asyncio.to_thread(one.wait, 60) == -signal.SIGKILL
            assert holder.poll() is None
            assert all(psutil.pid_exists(one) for one in children)
            assert not any(one.subject.endswith(f"/{child}") for one in await admin.acts())
            assert f"SIGKILL to process {outsiders[0].pid}" in log.read_text()
            assert str(stray) not in log.read_text(), "the agent does not even ask for it"
    finally:
        for one in started:
            one.kill()
            one.wait()
        holder.stdout.close()
        for one in children:
            os.kill(one, signal.SIGKILL)


@asynccontextmanager
async def agent_of(
    fleet: str, allocator: grpc.aio.Channel, **settings: object
) -> AsyncGenerator["monitor_api.WorkServiceAsyncStub"]:
    """An agent on the double that admits work."""
    agent = serving_agent(fleet, allocator=allocator, source="nvml", period_seconds=0.2, **settings)
    async with agent as address, open_channel(address) as channel:
        yield monitor_api.WorkServiceStub(channel)


async def _told_of(hook: Hook, subjects: Sequence[str]) -> bool:
    return set(subjects) <= {one["subject"] for one in hook.events if one["event"] == "policy"}


async def _acted(
    admin: Admin, outcome: str, subjects: Sequence[str], policy: str = ""
) -> list[api.PolicyAct]:
    """The kills of this outcome, once each of these has one."""
    found = [
        one
        for one in await admin.acts()
        if KILL in one.actions
        and one.outcome == api.PolicyAct.Outcome.Value(f"OUTCOME_{outcome}")
        and one.policy.startswith(policy)
        and one.subject in subjects
    ]
    return found if {one.subject for one in found} == set(subjects) else []

"""The demo: people hold GPUs and use them well or badly, endpoints scale, hosts and GPUs fail, the same for the same seed."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.client.client import AsyncClient
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.up.app import open_all
from gpuscale.up.demo import BUILDS, ENDPOINTS, H100, HABITS, live
from gpuscale.up.demo_hosts import GIB, DemoHost, DemoProgram, DemoSite
from gpuscale.up.settings import load_all
from tests.support.waiting import eventually


def test_state_of_the_demo_is_kept_apart_and_this_host_has_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    plain, demo = load_all([]), load_all(["--demo"])
    assert (plain.up.data_dir.name, demo.up.data_dir.name) == ("gpuscale", "gpuscale-demo")
    assert (demo.agent.source, demo.agent.simulated_gpu_count) == ("simulated", 2)
    said = load_all(["--demo", "--data-dir", str(tmp_path / "own"), "--simulate=3"])
    assert (said.up.data_dir, said.agent.simulated_gpu_count) == (tmp_path / "own", 3)


def test_figures_of_a_gpu_follow_what_runs_on_it() -> None:
    host = DemoHost(BUILDS[0])
    first, *_ = host.programs
    host.programs[first] += [
        DemoProgram("ann", "train.py", lambda: 90.0, 0.7),
        DemoProgram("guy", "test", lambda: 40.0, 0.6),
    ]
    busy, idle = (gpu.reading for gpu in host.snapshot().gpus[:2])
    assert (busy.utilization_percent, idle.utilization_percent) == (100.0, 0.0)
    assert (busy.power_watts, idle.power_watts) == (700 * 0.95, 700 * 0.12)
    assert ([one.user for one in busy.processes], len(idle.processes)) == (["ann", "guy"], 0)
    for reading in (busy, idle):
        assert reading.memory_used_bytes + reading.memory_free_bytes == 80 * GIB - GIB // 2
        assert reading.memory_free_bytes > 0


async def test_people_of_a_demo_that_starts_again_ask_anew() -> None:
    """What they were granted in the same directory has ended, and their same requests would be refused."""

    async def asked() -> set[str]:
        found = set[str]()

        async def reserve(request: allocator_api.ReserveRequest, timeout: float) -> None:
            if len(found) == 3:
                raise EOFError
            found.add(request.request_id)
            raise FailedPreconditionError("its grant has ended")

        client = AsyncClient(channel, "")
        vars(client)["allocator"] = SimpleNamespace(Reserve=reserve)
        with suppress(EOFError):
            await live(HABITS[0], DemoSite(BUILDS, 1e6), client, "1")
        return found

    async with open_channel("127.0.0.1:1") as channel:
        assert not await asked() & await asked()


async def test_the_fleet_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuscale.up.demo_hosts.START_SECONDS", 0.2)
    flags = f"--demo --demo-speed=600 --listen=127.0.0.1:0 --no-dashboard --data-dir={tmp_path}".split()
    async with open_all(load_all(flags)) as running, open_channel(running.address) as channel:
        fleet, allocator = monitor_api.FleetServiceStub(channel), allocator_api.AllocatorServiceStub(channel)
        endpoints = autoscaler_api.EndpointServiceStub(channel)
        health = monitor_api.HealthServiceStub(channel)

        async def lives() -> bool:
            held = (
                await allocator.ListReservations(allocator_api.ListReservationsRequest(page_size=1000))
            ).reservations
            nodes = (await fleet.ListNodes(monitor_api.ListNodesRequest())).nodes
            served = (await endpoints.ListEndpoints(autoscaler_api.ListEndpointsRequest())).endpoints
            events = (await health.ListHealthEvents(monitor_api.ListHealthEventsRequest())).health_events
            busy = [
                process.user
                for node in nodes
                for gpu in node.snapshot.gpus
                for process in gpu.reading.processes
                if gpu.model == H100 and process.utilization_percent > 50
            ]
            return (
                {one.holder for one in held} >= {"ann", "ben"}
                and {one.name for one in nodes} >= {f"nodes/{build.node}" for build in BUILDS}
                and {one.name for one in served if one.status.ready_replicas} == {f"endpoints/{name}" for name in ENDPOINTS}
                and "ann" in busy
                and [one.xid for one in events] == [48]
            )  # fmt: skip

        await eventually(lives, timeout=40.0)

"""`record`, `history`, `get recordings` and `get health` against a fleet with simulated GPUs."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gpuscale.api.monitor import v1 as api
from tests.support.cli import Ran, run_cli
from tests.support.monitor import RunningFleet, running_agent, running_fleet
from tests.support.up import Typed, ctl_environment
from tests.support.waiting import eventually

ONLINE = api.NodeState.NODE_STATE_ONLINE
SLEEP = (sys.executable, "-c", "import sys, time; print('done'); time.sleep(0.9); sys.exit(3)")


@pytest.fixture(scope="module")
async def fleet() -> AsyncGenerator[RunningFleet, None]:
    async with running_fleet() as one, running_agent(one.address, node="alpha"):
        await one.until("alpha", ONLINE)
        yield one


async def ctl(fleet: RunningFleet, *arguments: str) -> Ran:
    """Run the CLI while the fleet goes on."""
    return await asyncio.to_thread(run_cli, "--address", fleet.address, *arguments)


async def record(fleet: RunningFleet, *arguments: str, visible: str = "") -> Ran:
    """Run `gpuscalectl record` as a process of its own: it forwards signals."""
    environment = ctl_environment(CUDA_VISIBLE_DEVICES=visible)
    typed = Typed("--address", fleet.address, *arguments, environment=environment)
    return await asyncio.to_thread(typed.ended)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_record_runs_a_command_and_prints_the_statistics_in_the_known_shape(
    fleet: RunningFleet,
) -> None:
    ran = await record(fleet, "-o", "json", "record", "--interval", "0.25s", "--", *SLEEP)
    assert ran.code == 3, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    assert set(found) == {"monitoring_duration_seconds", "sample_count", "gpu_stats"}
    assert found["monitoring_duration_seconds"] >= 0.9
    assert sorted(found["gpu_stats"]) == ["0", "1", "2", "3"]
    first = found["gpu_stats"]["0"]
    figures = {"utilization", "memory_used_mb", "memory_usage_percent", "temperature_c", "power_draw_w"}
    assert set(first) == {"name", *figures}
    assert set(first["utilization"]) == {"min", "max", "mean", "samples"}
    assert set(first["memory_used_mb"]) == {"min", "max", "mean"}
    assert 1 <= first["utilization"]["samples"] <= found["sample_count"]


async def test_record_takes_the_gpus_that_are_visible_and_leaves_a_recording(fleet: RunningFleet) -> None:
    uuid = (await fleet.node("alpha")).snapshot.gpus[2].uuid
    ran = await record(fleet, "record", "--", *SLEEP, visible=uuid)
    assert ran.code == 3, ran.err
    headings, *rows = ran.out.splitlines()[-2:]
    assert headings.startswith("NODE")
    assert len(rows) == 1
    listed = await ctl(fleet, "get", "recordings", "-o", "json")
    assert any(len(one["gpus"]) == 1 for one in json.loads(listed.out)["recordings"])
    name = json.loads(listed.out)["recordings"][0]["name"]
    shown = await ctl(fleet, "get", "recordings", name)
    assert shown.code == 0, shown.err


async def test_record_of_what_cannot_be_run_or_is_not_there(fleet: RunningFleet) -> None:
    assert (await record(fleet, "record", "--", "no-such-command")).code == 127
    missing = await ctl(fleet, "record", "--node", "beta", "--", "true")
    assert (missing.code, "nodes/beta" in missing.err) == (3, True)
    missing = await ctl(fleet, "record", "--gpu", "beta", "--", "true")
    assert (missing.code, "'beta' is not a gpu" in missing.err) == (2, True)
    uuid = (await fleet.node("alpha")).snapshot.gpus[0].uuid
    wrong = await ctl(fleet, "record", "--node", uuid, "--", "true")
    assert (wrong.code, f"{uuid!r} is not a node" in wrong.err) == (2, True), "and not the GPUs of this host"


async def test_history_shows_trends_and_points(fleet: RunningFleet) -> None:
    await eventually(
        lambda: ctl(fleet, "history", "alpha", "--metric", "cpu_percent", "--points", "-o", "json"),
        lambda ran: ran.code == 0 and len(json.loads(ran.out)["series"]) == 1,
    )
    uuid = (await fleet.node("alpha")).snapshot.gpus[0].uuid
    trends = await ctl(fleet, "history", uuid)
    assert trends.code == 0, trends.err
    assert "POWER_WATTS" in trends.out
    [memory] = [line for line in trends.out.splitlines() if "MEMORY_USED_BYTES" in line]
    assert memory.split()[2:6] == ["256MiB", "256MiB", "256MiB", "-"], "a few seconds say nothing of an hour"
    points = await ctl(fleet, "history", uuid, "--points", "--metric", "power_watts", "--step", "1s")
    assert "POWER_WATTS" in points.out.splitlines()[1]
    none = await ctl(fleet, "history", "alpha", "--points", "--metric", "power_watts")
    assert (none.code, "none: they have no such readings" in none.err) == (0, True), "a host has no watts"
    wrong = await ctl(fleet, "history", uuid, "--metric", "colour")
    assert (wrong.code, "power_watts" in wrong.err) == (2, True)


async def test_history_says_what_none_is_kept_of() -> None:
    async with running_fleet(history_memory_mib=0) as fleet, running_agent(fleet.address, node="alpha"):
        await fleet.until("alpha", ONLINE)
        for points in ((), ("--points",)):
            ran = await ctl(fleet, "history", "node", "alpha", *points)
            assert (ran.code, "no history of nodes/alpha" in ran.err) == (0, True)
            data = await ctl(fleet, "history", "node", "alpha", *points, "-o", "json")
            assert "no history of nodes/alpha" in data.err


async def test_history_is_asked_by_kind_and_a_unit_may_be_left_out(fleet: RunningFleet) -> None:
    uuid = (await fleet.node("alpha")).snapshot.gpus[0].uuid
    asked = ("--since", "10m", "--metric", "utilization")
    for name in (uuid, f"alpha/{uuid.lower()}"):
        gpu = await ctl(fleet, "history", "gpu", name, *asked)
        assert (gpu.code, "UTILIZATION_PERCENT" in gpu.out) == (0, True), gpu.err
    node = await ctl(fleet, "history", "node", "alpha", *asked, "-o", "json")
    [trend] = json.loads(node.out)["trends"]
    assert (trend["name"], trend["stats"]["metric"]) == ("nodes/alpha", "METRIC_UTILIZATION_PERCENT")
    assert set(trend["stats"]) >= {"min", "max", "mean", "sampleCount"}
    for wrong in (("gpu", "alpha"), ("node", uuid)):
        assert (await ctl(fleet, "history", *wrong)).code == 2


async def test_a_recording_is_started_shown_in_the_known_structure_stopped_and_deleted(
    fleet: RunningFleet,
) -> None:
    gpu = (await fleet.node("alpha")).snapshot.gpus[1]
    began = await ctl(
        fleet, "start", "recording", "night", "--gpu", gpu.uuid, "--interval", "0.25s", "--for", "1h"
    )
    assert (began.code, "RUNNING" in began.out) == (0, True), began.err

    async def sampled() -> dict[str, Any] | None:
        ran = await ctl(fleet, "get", "recording", "night", "-o", "json")
        found: dict[str, Any] = json.loads(ran.out)
        return found if found["sample_count"] >= 2 else None

    found = await eventually(sampled)
    assert found is not None
    assert set(found) == {"monitoring_duration_seconds", "sample_count", "gpu_stats"}
    assert list(found["gpu_stats"]) == [str(gpu.index)]
    assert found["gpu_stats"][str(gpu.index)]["name"] == gpu.model
    stopped = await ctl(fleet, "stop", "recording", "night", "-o", "json")
    last = json.loads(stopped.out)
    assert last["gpu_stats"][str(gpu.index)]["utilization"]["samples"] >= 2
    assert json.loads((await ctl(fleet, "get", "rec", "night", "-o", "json")).out) == last
    shown = await ctl(fleet, "get", "recordings", "night")
    assert [line.split()[0] for line in shown.out.splitlines()] == ["NAME", "night", "NODE", "alpha"]
    again = await ctl(fleet, "start", "recording", "night", "--gpu", gpu.uuid)
    assert again.code == 4, "there is one of that name"
    assert (await ctl(fleet, "start", "recording", "day", "--gpu", gpu.uuid)).code == 0
    deleted = await ctl(fleet, "delete", "recording", "night", "dusk", "day", "--yes", "-o", "name")
    assert (deleted.code, deleted.out) == (3, ""), "one is not there, so none is deleted"
    deleted = await ctl(fleet, "delete", "recording", "night", "day", "--yes", "-o", "name")
    assert (deleted.code, deleted.out) == (0, "recordings/night\nrecordings/day\n")
    assert (await ctl(fleet, "get", "recording", "night")).code == 3


async def test_get_health_says_when_nothing_is_wrong(fleet: RunningFleet) -> None:
    ran = await ctl(fleet, "get", "health", "--node", "alpha")
    assert (ran.code, "nothing is wrong" in ran.err) == (0, True)

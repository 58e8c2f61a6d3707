"""The seeds' allocation and scheduling (seeds/001), and quotas, as commands against an allocator that runs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuscale.allocator.usecases.reserving import NEWS_GAP
from tests.support.allocator import allocator, calling
from tests.support.cli import Ran, run_cli
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message, serving

OK, NOT_FOUND, CONFLICT, NO_CAPACITY, USAGE, DENIED = 0, 3, 4, 5, 2, 8
FLEET = (
    node_message(
        "busy",
        gpu_message("busy-0", 0, free=20_000, utilization=90),
        gpu_message("busy-1", 1, free=80_000, utilization=10),
    ),
    node_message(
        "calm",
        gpu_message("calm-0", 0, free=80_000, utilization=0),
        gpu_message("calm-1", 1, free=60_000, utilization=0),
        gpu_message("calm-2", 2, free=60_000, utilization=20),
        gpu_message("calm-3", 3, free=7_999, utilization=0),
    ),
)


UNMEANT = (
    ("check", "--gpus", "99999999999"),
    ("check", "--gpus", "1", "--members", "99999999999"),
    ("check", "--gpus", "1", "--cpus", "inf"),
    ("check", "--gpus", "1", "--cpus", "1e300"),
    ("check", "--gpus", "1", "--share", "1.0001"),
    ("check", "--gpus", "1", "--model", ""),
    ("reserve", "--gpus", "1", "--priority", "99999999999"),
    ("reserve", "--gpus", "1", "--label", "a=b", "--label", "a=c"),
    ("check", "--gpus", "1", "--node-label", "a=b", "--node-label", "a=c"),
    ("check", "--gpus", "1", "--apart-from", "a=b", "--apart-from", "a=c"),
    ("run", "--gpus", "1", "--on-move", "USR1", "true"),
    ("renew", "r1", "--fence", "99999999999999999999"),
    ("rank", "nodes", "--gpus", "99999999999"),
    ("set", "quota", "vision"),
    *(("set", "quota", "vision", "--gpus", wrong) for wrong in ("-1", "some", "nan", "1e300")),
    ("set", "quota", "vision", "--gpus", "1", "--no-limit"),
    ("set", "quota", "vision", "--weight", "0"),
    ("set", "quota", "vision", "--gpus", "1.7e308"),
    ("estimate", "x", "-p", "tp=2", "-p", "tp=4"),
    ("estimate", "x", "--dtype", "fp8", "--kv-cache-tokens", "99999999999999999999"),
)


class Ctl:
    """`gpuscalectl` against one allocator."""

    def __init__(self, address: str, *more: str) -> None:
        self._always = ("--address", address, *more)

    async def run(self, *arguments: str, code: int = OK) -> Ran:
        """Run a command, which is to end with this exit code."""
        ran = await asyncio.to_thread(run_cli, *self._always, *arguments)
        assert ran.code == code, ran.err
        return ran

    async def data(self, *arguments: str, code: int = OK) -> Any:
        """What a command says as JSON."""
        return json.loads((await self.run(*arguments, "-o", "json", code=code)).out)

    async def reserved(self, *arguments: str) -> list[str]:
        """The UUIDs of what is reserved."""
        return [gpu["uuid"] for gpu in (await self.data("reserve", *arguments))["gpus"]]


@pytest.fixture
async def ctl(tmp_path: Path) -> AsyncIterator[Ctl]:
    async with (
        serving(FakeFleet(*FLEET)) as fleet,
        allocator(tmp_path, fleet) as address,
        calling(address) as client,
    ):
        await client.ready()
        yield Ctl(address)


async def test_a_balanced_set_is_searched_for(ctl: Ctl) -> None:
    """Of 80, 60 and 60 the seed refused two, because the best two are uneven."""
    assert sorted(await ctl.reserved("--gpus", "2", "--balanced", "--node", "calm")) == ["calm-1", "calm-2"]


async def test_a_check_says_whether_there_is_room_and_why_not(ctl: Ctl) -> None:
    found = await ctl.data("check", "--gpus", "3")
    assert (found["available"], len(found["gpus"])) == (True, 3)
    short = await ctl.data("check", "--gpus", "4", code=NO_CAPACITY)
    assert not short.get("available", False)
    assert short["message"]
    assert (await ctl.data("get", "reservations"))["reservations"] == [], "a check reserves nothing"


async def test_a_wait_of_nothing_is_one_look_and_a_wait_ends_in_time(ctl: Ctl) -> None:
    """In the seed a wait of 0 raised, and any other overshot by up to 30 s."""
    await ctl.run("check", "--gpus", "4", "--wait", "0s", code=NO_CAPACITY)
    ended = await ctl.run("check", "--gpus", "4", "--wait", f"{NEWS_GAP}s", code=NO_CAPACITY)
    assert ended.out


async def test_what_can_never_be_had_is_not_waited_for(ctl: Ctl) -> None:
    """The check ends at once, instead of asking again and again until the time is over."""
    ended = await ctl.run("check", "--gpus", "9", "--wait", "5s", code=NO_CAPACITY)
    assert ("can never be granted" in ended.out, ended.err) == (True, "")


async def test_what_cannot_be_meant_is_a_usage_error(ctl: Ctl) -> None:
    """Numbers that no field holds, and names with two values: said in words, and nothing is reserved."""
    for typed in UNMEANT:
        ran = await ctl.run(*typed, code=USAGE)
        assert (ran.out, "Traceback" in ran.err) == ("", False), typed
        assert "error:" in ran.err, typed
    assert (await ctl.data("get", "reservations"))["reservations"] == []
    assert (await ctl.data("get", "quotas"))["quotas"] == []


async def test_the_fence_of_another_renews_and_releases_nothing(ctl: Ctl) -> None:
    held, other = [await ctl.data("reserve", "--gpus", "1") for _ in range(2)]
    for command in ("renew", "release"):
        ran = await ctl.run(command, held["name"], "--fence", other["fence"], code=CONFLICT)
        assert "fence" in ran.err
    assert len((await ctl.data("get", "reservations"))["reservations"]) == 2
    await ctl.run("release", held["name"], "--fence", held["fence"])


async def test_nodes_are_ranked_by_idle_gpus(ctl: Ctl) -> None:
    """Idle: below 30 % utilization and 50 % memory."""
    ranked = (await ctl.data("rank", "nodes", "--gpus", "2"))["nodes"]
    assert [(one["name"], one["idleGpuCount"]) for one in ranked] == [("nodes/calm", 3), ("nodes/busy", 1)]
    assert await ctl.data("rank", "nodes", "--gpus", "9") == {"nodes": [], "fallback": True}
    assert (await ctl.run("rank", "nodes", "-o", "name")).out == "nodes/calm\nnodes/busy\n"
    ranked = (await ctl.data("rank", "nodes", "--max-utilization", "10"))["nodes"]
    assert {one["name"]: one.get("idleGpuCount", 0) for one in ranked} == {"nodes/calm": 2, "nodes/busy": 0}


async def test_free_gpus_are_listed_with_their_scores(ctl: Ctl) -> None:
    found = await ctl.data("rank", "gpus")
    shown = (await ctl.run("rank", "gpus", "--limit", "1")).out.splitlines()
    assert f" {found['gpus'][0]['score']['total']:.3f} " in shown[1]
    assert shown[-1] == f"{found['freeCount'] - 1} more are free: raise --limit to see them."


async def test_quotas_are_set_kept_and_deleted(ctl: Ctl) -> None:
    """What is not said stays as it is; what a tenant holds stays held."""
    await ctl.run("set", "quota", "vision", "--gpus", "1.5")
    found = await ctl.data("set", "quota", "vision", "--weight", "2")
    assert (found["gpuMilliLimit"], found["weight"]) == ("1500", 2.0)
    await ctl.reserved("--gpus", "1", "--tenant", "vision")
    over = await ctl.run("reserve", "--gpus", "1", "--tenant", "vision", code=NO_CAPACITY)
    assert "may hold 1.5 GPUs and holds 1; this asks for 1. Release some, or" in over.err
    alone = await ctl.run("reserve", "--gpus", "2", "--tenant", "vision", "--wait", "1m", code=NO_CAPACITY)
    assert "this asks for 2. Ask for less, or" in alone.err, "to release some would not help"
    assert (await ctl.data("get", "quotas", "vision"))["gpuMilliHeld"] == "1000"
    assert "gpuMilliLimit" not in await ctl.data("set", "quota", "vision", "--no-limit")
    await ctl.reserved("--gpus", "1", "--tenant", "vision")
    await ctl.run("delete", "quota", "vision", "--yes")
    assert (await ctl.data("get", "quotas", "vision"))["weight"] == 1.0
    await ctl.run("delete", "quota", "vision", "--yes", code=NOT_FOUND)
    await ctl.run("get", "quotas", "nobody", code=NOT_FOUND)

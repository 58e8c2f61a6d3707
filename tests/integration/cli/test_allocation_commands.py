"""Room that is looked for, and quotas, as commands against an allocator that runs."""

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

OK, NOT_FOUND, NO_CAPACITY = 0, 3, 5
NODE = node_message(
    "calm",
    gpu_message("calm-0", 0, free=80_000, utilization=0),
    gpu_message("calm-1", 1, free=60_000, utilization=0),
    gpu_message("calm-2", 2, free=60_000, utilization=20),
    gpu_message("calm-3", 3, free=7_999, utilization=0),
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
        serving(FakeFleet(NODE)) as fleet,
        allocator(tmp_path, fleet) as address,
        calling(address) as client,
    ):
        await client.ready()
        yield Ctl(address)


async def test_room_is_looked_for_and_waited_for_where_it_may_come(ctl: Ctl) -> None:
    """In the seed (seeds/001) a wait of 0 raised, and any other overshot by up to 30 s."""
    found = await ctl.data("check", "--gpus", "3")
    assert (found["available"], len(found["gpus"])) == (True, 3)
    short = await ctl.data("check", "--gpus", "4", code=NO_CAPACITY)
    assert (short.get("available", False), bool(short["message"])) == (False, True)
    for wait in ("0s", f"{NEWS_GAP}s"):
        assert (await ctl.run("check", "--gpus", "4", "--wait", wait, code=NO_CAPACITY)).out
    never = await ctl.run("check", "--gpus", "9", "--wait", "5s", code=NO_CAPACITY)
    assert ("can never be granted" in never.out, never.err) == (True, ""), "it is not waited for"
    assert (await ctl.data("get", "reservations"))["reservations"] == [], "a check reserves nothing"
    assert sorted(await ctl.reserved("--gpus", "2", "--balanced")) == ["calm-1", "calm-2"]


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

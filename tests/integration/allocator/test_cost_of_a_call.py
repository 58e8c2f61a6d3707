"""What a call costs, counted in Python frames from the guard down and not in time: a machine that is busy counts the same."""

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from gpuscale.common.rpc.interceptor import Guard
from tests.support.allocator import allocator, calling
from tests.support.fake_fleet import FakeFleet, node_message, serving

OUTERMOST = "_answer"
CALLS = 10


async def frames(call: Callable[[], Awaitable[object]]) -> float:
    """How many frames of this thread one call takes, in the server."""
    file, depth, found = Guard.__init__.__code__.co_filename, 0, 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth, found
        code = frame.f_code
        if event == "call" and (depth or (code.co_name == OUTERMOST and code.co_filename == file)):
            depth, found = depth + 1, found + 1
        elif event == "return" and depth:
            depth -= 1

    await call()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        for _ in range(CALLS):
            await call()
    finally:
        sys.setprofile(before)
    return found / CALLS


@pytest.mark.parametrize(("what", "most"), [("get", 45), ("reserve and release", 330)])
async def test_a_call_takes_no_more_frames_than_it_did(tmp_path: Path, what: str, most: int) -> None:
    async with (
        serving(FakeFleet(node_message("n0", count=8))) as fleet,
        allocator(tmp_path, fleet) as address,
        calling(address) as client,
    ):
        await client.ready()
        held = await client.reserve()

        async def in_turn() -> None:
            await client.release(await client.reserve())

        found = await frames(in_turn if what != "get" else lambda: client.get(held.name))
    assert 0 < found <= most

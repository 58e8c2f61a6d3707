"""A full disk refuses what needs room, and nothing that gives something back: every RPC that releases or deletes."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import grpc
import pytest

from gpuscale.common.errors import UnavailableError
from gpuscale.common.store.store import Store
from tests.contract.cancelling import copied
from tests.contract.test_cancelled_calls import CASES, answers, call
from tests.support.autoscaler_app import TIMEOUT, api, endpoint, reason, running
from tests.support.clock import ManualClock
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.small_disk import fill, small_disk
from tests.support.waiting import eventually

GIVES_BACK = ("Release", "BatchRelease", "Delete", "Uncordon", "Forget", "Reset")
CALLS = 30


@pytest.mark.parametrize("method", [one for one in CASES if one.startswith(GIVES_BACK)])
async def test_what_gives_something_back_goes_on(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    opening, prepare = CASES[method]
    clock = ManualClock()
    with small_disk(tmp_path / "disk") as disk:
        state = disk / "state"
        state.mkdir(mode=0o700)
        async with opening(state, clock) as room:
            asked = [await prepare(room, number) for number in range(CALLS)]
            fill(disk)
            for fields in asked:
                await call(room, method, **fields)
            if method == "ReleaseReservation":
                assert "only what gives something back is written" in caplog.text
            kill = copied(state, tmp_path / "kill")
            seen = await answers(room, CALLS)
            async with opening(kill, clock) as restarted:
                assert await answers(restarted, CALLS) == seen


async def test_replicas_end_and_give_their_gpus_back_and_nothing_new_comes(tmp_path: Path) -> None:
    """By the loss of a lease, with an adapter that is given up, and with their endpoints, one of which still waits."""
    allocator, first, second = (
        FakeAllocator({"n": [f"GPU-{one}" for one in range(99)]}),
        FakeAdapter("a"),
        FakeAdapter("b"),
    )
    with small_disk(tmp_path / "disk") as disk:
        async with (
            serving(allocator) as address,
            running(disk / "state", address) as one,
            first.connected(one.address),
        ):
            async with second.connected(one.address):
                for number in range(19):
                    await one.create(endpoint(low=4, gpus=1, name=f"e{number}"))
                await eventually(lambda: len(first.alive) + len(second.alive) == 76)
            allocator.failure = UnavailableError("not now")
            await one.create(endpoint(low=4, gpus=1, name="waits"))
            asked = allocator.calls["Reserve"]
            await eventually(lambda: allocator.calls["Reserve"] > asked)
            filler = fill(disk)
            allocator.failure = None
            more = map("more{}".format, count())

            async def refused() -> bool:
                try:
                    await one.create(endpoint(name=next(more)))
                except grpc.aio.AioRpcError as error:
                    return reason(error) == ("UNAVAILABLE", "DISK_FULL")
                return False

            failures = Store.failures
            await eventually(
                refused, timeout=120
            )  # once the log, which is written from its start again, grows
            assert Store.failures > failures
            lost = first.alive[0]
            allocator.expire(first.told[lost].reservation)
            await eventually(lambda: lost not in first.alive)
            request = api.ForgetAdapterRequest(name="adapters/b")
            forgotten = (await one.adapters.ForgetAdapter(request, timeout=TIMEOUT)).replicas
            assert len(forgotten) == len(second.alive) > 0
            every = api.ListEndpointsRequest(page_size=1000)
            for found in (await one.endpoints.ListEndpoints(every)).endpoints:
                await one.delete(found.name)
            await eventually(lambda: one.endpoints.ListEndpoints(every), lambda found: not found.endpoints)
            assert (first.alive, allocator.held) == ([], [])
            filler.unlink()
            await one.create(endpoint())

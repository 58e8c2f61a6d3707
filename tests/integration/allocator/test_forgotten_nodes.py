"""Nodes that the fleet was told to forget go here too: at once if nothing is held on them, else when it is LOST."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpuscale.allocator.app import DATABASE
from gpuscale.allocator.state.store import AllocatorStore
from gpuscale.common import errors
from tests.support.allocator import Client, Reservation, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.waiting import eventually


async def test_a_node_on_which_nothing_is_held_goes_at_once_and_is_known_anew_when_it_reports(
    tmp_path: Path,
) -> None:
    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=1))
    async with running(tmp_path, fleet) as client:
        fleet.remove("n0")
        await eventually(lambda: _unknown(client, "n0"))
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            [await client.reserve() for _ in range(2)]
        assert "node_not_online" not in caught.value.metadata, "it is not even named"
        await eventually(lambda: _ranked(tmp_path, "n1"))
        fleet.put(node_message("n0", count=1))
        await eventually(client.reserve, retry_on=(errors.ResourceExhaustedError,))
        await eventually(lambda: _ranked(tmp_path, "n0", "n1"))
    async with running(tmp_path, FakeFleet(node_message("n1", count=1))) as client:
        assert not await _unknown(client, "n0")


async def test_what_is_held_on_it_is_lost_and_then_it_goes_unless_it_reports_again_in_time(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=2))
    async with running(tmp_path, fleet, clock=clock, lost_after_seconds=10) as client:
        kept, held = [await client.reserve(one + 1, ttl=3600, nodes=[f"nodes/n{one}"]) for one in (0, 1)]
        fleet.remove("n0", "n1")
        fleet.put(node_message("n0", count=1), node_message("n2", count=1))
        await eventually(
            lambda: _unknown(client, "n2"), lambda unknown: not unknown
        )  # and with it what was sent before
        assert (await client.get(held.name)).state == Reservation.STATE_ACTIVE, "not before its time"
        assert not await _unknown(client, "n1"), "kept while something is held on it"
        clock.advance(11)
        lost = await eventually(lambda: client.ended(held))
        assert lost is not None
        assert lost.state == Reservation.STATE_LOST
        assert [gpu.lost for gpu in lost.gpus] == [True, True]
        await eventually(lambda: _unknown(client, "n1"))
        assert (await client.get(kept.name)).state == Reservation.STATE_ACTIVE
        assert not await _unknown(client, "n0")
    async with running(tmp_path, fleet, clock=clock) as client:
        assert (await client.get(held.name)).gpus == lost.gpus, "which are lost stays known"


async def test_a_node_that_was_forgotten_while_nobody_listened_goes_after_a_day(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, FakeFleet(node_message("n0", count=1), node_message("n1", count=1))):
        pass
    async with running(tmp_path, FakeFleet(node_message("n1", count=1)), clock=clock) as client:
        clock.advance(24 * 3600 - 60)
        assert not await _unknown(client, "n0")
        clock.advance(61)
        await eventually(lambda: _unknown(client, "n0"))
        assert not await _unknown(client, "n1")
        await eventually(lambda: _ranked(tmp_path, "n1"))


async def _ranked(data_dir: Path, *nodes: str) -> bool:
    """Whether these are all that the disk knows of."""
    with closing(sqlite3.connect(data_dir / DATABASE)) as connection:
        return {node for [node] in connection.execute("SELECT node FROM rank")} == {*nodes}


async def _unknown(client: Client, node: str) -> bool:
    """Whether a node is unknown, asked by a request that nothing is large enough for."""
    with pytest.raises((errors.NotFoundError, errors.FailedPreconditionError)) as caught:
        await client.reserve(4000, nodes=[f"nodes/{node}"])
    return isinstance(caught.value, errors.NotFoundError)


async def test_a_node_that_could_not_be_forgotten_on_disk_and_comes_back_keeps_no_rank_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old rank is there still, and must stand in the way neither of its new one nor of other nodes'."""

    async def full(store: AllocatorStore, node: str, rank: int) -> None:
        raise errors.UnavailableError(f"no space left for {node} {rank}")

    fleet = FakeFleet(node_message("n0", count=1), node_message("n1", count=1))
    async with running(tmp_path, fleet) as client:
        with monkeypatch.context() as patch:
            patch.setattr(AllocatorStore, "forget_rank", full)
            fleet.remove("n0")
            await eventually(lambda: _unknown(client, "n0"))
        fleet.put(node_message("n2", count=1), node_message("n0", count=1))
        await eventually(lambda: _ranked(tmp_path, "n0", "n1", "n2"))
    again = FakeFleet(*(node_message(f"n{index}", count=1) for index in range(3)))
    async with running(tmp_path, again) as client:
        assert [(await client.reserve()).gpus[0].node for _ in range(3)] == ["n1", "n2", "n0"]

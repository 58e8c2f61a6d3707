"""What nodes report changes reservations and what is told of them: lost GPUs, usage, quarantine."""

from pathlib import Path

import pytest

from gpuscale.allocator.usecases import accounting
from gpuscale.api.allocator import v1 as api
from gpuscale.common.rpc.status import rpc_errors
from tests.support.allocator import MIB, Reservation, running
from tests.support.clock import ManualClock
from tests.support.fake_fleet import FakeFleet, gpu_message, node_message
from tests.support.waiting import eventually


async def test_a_gpu_that_vanishes_under_a_lease_ends_it_and_frees_the_others(tmp_path: Path) -> None:
    clock = ManualClock()
    fleet = FakeFleet(node_message("n0", count=4))
    async with running(tmp_path, fleet, clock=clock, lost_after_seconds=10) as client:
        whole, other = await client.reserve(3, ttl=3600), await client.reserve(1, ttl=3600)
        gone = next(gpu.uuid for gpu in whole.gpus if gpu.uuid != "n0-0")
        left = [gpu_message(f"n0-{i}", i) for i in range(4) if f"n0-{i}" != gone]
        fleet.put(node_message("n0", *left))
        await eventually(client.live, lambda held: gone not in {gpu.uuid for gpu in held[0].usage.gpus})
        assert (await client.get(whole.name)).state == Reservation.STATE_ACTIVE, "not before its time"
        clock.advance(11)
        lost = await eventually(lambda: client.ended(whole))
        assert lost is not None
        assert lost.state == Reservation.STATE_LOST
        assert {gpu.uuid for gpu in lost.gpus if gpu.lost} == {gone}
        assert gone in lost.end_reason
        assert (await client.get(other.name)).state == Reservation.STATE_ACTIVE
        request = api.KeepAliveRequest(leases=[api.LeaseRenewal(name=whole.name, fence=whole.fence)])
        with rpc_errors():
            answers = [one async for one in client.stub.KeepAlive(iter([request]), timeout=60)]
        (status,) = answers[0].leases
        assert (status.state, status.error_reason) == (Reservation.STATE_LOST, "RESERVATION_ENDED")
        assert gone in status.message
        again = await client.reserve(2)
        assert {gpu.uuid for gpu in again.gpus} == {gpu.uuid for gpu in whole.gpus} - {gone}


async def test_what_a_holder_makes_of_its_gpus_is_told_to_who_reads(tmp_path: Path) -> None:
    fleet = FakeFleet(node_message("n0", count=1))
    async with running(tmp_path, fleet) as client:
        one = await client.reserve()
        assert not one.HasField("usage")
        assert (await client.get(one.name)).usage.idle is True
        busy = gpu_message("n0-0", utilization=80.0, free=30_000)
        busy.reading.memory_used_bytes = 90_000 * MIB
        busy.reading.processes.add(pid=11, memory_used_bytes=1, reservation=one.name)
        busy.reading.processes.add(pid=12, memory_used_bytes=1)
        fleet.put(node_message("n0", busy))
        found = await eventually(
            lambda: client.get(one.name),
            lambda one: one if [gpu.utilization_percent for gpu in one.usage.gpus] == [80.0] else None,
        )
        (gpu,) = found.usage.gpus
        assert (gpu.uuid, gpu.utilization_percent, list(gpu.outsider_pids)) == ("n0-0", 80.0, [12])
        assert found.usage.overused is True
        assert (gpu.state, gpu.outsider_memory_bytes) == (gpu.STATE_BUSY, 1)
        released = await client.release(one)
        assert not (await client.get(released.name)).HasField("usage")


async def test_who_watches_is_told_when_a_holder_begins_to_use_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accounting, "LOOK", 0.1)
    fleet = FakeFleet(node_message("n0", count=1))
    async with running(tmp_path, fleet) as client:
        await client.reserve()
        watch = client.stub.WatchReservations(api.WatchReservationsRequest(), timeout=20)
        states: list[int] = []
        async for message in watch:
            states += [gpu.state for one in message.reservations for gpu in one.usage.gpus]
            if message.full:
                fleet.put(node_message("n0", gpu_message("n0-0", utilization=80.0)))
            if api.GpuUsage.STATE_BUSY in states:
                break
        # What changed beside it may have been told before.
        assert [*dict.fromkeys(states)] == [api.GpuUsage.STATE_IDLE, api.GpuUsage.STATE_BUSY]

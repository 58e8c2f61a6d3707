"""Reserve over real gRPC, with a real store and a fake fleet: grants, filters, refusals, repetitions, concurrency."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.errors import InvalidArgumentError, ResourceExhaustedError
from gpuscale.common.wire import seconds
from tests.support.allocator import Client, Reservation, running
from tests.support.fake_fleet import FakeFleet, GpuState, gpu_message, node_message


async def test_a_grant_tells_everything_about_itself(tmp_path: Path) -> None:
    request_id = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        granted = await client.reserve(2, request_id=request_id, ttl=60, labels={"team": "vision"})
        assert granted.state == Reservation.STATE_ACTIVE
        assert [gpu.uuid for gpu in granted.gpus] == ["n0-0", "n0-1"]
        assert [gpu.name for gpu in granted.gpus] == ["nodes/n0/gpus/n0-0", "nodes/n0/gpus/n0-1"]
        assert {(gpu.node_name, gpu.node) for gpu in granted.gpus} == {("nodes/n0", "n0")}
        assert all(gpu.simulated for gpu in granted.gpus)
        assert granted.fence >= 1
        assert 59 < seconds(granted.remaining) <= 60
        assert granted.expire_time.seconds - granted.create_time.seconds in {59, 60, 61}
        assert not granted.HasField("end_time")
        assert granted.policy == allocator_api.PlacementPolicy.PLACEMENT_POLICY_SPREAD
        assert (granted.owner, granted.holder, granted.request_id) == ("local", "test", request_id)
        assert dict(granted.labels) == {"team": "vision"}
        found = await client.get(granted.name)
        assert (found.fence, found.gpus) == (granted.fence, granted.gpus)


async def test_the_defaults_are_the_seeds(tmp_path: Path) -> None:
    """8000 MiB are enough, 7999 are not; 49 % is little enough, 50 % is not; a lease lasts five minutes."""
    fleet = FakeFleet(
        node_message(
            "n0",
            gpu_message("small", 0, free=7999),
            gpu_message("busy", 1, utilization=50.0),
            gpu_message("just-so", 2, free=8000, utilization=49.0),
        )
    )
    async with running(tmp_path, fleet) as client:
        granted = await client.reserve()
        assert [gpu.uuid for gpu in granted.gpus] == ["just-so"]
        assert seconds(granted.ttl) == 300
        with pytest.raises(ResourceExhaustedError):
            await client.reserve()
        assert len((await client.reserve(2, memory=0, max_utilization_percent=100)).gpus) == 2


async def test_weights_and_defaults_come_from_the_settings_and_the_request(tmp_path: Path) -> None:
    fleet = FakeFleet(
        node_message("n0", gpu_message("idle", 0, free=10_000), gpu_message("free", 1, utilization=40.0))
    )
    options = {"memory_weight": 0.0, "utilization_weight": 1.0, "default_ttl_seconds": 33.0}
    async with running(tmp_path, fleet, **options) as client:
        first = await client.reserve()
        assert ([gpu.uuid for gpu in first.gpus], seconds(first.ttl)) == (["idle"], 33)
        await client.release(first)
        weights = allocator_api.ScoreWeights(memory=1.0, utilization=0.0)
        assert [gpu.uuid for gpu in (await client.reserve(weights=weights)).gpus] == ["free"]


async def test_gpus_that_do_not_answer_or_are_stale_are_not_granted(tmp_path: Path) -> None:
    fleet = FakeFleet(
        node_message(
            "n0",
            gpu_message("hung", 0, state=GpuState.GPU_STATE_HUNG),
            gpu_message("lost", 1, state=GpuState.GPU_STATE_LOST),
            gpu_message("unsaid", 2, state=GpuState.GPU_STATE_UNSPECIFIED),
            gpu_message("stale", 3, state=GpuState.GPU_STATE_STALE),
            gpu_message("old", 4, age=31.0),
            gpu_message("silent", 5, free=None),
            gpu_message("degraded", 6, state=GpuState.GPU_STATE_DEGRADED),
            gpu_message("fine", 7),
            period=10.0,
        )
    )
    async with running(tmp_path, fleet) as client:
        assert {gpu.uuid for gpu in (await client.reserve(2, ttl=20)).gpus} == {"degraded", "fine"}
        with pytest.raises(ResourceExhaustedError) as caught:
            await client.reserve()
        assert caught.value.retry_after is not None
        assert caught.value.retry_after <= 20, "the lease has run out then"
        counts = {
            key: caught.value.metadata.get(key) for key in ("gpu_not_ok", "stale", "memory_unknown", "held")
        }
        assert counts == {"gpu_not_ok": "3", "stale": "2", "memory_unknown": "1", "held": "2"}
        assert "HUNG, LOST, UNSPECIFIED" in caught.value.message


async def test_wrong_arguments_are_named_and_change_nothing(tmp_path: Path) -> None:
    """Fields against each other; one field alone is for tests/contract/test_allocator_catalogue.py."""
    wrong: list[tuple[str, dict[str, object]]] = [
        ("ask.gpus[1]", {"gpus": ["nodes/n0/gpus/a", "nodes/n0/gpus/A"]}),
        ("ask.gpus[0]", {"gpus": ["nodes/n0/gpus/a"], "excluded_gpus": ["nodes/n0/gpus/a"]}),
        ("ask.gpus[0]", {"gpus": ["nodes/n0/gpus/a"], "excluded_nodes": ["nodes/n0"]}),
        ("ask.gpus[0]", {"gpus": ["nodes/n0/gpus/a"], "nodes": ["nodes/n1"]}),
        ("ask.nodes[0]", {"nodes": ["nodes/n0"], "excluded_nodes": ["nodes/n0"]}),
        ("may_preempt", {"may_preempt": True}),
    ]
    async with running(tmp_path, FakeFleet(node_message("n0", count=1))) as client:
        for field, fields in wrong:
            with pytest.raises(InvalidArgumentError) as caught:
                await client.reserve(**fields)
            assert [named.field for named in caught.value.violations if named.field.startswith(field)], field
        assert await client.live() == []


async def test_the_same_request_returns_the_same_grant_whatever_became_of_it(tmp_path: Path) -> None:
    request_id = str(uuid4())
    async with running(tmp_path, FakeFleet(node_message("n0", count=2))) as client:
        first = await client.reserve(request_id=request_id)
        again = await client.reserve(request_id=request_id.upper())
        assert (again.name, again.fence, again.gpus) == (first.name, first.fence, first.gpus)
        assert len(await client.live()) == 1
        await client.release(first)
        after = await client.reserve(request_id=request_id)
        assert (after.name, after.state) == (first.name, Reservation.STATE_RELEASED)
        assert await client.live() == []


async def attempts(client: Client, count: int, **ask: object) -> tuple[list[Reservation], list[Exception]]:
    """So many reservations at once: those that were granted, and what the others were told."""

    async def attempt() -> Reservation | ResourceExhaustedError:
        try:
            return await client.reserve(**ask)
        except ResourceExhaustedError as error:
            return error

    client.timeout = 60.0
    answers = await asyncio.gather(*(attempt() for _ in range(count)))
    granted = [one for one in answers if isinstance(one, Reservation)]
    return granted, [one for one in answers if not isinstance(one, Reservation)]


async def test_200_callers_of_64_gpus_are_64_grants_and_136_clear_refusals(tmp_path: Path) -> None:
    fleet = FakeFleet(*(node_message(f"n{index}", count=8) for index in range(8)))
    async with running(tmp_path, fleet) as client:
        granted, refused = await attempts(client, 200)
        assert (len(granted), len(refused)) == (64, 136)
        assert len({gpu.uuid for one in granted for gpu in one.gpus}) == 64
        assert len({one.name for one in granted}) == len({one.fence for one in granted}) == 64
        for error in refused:
            assert isinstance(error, ResourceExhaustedError)
            assert error.reason == "NO_CAPACITY"
            assert error.retry_after is not None
            assert error.metadata["held"] == "64"
        assert {one.name for one in await client.live()} == {one.name for one in granted}

"""A drain moves work: others start elsewhere at once, and the old finish when those are ready, or when their time is over."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.replicas import HURRIED_DRAIN
from gpuscale.client import connect_async
from gpuscale.common.runtime.tasks import Backoff
from gpuscale.common.store.sqlite_store import Room
from gpuscale.common.wire import enum_word, to_duration
from tests.support.allocator import allocator as real_allocator
from tests.support.autoscaler_app import Autoscaler, endpoint, running
from tests.support.fake_adapter import DRAINING, READY, FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.fake_fleet import FakeFleet, node_message
from tests.support.fake_fleet import serving as serving_fleet
from tests.support.waiting import eventually

LONG = 600.0


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What the lease keeper says."""
    caplog.set_level(logging.INFO, "gpuscale.autoscaler.loop.leases")
    return caplog


def events(logged: pytest.LogCaptureFixture, least: int = logging.INFO) -> Counter[str]:
    """What was said, but not that evaluations were late: on a busy machine they are."""
    said = (one.msg["event"] for one in logged.records if isinstance(one.msg, dict) and one.levelno >= least)
    return Counter(one for one in said if one != "evaluations are late")


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1"], "m": ["GPU-2", "GPU-3"]})


@pytest.fixture
async def address(allocator: FakeAllocator) -> AsyncGenerator[str]:
    async with serving(allocator) as one:
        yield one


@pytest.fixture
async def autoscaler(tmp_path: Path, address: str) -> AsyncGenerator[Autoscaler]:
    async with running(tmp_path, address) as one:
        yield one


@pytest.fixture
async def old(autoscaler: Autoscaler) -> AsyncGenerator[FakeAdapter]:
    """The adapter of node n, with two ready replicas."""
    one = FakeAdapter("a", node="n")
    async with one.connected(autoscaler.address):
        times = {"drain_timeout": to_duration(2), "lease_ttl": to_duration(60)}
        await autoscaler.create(endpoint(low=2, high=2, gpus=1, **times))
        await eventually(lambda: len(one.alive) == 2)
        yield one


@pytest.fixture
async def new(autoscaler: Autoscaler, old: FakeAdapter) -> AsyncGenerator[FakeAdapter]:
    """The adapter of node m, on which what starts is not ready before a test says so."""
    one = FakeAdapter("b", node="m")
    one.makes_ready = False
    async with one.connected(autoscaler.address):
        await eventually(lambda: one.revisions)
        yield one


async def decided(autoscaler: Autoscaler, code: str, text: str = "") -> api.Decision:
    """The newest decision with a step of this code, and this text in it."""

    def has(one: api.Decision) -> bool:
        return any(enum_word(step, "code") == code and text in step.text for step in one.steps)

    return await eventually(autoscaler.history, lambda found: next((one for one in found if has(one)), None))


async def told_to_leave(autoscaler: Autoscaler) -> list[api.Replica]:
    """The replicas whose GPUs will be taken away, once there are some."""
    return await eventually(
        autoscaler.replicas, lambda found: [one for one in found if one.HasField("revoke_time")]
    )


async def test_others_start_at_once_and_each_of_the_old_goes_when_one_is_ready(
    autoscaler: Autoscaler,
    allocator: FakeAllocator,
    old: FakeAdapter,
    new: FakeAdapter,
    logged: pytest.LogCaptureFixture,
) -> None:
    allocator.drain("n", LONG)
    await eventually(lambda: len(new.alive) == 2)
    leaving = await told_to_leave(autoscaler)
    assert {(one.node, one.reason) for one in leaving} == {("nodes/n", "nodes/n is drained: fan")}
    status = await autoscaler.status()
    assert (status.desired_replicas, status.ready_replicas, status.granted_replicas) == (2, 2, 4)
    decision = await decided(autoscaler, "START", "2 of them in place of those")
    assert "2 replicas lose their GPUs at " in decision.summary
    assert decision.summary.endswith("nodes/n is drained: fan")
    assert len(old.alive) == 2

    first, second = new.alive
    new.set(first, READY)
    await eventually(lambda: len(old.alive) == 1)
    new.set(second, READY)
    await eventually(lambda: not old.alive)
    await eventually(lambda: sorted(allocator.held) == ["GPU-2", "GPU-3"])
    ended = [one for one in await autoscaler.replicas(ended=True) if one.node == "nodes/n"]
    assert {(one.state, one.end_reason, one.reason) for one in ended} == {
        (api.Replica.STATE_STOPPED, api.Replica.END_REASON_REVOKED, "nodes/n is drained: fan")
    }
    assert events(logged)["a replica will lose its GPUs"] == 2
    assert not events(logged, logging.WARNING), "it is a plan"


async def test_where_there_is_no_room_they_work_on_as_long_as_they_can_and_that_is_said(
    autoscaler: Autoscaler, allocator: FakeAllocator, old: FakeAdapter, logged: pytest.LogCaptureFixture
) -> None:
    old.finishes = False
    began = asyncio.get_running_loop().time()
    allocator.drain("n", 8.0)
    decision = await decided(autoscaler, "NO_CAPACITY", "those that will lose their GPUs work on until ")
    assert (enum_word(decision, "limited_by"), decision.granted) == ("NO_CAPACITY", 2)
    assert Counter(old.states.values()) == {READY: 2}
    await eventually(lambda: Counter(old.states.values()) == {DRAINING: 2})
    now = asyncio.get_running_loop().time()
    assert now - began > 5.7, "their drain timeout before the deadline"

    await asyncio.sleep(began + 8.0 - now)
    allocator.end("n")
    lost = "a replica was still running when its GPUs were revoked"
    await eventually(lambda: events(logged)[lost] == 2)  # no renewal would be due
    assert "a replica may keep its GPUs" not in events(logged)
    assert not events(logged, logging.WARNING)

    def hurried() -> bool:
        gone = [one.drain_timeout.ToTimedelta().total_seconds() for one in old.told.values()]
        return gone == [HURRIED_DRAIN] * 2

    await eventually(hurried)


async def test_a_drain_lets_replicas_finish_on_a_full_disk_too(
    autoscaler: Autoscaler, allocator: FakeAllocator, old: FakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing starts elsewhere, and those that go finish before their GPUs are taken away, however long ago it last failed."""
    old.finishes = False
    monkeypatch.setattr(Backoff, "next", lambda _: 60.0)
    monkeypatch.setattr(Room, "short", property(lambda _: True, lambda _, __: None), raising=False)
    allocator.drain("n", 5.0)
    await eventually(lambda: Counter(old.states.values()) == {DRAINING: 2})
    gone = [one.drain_timeout.ToTimedelta().total_seconds() for one in old.told.values()]
    assert gone == [2.0] * 2, "as long as they may take"


async def test_a_drain_that_is_lifted_leaves_everything_as_it_was(
    autoscaler: Autoscaler, allocator: FakeAllocator, old: FakeAdapter, new: FakeAdapter
) -> None:
    before = set(old.alive)
    allocator.drain("n", LONG)
    await eventually(lambda: len(new.alive) == 2)
    allocator.undrain("n")
    await eventually(lambda: not new.alive)
    assert set(old.alive) == before
    assert not any(one.HasField("revoke_time") for one in await autoscaler.replicas())
    await eventually(lambda: sorted(allocator.held) == ["GPU-0", "GPU-1"])
    assert len(old.starts) == len(new.starts) == 2


async def test_a_grant_that_is_to_be_taken_away_before_it_was_heard_of_is_replaced_too(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    one, other = FakeAdapter("a", node="n"), FakeAdapter("b", node="m")
    async with one.connected(autoscaler.address):
        allocator.answers.clear()
        await autoscaler.create(endpoint(low=1, high=1, gpus=1))
        await eventually(lambda: allocator.held)
        allocator.drain("n", LONG)
        allocator.answers.set()
        await told_to_leave(autoscaler)
        async with other.connected(autoscaler.address):
            await eventually(lambda: other.alive and not one.alive)


@pytest.mark.parametrize("lifted", [False, True])
async def test_an_autoscaler_that_comes_back_goes_on_with_a_drain_or_hears_that_it_is_over(
    tmp_path: Path, address: str, allocator: FakeAllocator, lifted: bool
) -> None:
    old, new = FakeAdapter("a", node="n"), FakeAdapter("b", node="m")
    async with running(tmp_path, address) as first, old.connected(first.address):
        await first.create(endpoint(low=2, high=2, gpus=1, lease_ttl=to_duration(60)))
        await eventually(lambda: len(old.alive) == 2)
        allocator.drain("n", LONG)
        times = {one.revoke_time.seconds for one in await told_to_leave(first)}
    if lifted:
        allocator.undrain("n")
    async with running(tmp_path, address) as second:
        assert lifted or {one.revoke_time.seconds for one in await told_to_leave(second)} == times
        async with old.connected(second.address), new.connected(second.address):
            expected = (2, 0) if lifted else (0, 2)
            await eventually(lambda: (len(old.alive), len(new.alive)) == expected)
            await eventually(
                second.replicas,
                lambda found: len(found) == 2 and not any(one.HasField("revoke_time") for one in found),
            )
            assert (len(old.alive), len(new.alive)) == expected
            assert len(old.starts) == 2


async def test_one_of_a_capability_set_is_replaced_by_one_of_the_same(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    old, new = FakeAdapter("a", node="n"), FakeAdapter("b", node="m")
    made = endpoint(high=4)
    gpus = api.ReplicaTemplate(template="worker", gpu_count=1, lease_ttl=to_duration(5))
    made.spec.capability_sets.add(id="cpu", capabilities={"cpu": 1}, min_replicas=1)
    made.spec.capability_sets.add(
        id="gpu", capabilities={"gpu": 1}, min_replicas=1, max_replicas=1, template=gpus
    )
    async with old.connected(autoscaler.address):
        await autoscaler.create(made)
        await eventually(lambda: len(old.alive) == 2)
        async with new.connected(autoscaler.address):
            allocator.drain("n", LONG)
            await eventually(lambda: len(old.alive) == len(new.alive) == 1)
            found = {one.capability_set: one.node for one in await autoscaler.replicas()}
            assert found == {"cpu": "nodes/n", "gpu": "nodes/m"}, "what holds no GPUs is not drained"


async def test_a_quota_that_has_no_room_for_both_is_waited_for(tmp_path: Path) -> None:
    old, new = FakeAdapter("a", node="b"), FakeAdapter("b", node="c")
    fleet = FakeFleet(node_message("b", count=1), node_message("c", count=1))
    async with (
        serving_fleet(fleet) as fleet_address,
        real_allocator(tmp_path / "allocator", fleet_address) as address,
        running(tmp_path / "autoscaler", address) as autoscaler,
        connect_async(address) as client,
        old.connected(autoscaler.address),
    ):
        await autoscaler.create(endpoint(low=1, high=1, gpus=1, drain_timeout=to_duration(58)))
        await eventually(lambda: old.alive)
        held = await client.allocator.ListReservations(allocator_api.ListReservationsRequest())
        quota = allocator_api.Quota(tenant=held.reservations[0].tenant, gpu_milli_limit=1000)
        await client.quotas.SetQuota(allocator_api.SetQuotaRequest(quota=quota))
        async with new.connected(autoscaler.address):
            await client.nodes.DrainNode(
                allocator_api.DrainNodeRequest(name="nodes/b", grace=to_duration(68))
            )
            decision = await decided(autoscaler, "REFUSED", "those that will lose their GPUs work on until ")
            assert "quota" in decision.summary
            assert old.alive
            assert not new.alive
            await eventually(lambda: new.alive and not old.alive)

"""The scaling flow through the real service: readings in, decisions stored, adapters told, GPUs reserved and given back."""

import threading
from typing import NoReturn
from uuid import uuid4

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.loop import reconciler
from gpuscale.autoscaler.servicers.endpoint_servicer import _tenant
from gpuscale.autoscaler.state import store
from gpuscale.common.errors import PermissionDeniedError, UnavailableError
from gpuscale.common.runtime import tasks
from gpuscale.common.security.auth import Limits, Principal, Role
from gpuscale.common.wire import enum_word
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support.autoscaler_app import Autoscaler, endpoint, scaling
from tests.support.fake_adapter import FAILED, FakeAdapter
from tests.support.fake_allocator import FakeAllocator
from tests.support.waiting import eventually

State = api.Replica.State


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1", "GPU-2"]})


async def ready(autoscaler: Autoscaler, count: int) -> api.EndpointStatus:
    return await eventually(
        autoscaler.status,
        lambda status: (
            status if status.ready_replicas == count and status.desired_replicas == count else None
        ),
    )


async def decided(autoscaler: Autoscaler, code: str) -> api.Decision:
    """The latest decision, once it is limited by `code`."""
    return await eventually(
        autoscaler.history,
        lambda history: history[0] if history and enum_word(history[0], "limited_by") == code else None,
    )


async def test_a_queue_raises_and_lowers_replicas_each_with_its_own_gpu(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    autoscaler.watchers.queues["jobs"] = (100, 5)
    await autoscaler.create(scaling(high=3, gpus=1))
    status = await ready(autoscaler, 3)
    assert (status.granted_replicas, status.starting_replicas) == (3, 0)
    assert sorted(allocator.held) == ["GPU-0", "GPU-1", "GPU-2"]
    lines = list(adapter.told.values())
    assert sorted(line.gpu_uuids[0] for line in lines) == sorted(allocator.held)
    assert {line.fence for line in lines} == {1, 2, 3}

    autoscaler.watchers.queues["jobs"] = (0, 0)
    await ready(autoscaler, 0)
    await eventually(lambda: not allocator.held)
    assert not adapter.alive
    assert set(adapter.starts.values()) == {1}
    await eventually(lambda: len(adapter.forgotten) == 3)
    changes = [one for one in await autoscaler.history() if one.wanted != one.before]
    numbers = [(one.before, one.wanted, one.granted) for one in reversed(changes)]
    assert numbers == [(0, 1, 1), (1, 2, 2), (2, 3, 3), (3, 2, 2), (2, 1, 1), (1, 0, 0)]
    raised = changes[-1]
    told = ["NOT_MET", "FIRED", "UP", "WITHIN_BOUNDS", "START", "GRANTED"]
    assert [enum_word(step, "code") for step in raised.steps] == told
    assert raised.summary.endswith("depth = 105 > 10: +1")


async def test_rules_are_read_at_ticks_and_changes_of_the_spec_only(
    autoscaler: Autoscaler, adapter: FakeAdapter
) -> None:
    """Else every change of a replica would fire a rule that does not rest."""
    autoscaler.watchers.queues["jobs"] = (100, 0)
    wanted = scaling(tick=600)
    for rule in wanted.spec.rules:
        rule.cooldown.FromSeconds(0)
    await autoscaler.create(wanted)
    await ready(autoscaler, 1)
    adapter.set(adapter.alive[0], FAILED)
    assert (await decided(autoscaler, "BACK_OFF")).wanted == 1
    await eventually(lambda: len(adapter.starts) == 2)
    await ready(autoscaler, 1)
    assert set(adapter.starts.values()) == {1}
    assert [one.state for one in await autoscaler.replicas(ended=True) if one.HasField("end_time")] == [
        State.STATE_FAILED
    ]
    wanted.spec.max_replicas = 9
    await autoscaler.update(wanted)
    await ready(autoscaler, 2)


async def test_too_few_gpus_are_granted_as_far_as_they_go_and_on_release(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    await autoscaler.create(endpoint(low=5, high=5, gpus=1))
    decision = await decided(autoscaler, "NO_CAPACITY")
    assert (decision.wanted, decision.granted) == (5, 3)
    assert "all GPUs are held" in decision.summary
    # Those that have GPUs are starting until their adapter says that they are ready.
    await eventually(
        autoscaler.status,
        lambda one: (one.desired_replicas, one.granted_replicas, one.starting_replicas) == (5, 3, 2),
    )
    allocator.nodes["n"] += ["GPU-3", "GPU-4"]
    await ready(autoscaler, 5)
    assert len(set(allocator.held)) == 5


async def test_gpus_count_against_the_tenant_of_the_endpoint(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    wanted = endpoint(low=1, high=1, gpus=1)
    wanted.tenant = tenant = "ml"
    request = str(uuid4())
    for _ in range(2):
        assert (await autoscaler.create(wanted, request)).tenant == tenant
    await ready(autoscaler, 1)
    assert [one.tenant for one in allocator.reservations.values()] == [tenant]
    changed = await autoscaler.get()
    changed.tenant, changed.spec.max_replicas = "other", 2
    assert (await autoscaler.update(changed)).tenant == tenant, "it stays"


@pytest.mark.parametrize(
    ("role", "limits", "stated", "tenant"),
    [
        (Role.ADMIN, Limits(), "", "ann"),
        (Role.ADMIN, Limits(), "anybody", "anybody"),
        (Role.OPERATOR, Limits(), "", "ann"),
        (Role.OPERATOR, Limits(("ml", "vision")), "", "ml"),
        (Role.OPERATOR, Limits(("ml", "vision")), "vision", "vision"),
        (Role.OPERATOR, Limits(("*",)), "", "ann"),
        (Role.OPERATOR, Limits(("*", "ml")), "vision", "vision"),
        (Role.OPERATOR, Limits(), "ml", None),
        (Role.OPERATOR, Limits(("ml",)), "ann", None),
    ],
)
def test_an_endpoint_counts_against_a_tenant_that_its_creator_may_use(
    role: Role, limits: Limits, stated: str, tenant: str | None
) -> None:
    caller = Principal("ann", role, "token", limits)
    if tenant is not None:
        assert _tenant(stated, caller) == tenant
        return
    with pytest.raises(PermissionDeniedError) as refused:
        _tenant(stated, caller)
    assert refused.value.reason == "OTHER_TENANT"


async def test_what_keeps_a_replica_from_starting_is_said_and_nothing_is_reserved_in_vain(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    await autoscaler.create(endpoint(low=2, high=2, gpus=1))
    assert "no adapter is connected" in (await decided(autoscaler, "NO_ADAPTER")).summary
    assert not allocator.held, "nothing is reserved that nobody could use"
    async with FakeAdapter(max_replicas=1).connected(autoscaler.address):
        await eventually(autoscaler.latest, lambda found: "the maximum number of replicas" in found.summary)
        assert len(allocator.reservations) == 1
    async with FakeAdapter("b").connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1, gpus=9, name="large"))
        await eventually(
            lambda: autoscaler.history("endpoints/large"),
            lambda found: "UNSATISFIABLE" in {enum_word(one, "limited_by") for one in found},
        )


async def test_an_adapter_on_a_node_that_the_allocator_does_not_know_is_passed_over(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    stranger = FakeAdapter("b", node="elsewhere", templates=("worker", "other"))
    async with stranger.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=2, high=2, gpus=1))
        await ready(autoscaler, 2)
        alone = endpoint(low=1, high=1, gpus=1, name="alone")
        alone.spec.template.template = "other"
        await autoscaler.create(alone)
        await eventually(
            lambda: autoscaler.history("endpoints/alone"),
            lambda history: bool(history) and "unknown to the allocator: elsewhere" in history[0].summary,
        )
    assert len(adapter.starts) == 2
    assert not stranger.starts


async def test_gpus_are_released_only_after_the_replica_has_ended_and_until_that_is_acknowledged(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    adapter.finishes = False
    await autoscaler.create(endpoint(high=2, gpus=1))
    await autoscaler.set_replicas(1)
    await ready(autoscaler, 1)
    await autoscaler.set_replicas(0)
    await eventually(lambda: _draining(autoscaler, 1))
    renewals = allocator.calls["RenewReservation"]
    await eventually(lambda: allocator.calls["RenewReservation"] > renewals)
    assert allocator.held == ["GPU-0"]
    assert allocator.calls["ReleaseReservation"] == 0
    allocator.failure = UnavailableError("the allocator restarts")
    adapter.finish()
    await eventually(lambda: allocator.calls["ReleaseReservation"] >= 2)
    assert allocator.held == ["GPU-0"]
    allocator.failure = None
    await eventually(lambda: not allocator.held)


async def _draining(autoscaler: Autoscaler, count: int) -> bool:
    return (await autoscaler.status()).draining_replicas == count


async def test_a_lost_lease_stops_the_replica_at_once(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter
) -> None:
    adapter.finishes = False
    await autoscaler.create(endpoint(low=1, high=1, gpus=1))
    await ready(autoscaler, 1)
    [name] = adapter.alive
    allocator.expire("reservations/v1")
    await eventually(lambda: adapter.told[name].goal == autoscaler_internal.DesiredReplica.GOAL_STOP)
    assert adapter.told[name].drain_timeout.seconds == 1
    [victim] = [one for one in await autoscaler.replicas() if one.name == name]
    assert "lost its reservation" in victim.reason
    assert victim.end_reason == api.Replica.END_REASON_LEASE_LOST
    await eventually(lambda: len(adapter.starts) == 2)


async def test_deleting_drains_everything_and_then_the_endpoint_is_gone(
    autoscaler: Autoscaler, allocator: FakeAllocator, adapter: FakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchers too are free then, not before, and also where whoever removed it is told so later than others see it."""
    adapter.finishes = False
    await autoscaler.create(scaling(high=2, gpus=1))
    autoscaler.watchers.queues["jobs"] = (100, 0)
    await ready(autoscaler, 2)
    await autoscaler.delete()
    await autoscaler.delete()
    await eventually(lambda: _draining(autoscaler, 2))
    assert (await autoscaler.status()).summary.startswith("deleted once its 2 replicas")
    assert autoscaler.watchers.in_use("jobs") == ["endpoints/e"]
    late, failed = "autoscaler.store.after_commit=sleep:0.2", threading.Event()

    def fail(*_: object) -> NoReturn:
        failed.set()
        raise UnavailableError("not now")

    with monkeypatch.context() as failing:
        failing.setattr(store, "remove_endpoint", fail)
        failing.setattr(tasks.Backoff, "next", lambda _: 3600.0)
        adapter.finish()
        await eventually(failed.is_set)
        await eventually(lambda: autoscaler.watchers.in_use("jobs") == ["endpoints/e"])
    monkeypatch.setattr(tasks, "_points", tasks.parse_failpoints(late))
    await autoscaler.delete()
    await eventually(autoscaler.gone)
    assert autoscaler.watchers.in_use("jobs") == []
    assert not allocator.held
    assert await autoscaler.replicas(ended=True) == []
    assert await autoscaler.history() == []


async def test_an_endpoint_whose_replicas_nobody_runs_is_gone_at_once(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "RETRY", 3600.0)
    await autoscaler.create(endpoint(low=2, high=2))
    await decided(autoscaler, "NO_ADAPTER")
    await autoscaler.delete()
    await eventually(autoscaler.gone)

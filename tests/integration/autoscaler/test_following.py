"""An endpoint that keeps a ratio to another, such as decode to prefill."""

from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.common.wire import to_duration
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, running
from tests.support.waiting import eventually


@pytest.fixture
async def autoscaler(tmp_path: Path) -> AsyncGenerator[Autoscaler]:
    async with running(tmp_path, "127.0.0.1:1") as one:
        yield one


def following(name: str, leader: str) -> api.Endpoint:
    """One replica for each two of the leader."""
    made = endpoint(name=name, high=9)
    made.spec.signals.add(id="leader", endpoint=api.EndpointSignal(endpoint=f"endpoints/{leader}"))
    made.spec.rules.add(id="ratio", signal="leader", target=api.TargetRule(value=2.0))
    made.spec.down.stabilization.CopyFrom(to_duration(0))
    return made


async def aims(autoscaler: Autoscaler, name: str, count: int) -> None:
    async def reached() -> bool:
        return (await autoscaler.get(f"endpoints/{name}")).status.desired_replicas == count

    await eventually(reached)


async def test_it_follows_what_the_other_aims_at_both_ways_and_holds_while_there_is_none(
    autoscaler: Autoscaler,
) -> None:
    await autoscaler.create(following("decode", "e"))
    await autoscaler.create(endpoint(high=9))
    for leader, follower in ((5, 3), (8, 4), (3, 2)):
        await autoscaler.set_replicas(leader)
        await aims(autoscaler, "decode", follower)
    await autoscaler.delete()

    async def missed() -> bool:
        request = api.ListDecisionsRequest(parent="endpoints/decode", page_size=1)
        [newest] = (await autoscaler.decisions.ListDecisions(request, timeout=TIMEOUT)).decisions
        [seen] = newest.observations
        return seen.status == api.Observation.STATUS_MISSING and seen.detail == "there is no endpoints/e"

    await eventually(missed)
    await aims(autoscaler, "decode", 2)


async def test_circles_are_refused_with_the_field_that_closes_them(autoscaler: Autoscaler) -> None:
    await autoscaler.create(following("b", "a"))
    await autoscaler.create(following("c", "b"))
    closing = following("a", "other")
    closing.spec.signals.add(id="back", endpoint=api.EndpointSignal(endpoint="endpoints/c"))
    refusals = {"a": closing, "d": following("d", "d")}
    texts: dict[str, str] = {}
    for name, one in refusals.items():
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await autoscaler.create(one)
        assert reason(caught.value)[0] == "INVALID_ARGUMENT"
        texts[name] = caught.value.details() or ""
    assert texts == {
        "a": "endpoint.spec.signals[1].endpoint.endpoint must not lead back to endpoints/a, as endpoints/c does",
        "d": "endpoint.spec.signals[0].endpoint.endpoint must not lead back to endpoints/d, as endpoints/d does",
    }
    del closing.spec.signals[1]
    await autoscaler.create(closing)
    changed = following("a", "b")
    with pytest.raises(grpc.aio.AioRpcError, match="must not lead back"):
        await autoscaler.update(changed)

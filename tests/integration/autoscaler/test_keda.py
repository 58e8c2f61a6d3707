"""KEDA follows our decisions over a real server: what it polls, what is pushed to it, and what it is told when it errs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.keda import v1 as api
from gpuscale.autoscaler.domain.signals import QueueState
from gpuscale.autoscaler.loop import reconciler
from gpuscale.common.errors import InvalidArgumentError, NotFoundError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.wire import enum_word
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, running, scaling
from tests.support.keda import Keda, scaled_object
from tests.support.waiting import eventually

NOWHERE = "127.0.0.1:1"
RARELY = 60.0
"""A tick that no test lives to see: what arrives was pushed by a change."""


@pytest.fixture
async def autoscaler(tmp_path: Path) -> AsyncGenerator[Autoscaler]:
    """Without an allocator, and no adapter ever connects: KEDA drives the replicas."""
    async with running(tmp_path, NOWHERE) as one:
        yield one


@pytest.fixture
def stub(autoscaler: Autoscaler) -> Any:
    return api.ExternalScalerStub(autoscaler.channel)


@pytest.fixture
def keda(stub: Any) -> Keda:
    return Keda(stub)


async def following(stream: Any) -> Any:
    """The next message of a stream."""
    async with asyncio.timeout(TIMEOUT):
        return await stream.read()


async def test_spec_and_value_come_from_the_store_before_any_signal_is_ready(
    autoscaler: Autoscaler, keda: Keda
) -> None:
    autoscaler.watchers.queues["jobs"] = QueueState.PENDING
    await autoscaler.create(scaling())
    assert await keda.spec(scaled_object()) == ("desired", 1, 1.0)
    assert await keda.value(scaled_object()) == ("desired", 0, 0.0)
    assert not await keda.active(scaled_object())
    await autoscaler.set_replicas(4)
    assert await keda.value(scaled_object(metric="desired")) == ("desired", 4, 4.0)
    assert await keda.value(scaled_object(), metric="") == ("desired", 4, 4.0)
    with pytest.raises(InvalidArgumentError, match="metricName"), rpc_errors():
        await keda.value(scaled_object(), metric="depth")


async def test_without_an_adapter_rules_still_decide_and_the_decision_says_so_and_is_pushed(
    autoscaler: Autoscaler, keda: Keda, stub: Any
) -> None:
    """The template is one that no adapter serves; what is wanted follows the queue up and down again."""
    await autoscaler.create(scaling(high=3))
    stream = stub.StreamIsActive(scaled_object())
    assert not (await following(stream)).result
    autoscaler.watchers.queues["jobs"] = (100, 0)
    assert (await following(stream)).result

    async def wanted() -> int:
        return (await keda.value(scaled_object()))[1]

    async def nothing_waits() -> bool:
        return await wanted() == 0 and not await autoscaler.replicas()

    await eventually(
        autoscaler.history,
        lambda found: any(enum_word(one, "limited_by") == "NO_ADAPTER" and one.wanted == 3 for one in found),
    )
    assert await wanted() == 3
    assert (await autoscaler.status()).ready_replicas == 0
    autoscaler.watchers.queues["jobs"] = (0, 0)
    await eventually(nothing_waits)
    assert not (await following(stream)).result


async def test_only_changes_are_pushed_and_none_waits_for_a_tick(autoscaler: Autoscaler, stub: Any) -> None:
    """From 1 to 3 and 2 it stays active: nothing is sent, and the next message is the end of it."""
    await autoscaler.create(endpoint(tick=RARELY))
    stream = stub.StreamIsActive(scaled_object())
    answers = [(await following(stream)).result]
    await autoscaler.set_replicas(1)
    answers.append((await following(stream)).result)
    for replicas in (3, 2, 0):
        await autoscaler.set_replicas(replicas)
    answers.append((await following(stream)).result)
    assert answers == [False, True, False]
    await autoscaler.set_replicas(1)
    assert (await following(stream)).result
    await autoscaler.delete()
    assert not (await following(stream)).result, "it is inactive while it is being deleted"


async def test_an_order_is_pushed_while_the_reconciler_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "CONCURRENT", 0)  # so busy that it gets to no endpoint
    async with running(tmp_path, NOWHERE) as autoscaler:
        await autoscaler.create(endpoint())
        stream = api.ExternalScalerStub(autoscaler.channel).StreamIsActive(scaled_object())
        assert not (await following(stream)).result
        await autoscaler.set_replicas(1)
        assert (await following(stream)).result


async def test_streams_end_with_the_endpoint(autoscaler: Autoscaler, stub: Any) -> None:
    """The spec is sent at open, as GetMetricSpec answers it."""
    await autoscaler.create(endpoint(tick=RARELY))
    specs, active = stub.StreamMetricSpec(scaled_object()), stub.StreamIsActive(scaled_object())
    assert await following(specs) == await stub.GetMetricSpec(scaled_object(), timeout=TIMEOUT)
    assert not (await following(active)).result
    await autoscaler.delete()
    assert await _end(specs) == ([], "NOT_FOUND")
    assert await _end(active) == ([], "NOT_FOUND")


async def _end(stream: Any) -> tuple[list[bool], str]:
    """What a stream still says, and the status it ends with."""
    said: list[bool] = []
    try:
        while (answer := await following(stream)) is not grpc.aio.EOF:
            said.append(answer.result)
    except grpc.aio.AioRpcError as error:
        return said, error.code().name
    return said, "OK"


async def test_a_restart_changes_no_answer(tmp_path: Path) -> None:
    async with AsyncExitStack() as clients:
        async with running(tmp_path, NOWHERE) as before:
            await before.create(endpoint(tick=RARELY))
            await before.set_replicas(3)
            channel = await clients.enter_async_context(open_channel(before.address))
            stream = api.ExternalScalerStub(channel).StreamIsActive(scaled_object())
            assert (await following(stream)).result
        assert await _end(stream) == ([], "UNAVAILABLE")
    async with running(tmp_path, NOWHERE) as after:
        stub: Any = api.ExternalScalerStub(after.channel)
        again = Keda(stub)
        assert await again.spec(scaled_object()) == ("desired", 1, 1.0)
        assert await again.value(scaled_object()) == ("desired", 3, 3.0)
        assert (await following(stub.StreamIsActive(scaled_object()))).result


def _ref(**metadata: str) -> api.ScaledObjectRef:
    return api.ScaledObjectRef(name="workers", scalerMetadata=metadata)


WRONG = [
    (scaled_object("nobody"), NotFoundError, 'scalerMetadata["endpoint"]'),
    (_ref(), InvalidArgumentError, "scalerMetadata"),
    (_ref(scalerAddress="here:1"), InvalidArgumentError, 'scalerMetadata["endpoint"]'),
    (scaled_object("No Id"), InvalidArgumentError, 'scalerMetadata["endpoint"]'),
    (scaled_object(metric="depth"), InvalidArgumentError, 'scalerMetadata["metric"]'),
]


async def test_an_endpoint_is_named_as_kedas_users_name_it_and_every_rpc_says_what_is_wrong_with_that(
    autoscaler: Autoscaler, keda: Keda, stub: Any
) -> None:
    """Keys that are not ours hold what they like."""
    await autoscaler.create(endpoint(tick=RARELY))
    odd = {"endpoint": "e", "query": "sum(\n  up\u200b\n)" + " " * 5_000, "an\nother": ""}
    for metadata in ({"endpoint": "endpoints/e"}, {"endpointFromEnv": "e"}, odd):
        assert await keda.spec(_ref(**metadata)) == ("desired", 1, 1.0)
    for ref, error, field in WRONG:
        for call in (
            keda.active(ref),
            keda.spec(ref),
            keda.value(ref),
            following(stub.StreamIsActive(ref)),
            following(stub.StreamMetricSpec(ref)),
        ):
            with pytest.raises(error) as caught, rpc_errors():
                await call
            assert field in str(caught.value)

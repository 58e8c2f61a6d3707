"""KEDA follows our decisions over a real server: what it polls, what is pushed to it, and what it is told when it errs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.keda import v1 as api
from gpuscale.autoscaler.domain.queues import QueueState
from gpuscale.autoscaler.loop import reconciler
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError, NotFoundError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.wire import enum_word
from gpuscale.gateway.main import open_gateway
from gpuscale.gateway.settings import GatewaySettings
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

    async def said() -> bool:
        return any(
            enum_word(one, "limited_by") == "NO_ADAPTER" and one.wanted == 3
            for one in await autoscaler.history()
        )

    async def nothing_waits() -> bool:
        return await wanted() == 0 and not await autoscaler.replicas()

    await eventually(said)
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


async def test_many_scaled_objects_share_one_connection(autoscaler: Autoscaler, stub: Any) -> None:
    """30 streams and their polls over 6 endpoints; each hears of its own endpoint only."""
    names = [f"e{number}" for number in range(6)]
    for name in names:
        await autoscaler.create(endpoint(name=name, tick=RARELY))
    streams = [(name, stub.StreamIsActive(scaled_object(name))) for name in names for _ in range(5)]
    first = await asyncio.gather(*(following(stream) for _, stream in streams))
    assert not any(one.result for one in first)
    order = autoscaler_api.SetReplicasRequest(name="endpoints/e3", replicas=2)
    await autoscaler.endpoints.SetReplicas(order, timeout=TIMEOUT)
    of_e3 = await asyncio.gather(*(following(stream) for name, stream in streams if name == "e3"))
    assert len(of_e3) == 5
    assert all(one.result for one in of_e3)
    keda = Keda(stub)
    values = await asyncio.gather(*(keda.value(scaled_object(name)) for name, _ in streams))
    assert {name: value[1] for (name, _), value in zip(streams, values, strict=True)} == {
        name: 2 if name == "e3" else 0 for name in names
    }
    for _, stream in streams:
        stream.cancel()


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


@pytest.mark.parametrize(
    "metadata",
    [
        {"endpoint": "endpoints/e"},
        {"endpointFromEnv": "e"},
        {"endpoint": "e", "query": "sum(\n  up\u200b\n)" + " " * 5_000, "an\nother": ""},
    ],
)
async def test_an_endpoint_is_named_as_kedas_users_name_it(
    autoscaler: Autoscaler, stub: Any, metadata: dict[str, str]
) -> None:
    """Keys that are not ours hold what they like."""
    await autoscaler.create(endpoint(tick=RARELY))
    assert await Keda(stub).spec(_bad(**metadata)) == ("desired", 1, 1.0)


def _bad(**metadata: str) -> api.ScaledObjectRef:
    return api.ScaledObjectRef(name="workers", scalerMetadata=metadata)


@pytest.mark.parametrize(
    ("ref", "error", "field"),
    [
        (scaled_object("nobody"), NotFoundError, 'scalerMetadata["endpoint"]'),
        (_bad(), InvalidArgumentError, "scalerMetadata"),
        (_bad(scalerAddress="here:1"), InvalidArgumentError, 'scalerMetadata["endpoint"]'),
        (scaled_object("No Id"), InvalidArgumentError, 'scalerMetadata["endpoint"]'),
        (scaled_object(metric="depth"), InvalidArgumentError, 'scalerMetadata["metric"]'),
    ],
    ids=["unknown", "empty", "missing", "no-id", "other-metric"],
)
async def test_what_is_wrong_with_a_scaled_object_is_named_by_every_rpc(
    autoscaler: Autoscaler, stub: Any, ref: api.ScaledObjectRef, error: type[GpuscaleError], field: str
) -> None:
    await autoscaler.create(endpoint(tick=RARELY))
    keda = Keda(stub)
    calls = [
        keda.active(ref),
        keda.spec(ref),
        keda.value(ref),
        following(stub.StreamIsActive(ref)),
        following(stub.StreamMetricSpec(ref)),
    ]
    for call in calls:
        with pytest.raises(error) as caught, rpc_errors():
            await call
        assert field in str(caught.value)


async def test_all_of_it_through_the_gateway(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint(tick=RARELY))
    settings = GatewaySettings(listen="127.0.0.1:0", autoscaler_address=autoscaler.address)
    async with open_gateway(settings) as (forwarder, services):
        server = Server(ServerOptions(), Authenticator())
        server.add_generic(forwarder, services)
        address = server.bind()
        async with server, open_channel(address) as channel:
            stub: Any = api.ExternalScalerStub(channel)
            active, specs = stub.StreamIsActive(scaled_object()), stub.StreamMetricSpec(scaled_object())
            assert not (await following(active)).result
            assert len((await following(specs)).metricSpecs) == 1
            await autoscaler.set_replicas(2)
            assert (await following(active)).result
            keda = Keda(stub)
            assert await keda.value(scaled_object()) == ("desired", 2, 2.0)
            assert await keda.spec(scaled_object()) == ("desired", 1, 1.0)
            assert await keda.active(scaled_object())
            active.cancel()
            specs.cancel()

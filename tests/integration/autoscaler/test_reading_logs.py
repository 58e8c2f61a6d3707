"""What a replica wrote is asked of its adapter over the adapter's own connection: bounded, and with an answer in any case."""

import asyncio

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.loop import hub as asked_logs
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason
from tests.support.fake_adapter import FakeAdapter
from tests.support.waiting import eventually


async def read(
    one: Autoscaler, name: str, *, offset: int | None = None, most: int = 0
) -> api.ReadReplicaLogResponse:
    request = api.ReadReplicaLogRequest(name=name, offset=offset, max_bytes=most)
    return await one.endpoints.ReadReplicaLog(request, timeout=TIMEOUT)


async def refusal(one: Autoscaler, name: str) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(one, name)
    return reason(refused.value)


async def started(one: Autoscaler, adapter: FakeAdapter) -> str:
    """The name of an endpoint's only replica, which runs."""
    await one.create(endpoint())
    await one.set_replicas(1)
    await eventually(lambda: len(adapter.alive) == 1)
    return adapter.alive[0]


async def test_a_log_is_read_in_parts(autoscaler: Autoscaler) -> None:
    adapter = FakeAdapter(keeps_logs=True)
    async with adapter.connected(autoscaler.address):
        name = await started(autoscaler, adapter)
        adapter.logs[name] = b"x" * 100_000 + b"end"
        newest = await read(autoscaler, name)
        assert (len(newest.content), newest.offset) == (65_536, 100_003 - 65_536)
        assert newest.next_offset == 100_003
        assert not newest.ended
        adapter.logs[name] += b" and more"
        more = await read(autoscaler, name, offset=newest.next_offset, most=4)
        assert (more.content, more.offset, more.next_offset) == (b" and", 100_003, 100_007)
        adapter.set(name, api.Replica.STATE_FAILED)

        async def over() -> bool:
            return (await read(autoscaler, name)).ended

        await eventually(over)


async def test_without_a_log_the_reason_is_named(autoscaler: Autoscaler) -> None:
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        name = await started(autoscaler, adapter)
        assert await refusal(autoscaler, name) == ("FAILED_PRECONDITION", "NO_LOG"), "the adapter keeps none"
        assert await refusal(autoscaler, "endpoints/e/replicas/other") == ("NOT_FOUND", "NOT_FOUND")
        other = name.replace("endpoints/e/", "endpoints/f/")
        assert await refusal(autoscaler, other) == ("NOT_FOUND", "NOT_FOUND")

    async def gone() -> bool:
        return await refusal(autoscaler, name) == ("UNAVAILABLE", "ADAPTER_DISCONNECTED")

    await eventually(gone)
    keeper = FakeAdapter(keeps_logs=True)
    keeper.states = adapter.states
    async with keeper.connected(autoscaler.address):

        async def nothing_written() -> bool:
            return await refusal(autoscaler, name) == ("FAILED_PRECONDITION", "NO_LOG")

        await eventually(nothing_written)


async def test_an_adapter_that_does_not_answer_holds_up_nobody(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many calls wait and no more, each ends, and the adapter is told what is desired all the while."""
    adapter = FakeAdapter(keeps_logs=True)
    async with adapter.connected(autoscaler.address):
        name = await started(autoscaler, adapter)
        adapter.mute = True
        calls = [refusal(autoscaler, name) for _ in range(asked_logs.MOST_AT_ONCE + 2)]
        with monkeypatch.context() as patch:
            patch.setattr(asked_logs, "TIMEOUT", 3.0)
            answers = await asyncio.gather(*calls)
        busy = ("RESOURCE_EXHAUSTED", "LOGS_BUSY")
        assert sorted(answers) == [busy] * 2 + [("UNAVAILABLE", "ADAPTER_SILENT")] * asked_logs.MOST_AT_ONCE
        await autoscaler.set_replicas(0)
        await eventually(lambda: not adapter.alive)
        adapter.mute, adapter.logs[name] = False, b"late"
        assert (await read(autoscaler, name)).content == b"late"

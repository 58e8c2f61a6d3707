"""What happens when an adapter is lost, silent, doubled, restarted or given up, knows of replicas that nobody else does, or is asked for logs."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.loop import hub
from gpuscale.autoscaler.loop import hub as asked_logs
from gpuscale.common.security.auth import Authenticator
from gpuscale.common.wire import enum_word
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support import autoscaler_app
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, endpoint, reason, running, scaling
from tests.support.fake_adapter import FAILED, READY, FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.tokens import bearer, write_tokens
from tests.support.waiting import eventually

State = api.Replica.State
STRAY = "endpoints/e/replicas/stray"
REGISTER = autoscaler_internal.Register(adapter="a", kind="fake", node="n", templates=["worker"])
Message = autoscaler_internal.Register | autoscaler_internal.Report


@pytest.fixture
def allocator() -> FakeAllocator:
    return FakeAllocator({"n": ["GPU-0", "GPU-1", "GPU-2"], "m": ["GPU-3", "GPU-4"]})


class Connection:
    """A stream that a test writes to and reads from by hand."""

    def __init__(
        self,
        stream: grpc.aio.StreamStreamCall[
            autoscaler_internal.ConnectRequest, autoscaler_internal.ConnectResponse
        ],
    ) -> None:
        self._stream = stream

    async def send(self, *messages: Message) -> None:
        for message in messages:
            await self._stream.write(request(message))

    async def receive(self) -> autoscaler_internal.ConnectResponse:
        """The next desired state that names a replica, or the error that ended the stream."""
        async with asyncio.timeout(TIMEOUT):
            found = await self._stream.read()
        if isinstance(found, autoscaler_internal.ConnectResponse):
            return found if found.replicas else await self.receive()
        async with asyncio.timeout(TIMEOUT):
            code, details = await self._stream.code(), await self._stream.details()
        raise grpc.aio.AioRpcError(
            code, await self._stream.initial_metadata(), await self._stream.trailing_metadata(), details or ""
        )


@asynccontextmanager
async def connection(channel: grpc.aio.Channel, *messages: Message) -> AsyncGenerator[Connection]:
    """A connection on which these messages were sent."""
    stream = autoscaler_internal.AdapterStreamServiceStub(channel).Connect()
    opened = Connection(stream)
    try:
        await opened.send(*messages)
        yield opened
    finally:
        stream.cancel()


def request(message: Message) -> autoscaler_internal.ConnectRequest:
    if isinstance(message, autoscaler_internal.Register):
        return autoscaler_internal.ConnectRequest(register=message)
    return autoscaler_internal.ConnectRequest(report=message)


async def sent(messages: list[Message]) -> AsyncGenerator[autoscaler_internal.ConnectRequest]:
    """These messages, and then nothing for as long as the call lasts."""
    for message in messages:
        yield request(message)
    await asyncio.Event().wait()


async def listed(autoscaler: Autoscaler) -> list[api.Adapter]:
    answer = await autoscaler.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=TIMEOUT)
    return list(answer.adapters)


async def shows(autoscaler: Autoscaler, *wanted: str) -> None:
    """Wait until the replicas that have not ended are in these states, in alphabetical order."""
    await eventually(
        autoscaler.replicas,
        lambda found: sorted([State.Name(one.state).removeprefix("STATE_") for one in found]) == list(wanted),
    )


async def test_a_lost_adapter_makes_its_replicas_unknown_and_nothing_else_happens(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """P14: neither are they replaced on another adapter, nor is one of those stopped, nor are their GPUs released."""
    lost, other = FakeAdapter("a"), FakeAdapter("b")
    autoscaler.watchers.queues["jobs"] = (100, 0)

    async def held() -> api.Decision | None:
        latest = await autoscaler.latest()
        codes = [enum_word(step, "code") for step in latest.steps]
        return latest if "REPLICAS_UNKNOWN" in codes and latest.count > 3 else None

    async with other.connected(autoscaler.address):
        async with lost.connected(autoscaler.address):
            await eventually(lambda: autoscaler.connected(2))
            await autoscaler.create(scaling(high=2, gpus=1))
            await shows(autoscaler, "READY", "READY")
            assert (len(lost.alive), len(other.alive)) == (1, 1)
        await shows(autoscaler, "READY", "UNKNOWN")
        autoscaler.watchers.queues["jobs"] = (0, 0)
        decision = await eventually(held)
        assert (decision.before, decision.wanted, enum_word(decision, "limited_by")) == (2, 2, "ADAPTER_LOST")
        assert (len(lost.starts), len(other.starts)) == (1, 1)
        assert len(other.alive) == 1
        assert len(allocator.held) == 2
        assert "1 replica has not been heard of" in (await autoscaler.status()).summary
        renewals = allocator.calls["RenewReservation"]
        await eventually(lambda: allocator.calls["RenewReservation"] > renewals)
        async with lost.connected(autoscaler.address):
            await shows(autoscaler)
    assert set((lost.starts + other.starts).values()) == {1}


async def test_a_silent_adapter_is_lost_although_it_is_connected(
    autoscaler: Autoscaler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "SILENT", 1.0)
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1))
        await shows(autoscaler, "READY")
        adapter.silent = True
        await shows(autoscaler, "UNKNOWN")
        assert await autoscaler.connected(0)
        adapter.silent = False
        await shows(autoscaler, "READY")
    assert set(adapter.starts.values()) == {1}


async def test_what_only_a_later_adapter_says_does_not_end_its_connection(autoscaler: Autoscaler) -> None:
    """A message with field 4000, of two bytes, and a state that is not known: what it says after that is heard."""
    unknown = autoscaler_internal.ConnectRequest.FromString(bytes.fromhex("82fa01020800"))
    async with connection(autoscaler.channel, REGISTER, autoscaler_internal.Report()) as own:
        await own._stream.write(unknown)
        await autoscaler.create(endpoint(low=1, high=1))
        desired = await own.receive()
        [replica] = desired.replicas
        for state, shown in ((99, "STARTING"), (READY, "READY")):
            report = autoscaler_internal.ReplicaReport(replica=replica.replica, state=state)  # type: ignore[arg-type]
            await own.send(autoscaler_internal.Report(revision=desired.revision, replicas=[report]))
            await shows(autoscaler, shown)


async def test_what_ended_while_the_adapter_was_away_is_noted_when_it_comes_back(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1, gpus=1))
        await shows(autoscaler, "READY")
        [name] = adapter.alive
    adapter.states[name] = FAILED
    async with adapter.connected(autoscaler.address):
        await eventually(lambda: len(adapter.starts) == 2)
        await shows(autoscaler, "READY")
        await eventually(lambda: len(allocator.held) == 1)
        await eventually(lambda: name in adapter.forgotten)


async def test_a_second_connection_takes_over_and_the_first_is_aborted(autoscaler: Autoscaler) -> None:
    async with (
        connection(autoscaler.channel, REGISTER) as first,
        FakeAdapter("a").connected(autoscaler.address),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await first.receive()
        assert reason(caught.value) == ("ABORTED", "TAKEN_OVER")
        await autoscaler.create(endpoint(low=1, high=1))
        await shows(autoscaler, "READY")


async def test_no_adapter_of_another_kind_takes_over_what_another_runs(autoscaler: Autoscaler) -> None:
    """Two on one host may have the host's name for their id: each would start what the other runs."""
    other = FakeAdapter("a")
    other.register.kind = "container"
    async with FakeAdapter("a").connected(autoscaler.address):
        await autoscaler.create(endpoint(low=1, high=1))
        await shows(autoscaler, "READY")
        async with connection(autoscaler.channel, other.register) as refused:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refused.receive()
        assert reason(caught.value) == ("FAILED_PRECONDITION", "OTHER_KIND")
        await shows(autoscaler, "READY")
    async with other.connected(autoscaler.address):
        await eventually(lambda: len(other.starts) == 1)


def _report(*states: State.ValueType, name: str = STRAY) -> autoscaler_internal.Report:
    return autoscaler_internal.Report(
        replicas=[autoscaler_internal.ReplicaReport(replica=name, state=state) for state in states]
    )


async def test_messages_that_an_adapter_may_not_send(autoscaler: Autoscaler) -> None:
    cases: list[tuple[list[Message], str]] = [
        ([REGISTER, REGISTER], "INVALID_ARGUMENT"),
        ([REGISTER, autoscaler_internal.Report(revision=-1)], "INVALID_ARGUMENT"),
        ([REGISTER, _report(READY, name="x")], "INVALID_ARGUMENT"),
        ([REGISTER, _report(State.STATE_PENDING)], "INVALID_ARGUMENT"),
        ([REGISTER, _report(READY, READY)], "INVALID_ARGUMENT"),
    ]
    for messages, code in cases:
        call = autoscaler_internal.AdapterStreamServiceStub(autoscaler.channel).Connect(
            sent(messages), timeout=TIMEOUT
        )
        assert (await call.code()).name == code, messages


async def test_an_adapter_is_told_nothing_before_it_has_reported(autoscaler: Autoscaler) -> None:
    """Only its report says what runs already; starting before it would start twice."""
    await autoscaler.create(endpoint(low=1, high=1))
    async with connection(autoscaler.channel, REGISTER) as opened:
        await eventually(lambda: listed(autoscaler))
        assert await autoscaler.connected(0)
        await shows(autoscaler, "PENDING")
        await opened.send(autoscaler_internal.Report())
        told = await opened.receive()
        assert [line.goal for line in told.replicas] == [autoscaler_internal.DesiredReplica.GOAL_RUN]


async def test_a_replica_that_never_reached_its_adapter_ends_when_the_stop_is_acknowledged(
    autoscaler: Autoscaler, allocator: FakeAllocator
) -> None:
    """Its adapter was told RUN on a connection that broke; then it is told STOP, and knows nothing of it."""
    async with connection(autoscaler.channel, REGISTER, autoscaler_internal.Report()) as opened:
        await autoscaler.create(endpoint(low=1, high=1, gpus=1))
        await opened.receive()
    await autoscaler.delete()
    async with connection(autoscaler.channel, REGISTER, autoscaler_internal.Report()) as opened:
        told = await opened.receive()
        while told.replicas[0].goal != autoscaler_internal.DesiredReplica.GOAL_STOP:
            told = await opened.receive()
        await opened.send(autoscaler_internal.Report(revision=told.revision - 1))
        await shows(autoscaler, "DRAINING")
        assert allocator.held == ["GPU-0"]
        await opened.send(autoscaler_internal.Report(revision=told.revision))
        await shows(autoscaler)
        await eventually(lambda: not allocator.held)


async def test_adapters_are_listed_by_id(autoscaler: Autoscaler) -> None:
    one, two = FakeAdapter("b", node=""), FakeAdapter("a", templates=("y", "x"), max_replicas=3)
    async with one.connected(autoscaler.address), two.connected(autoscaler.address):
        await eventually(lambda: autoscaler.connected(2))
        first, second = await listed(autoscaler)
    assert (first.name, first.kind, first.node, first.max_replicas) == ("adapters/a", "fake", "nodes/n", 3)
    assert list(first.templates) == ["x", "y"]
    assert (second.name, second.node) == ("adapters/b", "")
    assert second.HasField("last_seen_time")


async def forget(autoscaler: Autoscaler, name: str = "adapters/a") -> list[str]:
    answer = await autoscaler.adapters.ForgetAdapter(api.ForgetAdapterRequest(name=name), timeout=TIMEOUT)
    return list(answer.replicas)


async def test_what_a_forgotten_adapter_had_ends_as_failed_and_another_takes_over(
    autoscaler: Autoscaler, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should it come back after all, it stops what it still runs: that is nobody's, on GPUs that others may have by now."""
    monkeypatch.setattr(hub, "STRAY", 0.2)
    lost, other = FakeAdapter("a", node="n"), FakeAdapter("b", node="m")
    async with lost.connected(autoscaler.address):
        await autoscaler.create(endpoint(low=2, high=2, gpus=1))
        await eventually(lambda: len(lost.alive) == 2)
        names = set(lost.alive)
    await eventually(lambda: autoscaler.connected(0))
    async with other.connected(autoscaler.address):
        await eventually(lambda: autoscaler.connected(1))
        assert not other.alive, "while the first may come back, nothing takes the place of its replicas"
        assert set(await forget(autoscaler)) == names
        await eventually(lambda: len(other.alive) == 2)
        await eventually(lambda: sorted(allocator.held) == ["GPU-3", "GPU-4"])
        gone = [one for one in await autoscaler.replicas(ended=True) if one.name in names]
        assert {one.state for one in gone} == {State.STATE_FAILED}
        said = "adapter a was given up by an operator; whether it runs on is unknown"
        assert {one.reason for one in gone} == {said}
        assert {one.end_reason for one in gone} == {api.Replica.END_REASON_ADAPTER_FORGOTTEN}
        assert [one.name for one in await listed(autoscaler)] == ["adapters/b"]
        for name, why in (
            ("a", ("NOT_FOUND", "NOT_FOUND")),
            ("b", ("FAILED_PRECONDITION", "ADAPTER_CONNECTED")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await forget(autoscaler, f"adapters/{name}")
            assert reason(caught.value) == why
        async with lost.connected(autoscaler.address):
            await eventually(lambda: lost.forgotten == names)
        assert (len(other.alive), lost.alive) == (2, [])


async def test_an_adapter_that_an_earlier_life_knew_can_be_forgotten(
    tmp_path: Path, allocator: FakeAllocator
) -> None:
    """It has not been heard of in this one: its replicas are neither taken for gone, nor lowered, nor given up before."""
    adapter = FakeAdapter()
    async with serving(allocator) as address:
        async with running(tmp_path, address) as first, adapter.connected(first.address):
            first.watchers.queues["jobs"] = (100, 0)
            await first.create(scaling(high=2, gpus=1))
            await eventually(lambda: len(adapter.alive) == 2)
        async with running(tmp_path, address) as second:  # where the queue is empty

            async def kept() -> bool:
                return "REPLICAS_UNKNOWN" in [enum_word(one, "code") for one in (await second.latest()).steps]

            await shows(second, "UNKNOWN", "UNKNOWN")
            await eventually(kept)
            renewals = allocator.calls["RenewReservation"]
            await eventually(lambda: allocator.calls["RenewReservation"] > renewals)
            assert allocator.calls["ReleaseReservation"] == 0
            assert await kept()
            assert len(await forget(second)) == 2
            await eventually(lambda: not allocator.held)


async def test_an_agent_may_be_the_adapter_of_its_own_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocator: FakeAllocator
) -> None:
    """It could end other nodes' replicas otherwise."""
    tokens = write_tokens(tmp_path / "tokens.toml", n1="agent", ada="operator", eve="viewer")
    monkeypatch.setattr(autoscaler_app, "Authenticator", lambda: Authenticator(tokens_file=tokens))
    async with serving(allocator) as address, running(tmp_path, address) as one:
        for who, adapter, node, answer in (
            ("n1", "n1", "n1", "OK"),
            ("n1", "n2", "n2", "PERMISSION_DENIED"),
            ("n1", "n2", "n1", "PERMISSION_DENIED"),
            ("n1", "n1", "", "PERMISSION_DENIED"),
            ("ada", "n2", "n2", "OK"),
            ("eve", "eve", "eve", "PERMISSION_DENIED"),
        ):
            hello = autoscaler_internal.Register(adapter=adapter, kind="process", node=node)
            stream = autoscaler_internal.AdapterStreamServiceStub(one.channel).Connect(
                metadata=grpc.aio.Metadata(*bearer(who)), timeout=TIMEOUT
            )
            await stream.write(request(hello))
            await stream.done_writing()  # which ends an accepted connection with OK
            assert (await stream.code()).name == answer, (who, adapter, node)


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
        await eventually(lambda: read(autoscaler, name), lambda found: found.ended)


async def test_without_a_log_the_reason_is_named(autoscaler: Autoscaler) -> None:
    adapter = FakeAdapter()
    async with adapter.connected(autoscaler.address):
        name = await started(autoscaler, adapter)
        assert await refusal(autoscaler, name) == ("FAILED_PRECONDITION", "NO_LOG"), "the adapter keeps none"
        assert await refusal(autoscaler, "endpoints/e/replicas/other") == ("NOT_FOUND", "NOT_FOUND")
        other = name.replace("endpoints/e/", "endpoints/f/")
        assert await refusal(autoscaler, other) == ("NOT_FOUND", "NOT_FOUND")
    await eventually(
        lambda: refusal(autoscaler, name), lambda found: found == ("UNAVAILABLE", "ADAPTER_DISCONNECTED")
    )
    keeper = FakeAdapter(keeps_logs=True)
    keeper.states = adapter.states
    async with keeper.connected(autoscaler.address):
        await eventually(
            lambda: refusal(autoscaler, name), lambda found: found == ("FAILED_PRECONDITION", "NO_LOG")
        )


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

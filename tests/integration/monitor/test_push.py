"""The agent's stream to the fleet: it comes back after everything, and a run that was replaced stays away."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.meter import CallMeter
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.common.security.auth import Authenticator
from gpuscale.internal.monitor import v1 as monitor_internal
from gpuscale.monitor.agent import push
from tests.support.certificates import Authority
from tests.support.monitor import running_agent, running_fleet, serve
from tests.support.ports import free_port
from tests.support.promtool import named
from tests.support.waiting import eventually

ONLINE = monitor_api.NodeState.NODE_STATE_ONLINE
SERVICE = "gpuscale.internal.monitor.v1.TelemetryService"
Answer = monitor_internal.StreamTelemetryResponse


async def test_an_agent_finds_a_fleet_that_comes_later_and_one_that_was_restarted() -> None:
    """Nothing of the agent's is lost in between but snapshots; none of its numbers goes back."""
    listen, meter = f"127.0.0.1:{free_port()}", CallMeter("agent", Authenticator())

    async def shown(what: str, **which: str) -> float:
        await meter.add(page := MetricsPage())
        [found] = named(b"".join(page.chunks()).decode(), f"gpuscale_agent_fleet_{what}", **which)
        return found.value

    async with running_agent(listen, calls=meter) as agent:
        await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=30)
        assert await shown("connected") == 0
        seq = -1
        for _ in range(2):
            async with running_fleet(listen=listen) as fleet:
                node = await fleet.until("alpha", ONLINE, above_seq=seq)
                assert node.rejected_count == 0
                seq = node.snapshot.seq
                assert await shown("connected") == 1
        assert await shown("streams_failed_total", reason="NO_ANSWER") >= 1


async def test_an_agent_without_tls_is_told_that_its_fleet_speaks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that gRPC says is that the socket was closed."""
    logged: list[str] = []

    class Log:
        def warning(self, _event: str, *, error: str, **_: object) -> None:
            logged.append(error)

    monkeypatch.setattr(push, "_log", Log())
    server = Server(ServerOptions(listen="127.0.0.1:0", tls=Authority(tmp_path).server()), Authenticator())
    address = server.bind()
    async with server, running_agent(address):
        await eventually(lambda: logged, timeout=60)
    assert logged[0] == f"{address} speaks TLS: name its authority with --ca-file"


class ScriptedFleet(monitor_internal.TelemetryServiceServicer):
    """A fleet that welcomes each stream and acknowledges each snapshot, until it ends the stream with `status`."""

    def __init__(self, status: grpc.StatusCode | None = None) -> None:
        self.status = status
        self.hellos = 0
        self.snapshots: list[int] = []

    async def StreamTelemetry(self, request_iterator: Any, context: Any) -> AsyncGenerator[Answer, None]:
        async for request in request_iterator:
            if request.HasField("hello"):
                self.hellos += 1
                yield Answer(acked_seq=-1)
            else:
                self.snapshots.append(request.snapshot.seq)
                yield Answer(acked_seq=request.snapshot.seq)
                if self.status is not None:
                    await context.abort(self.status, "as the test wants")


@asynccontextmanager
async def scripted(fleet: ScriptedFleet) -> AsyncGenerator[str, None]:
    add = partial(monitor_internal.add_TelemetryServiceServicer_to_server, fleet)
    async with serve(Registration(SERVICE, add)) as address:
        yield address


@pytest.fixture
def quick_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "Backoff", partial(push.Backoff, initial=0.02, cap=0.05))


async def test_an_agent_whose_snapshots_are_all_refused_sends_them_less_and_less_often() -> None:
    """As where another node claims its GPUs. It sent a whole one each second, for ever."""

    class Refusing(ScriptedFleet):
        async def StreamTelemetry(self, request_iterator: Any, context: Any) -> AsyncGenerator[Answer, None]:
            async for request in request_iterator:
                if request.HasField("snapshot"):
                    self.snapshots.append(request.snapshot.seq)
                yield Answer(acked_seq=-1, resync=True, rejected_count=len(self.snapshots))

    fleet = Refusing()
    async with scripted(fleet) as address, running_agent(address, period_seconds=0.1):
        await eventually(
            lambda: any(later - one >= 4 for one, later in pairwise(fleet.snapshots)), timeout=60
        )


def test_the_wait_after_refusals_has_a_bound_and_one_that_is_taken_ends_it() -> None:
    backoff, now, waits = push.RefusalBackoff(1.0), 0.0, list[float]()
    for _ in range(40):
        backoff.answered(now, refused=True)
        began = now
        while backoff.waits(now):
            now += 1.0
        waits.append(now - began)
    assert waits == [0.0, 2.0, 4.0, 8.0, 16.0, *[push.LONGEST_REFUSED_SECONDS] * 35]
    backoff.answered(now, refused=False)
    backoff.answered(now, refused=True)
    assert not backoff.waits(now)


async def test_a_fleet_that_refuses_a_change_gets_whole_snapshots() -> None:
    """One of an earlier version does not know every reading of this one."""
    whole = list[bool]()

    class Earlier(ScriptedFleet):
        async def StreamTelemetry(self, request_iterator: Any, context: Any) -> AsyncGenerator[Answer, None]:
            async for request in request_iterator:
                if not request.HasField("hello"):
                    whole.append(request.HasField("snapshot"))
                yield Answer(acked_seq=-1, rejected_count=whole.count(False))

    async with scripted(Earlier()) as address, running_agent(address, period_seconds=0.1):
        await eventually(lambda: False in whole and whole[-3:] == [True] * 3, timeout=60)


@pytest.mark.usefixtures("quick_backoff")
@pytest.mark.parametrize(
    "status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED]
)
async def test_a_stream_that_the_fleet_ends_is_opened_again(status: grpc.StatusCode) -> None:
    """Also where the end is seen while writing, which grpc.aio reports as InvalidStateError."""
    fleet = ScriptedFleet(status)
    async with scripted(fleet) as address, running_agent(address, period_seconds=0.1):
        await eventually(lambda: fleet.hellos >= 4)
    assert fleet.snapshots == sorted(set(fleet.snapshots)), "each stream begins with a new snapshot"


@pytest.mark.usefixtures("quick_backoff")
@pytest.mark.parametrize("status", [grpc.StatusCode.ABORTED, grpc.StatusCode.PERMISSION_DENIED])
async def test_an_agent_that_is_not_wanted_does_not_try_again_soon(status: grpc.StatusCode) -> None:
    """Also where a snapshot was ready to follow Hello: core would report that end as INTERNAL, which is tried again."""

    class Unwelcoming(ScriptedFleet):
        async def StreamTelemetry(self, request_iterator: Any, context: Any) -> AsyncGenerator[Answer, None]:
            await anext(request_iterator)
            self.hellos += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    self.snapshots.append((await anext(request_iterator)).snapshot.seq)
            await context.abort(status, "as the test wants")
            yield

    fleet = Unwelcoming()
    async with scripted(fleet) as address, running_agent(address, period_seconds=0.1) as agent:
        await eventually(lambda: fleet.hellos >= 1)
        await asyncio.sleep(0.8)
        assert (fleet.hellos, fleet.snapshots) == (1, [])
        await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=30)


@pytest.mark.usefixtures("quick_backoff")
async def test_a_fleet_that_acknowledges_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "SILENCE_SECONDS", 0.2)

    class Mute(ScriptedFleet):
        async def StreamTelemetry(self, request_iterator: Any, context: Any) -> AsyncGenerator[Answer, None]:
            async for request in request_iterator:
                self.hellos += request.HasField("hello")
            return
            yield

    fleet = Mute()
    async with scripted(fleet) as address, running_agent(address, period_seconds=0.1):
        await eventually(lambda: fleet.hellos >= 2)


class EndedCall:
    """A call whose end the writer meets first, with InvalidStateError where the fleet ended it well."""

    def __init__(self) -> None:
        self.writes = 0
        self.written = asyncio.Event()

    async def wait_for_connection(self) -> None:
        self.writes += 1
        self.written.set()
        raise asyncio.InvalidStateError("RPC already finished")

    async def read(self) -> object:
        await self.written.wait()
        await asyncio.sleep(0.05)
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "the fleet restarts"
        )

    def cancel(self) -> bool:
        return False


@pytest.mark.usefixtures("quick_backoff")
async def test_a_write_on_a_stream_that_has_ended_is_no_end_of_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[EndedCall] = []

    class Stub:
        def __init__(self, channel: object) -> None: ...

        def StreamTelemetry(self) -> EndedCall:
            calls.append(EndedCall())
            return calls[-1]

    monkeypatch.setattr(push.monitor_internal, "TelemetryServiceStub", Stub)
    async with running_agent("127.0.0.1:1") as agent:
        await eventually(lambda: len(calls) >= 3)
        assert {call.writes for call in calls[:2]} == {1}
        await agent.GetSnapshot(monitor_api.GetSnapshotRequest(), timeout=30)

"""What an adapter reports is taken by the autoscaler, whatever an engine said."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.connection import AutoscalerConnection, one_line, to_wire
from gpuscale.autoscaler.domain.replicas import ReplicaReport, ReplicaState
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.validation import violations
from gpuscale.internal.autoscaler import v1 as autoscaler_internal
from tests.support.waiting import eventually


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unschedulable: no GPU", "Unschedulable: no GPU"),
        ("two\nlines\tand a tab ", "two lines and a tab"),
        ("a bell \x07", "a bell ?"),
        ("x" * 5000, "x" * 1023 + "…"),
    ],
)
def test_a_reason_in_the_words_of_an_engine_never_has_a_whole_report_refused(
    text: str, expected: str
) -> None:
    reported = autoscaler_internal.ReplicaReport(
        replica="endpoints/e/replicas/r", state=api.Replica.STATE_STARTING, reason=one_line(text)
    )
    assert reported.reason == expected
    report = autoscaler_internal.Report(replicas=[reported])
    assert violations(autoscaler_internal.ConnectRequest(report=report)) == []


@pytest.mark.parametrize(
    ("code", "told"), [(None, None), (-9, -9), (3_221_225_786, None), (2**31 - 1, 2**31 - 1)]
)
def test_an_exit_code_that_the_contract_cannot_hold_is_not_known(code: int | None, told: int | None) -> None:
    wire = to_wire("endpoints/e/replicas/r", ReplicaReport(ReplicaState.FAILED, -1, code))
    assert (wire.exit_code if wire.HasField("exit_code") else None, wire.pid) == (told, 0)
    report = autoscaler_internal.Report(replicas=[wire])
    assert violations(autoscaler_internal.ConnectRequest(report=report)) == []


async def test_an_autoscaler_that_comes_late_is_found_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter waited up to 10 s between two attempts, and its channel for as long."""
    waits, enough = list[float](), asyncio.Event()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) > 8:
            enough.set()
            await asyncio.Event().wait()

    def same(error: GpuscaleError) -> GpuscaleError:
        return error

    most = SimpleNamespace(uniform=lambda _, high: high)
    monkeypatch.setattr("gpuscale.common.runtime.tasks._random", most)
    unused: Any = SimpleNamespace(reports=lambda: None)
    async with open_channel("127.0.0.1:1") as channel:
        connection = AutoscalerConnection(
            channel, autoscaler_internal.Register(), unused, asyncio.Event(), same, unused
        )
        with monkeypatch.context() as patched:
            patched.setattr("gpuscale.autoscaler.adapters.connection.asyncio.sleep", sleep)
            running = asyncio.create_task(connection.run())
            await asyncio.wait_for(enough.wait(), 30)
        running.cancel()
    assert max(waits) == 2.0


async def test_an_adapter_tells_why_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Also where the refusal comes while it writes: that was INTERNAL, of gRPC."""
    changed = asyncio.Event()

    def reports() -> dict[str, ReplicaReport]:
        changed.set()
        return {str(number): ReplicaReport(ReplicaState.READY, reason="x" * 1000) for number in range(1000)}

    class Refusing(autoscaler_internal.AdapterStreamServiceServicer):
        async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
            await anext(request_iterator)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
            yield

    def explain(error: GpuscaleError) -> GpuscaleError:
        return error

    server = grpc.aio.server()
    autoscaler_internal.add_AdapterStreamServiceServicer_to_server(Refusing(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    some: Any = SimpleNamespace(reports=reports, taken=list)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        connection = AutoscalerConnection(
            channel, autoscaler_internal.Register(), some, changed, explain, some
        )
        running = asyncio.create_task(connection.run())
        line = await eventually(lambda: caplog.records)
        running.cancel()
    await server.stop(None)
    assert line[0].msg["error"] == "who are you?"


async def test_an_urgent_channel_dials_again_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dict[str, Any]()

    def opened(_: str, options: Any) -> Any:
        given.update(options)

    monkeypatch.setattr(grpc.aio, "insecure_channel", opened)
    open_channel("127.0.0.1:1", urgent=True)
    assert given["grpc.max_reconnect_backoff_ms"] == 1000

"""A server that notes its calls: who is turned away for calling too often, and what the audit log says."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.common import errors
from gpuscale.common.rpc.audit import AuditOptions
from gpuscale.common.rpc.server import Registration, Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from tests.support.throwaway import Allocator, serve
from tests.support.tokens import authenticator, bearer
from tests.support.waiting import eventually

GET = "/gpuscale.api.allocator.v1.AllocatorService/GetReservation"
RELEASE = "/gpuscale.api.allocator.v1.AllocatorService/ReleaseReservation"
TELEMETRY = "/gpuscale.internal.monitor.v1.TelemetryService/StreamTelemetry"


ROLES = {"alice": "operator", "bob": "operator", "eve": "viewer"}


async def test_a_caller_that_calls_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    options = ServerOptions(calls_per_second=0.5)
    async with serve(options=options, authenticator=authenticator(tmp_path, **ROLES)) as served:
        with rpc_errors():
            await served.get(metadata=bearer("alice"))
        with pytest.raises(errors.ResourceExhaustedError) as caught, rpc_errors():
            await served.get(metadata=bearer("alice"))
        assert caught.value.reason == "RATE_LIMITED"
        assert 0 < (caught.value.retry_after or 0) <= 2
        with rpc_errors():
            await served.get(metadata=bearer("bob"))


async def test_changes_and_refusals_are_noted_and_reads_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "audit.jsonl"
    options = ServerOptions(audit=AuditOptions(file, 1 << 20))
    async with serve(options=options, authenticator=authenticator(tmp_path, **ROLES)) as served:
        await served.get(metadata=bearer("eve"))
        await served.release(metadata=(*bearer("alice"), ("x-request-id", "r-1")))
        with pytest.raises(errors.PermissionDeniedError), rpc_errors():
            await served.release(metadata=bearer("eve"))
        with pytest.raises(errors.UnauthenticatedError), rpc_errors():
            await served.get(metadata=bearer("nobody"))
        stream = served.telemetry.StreamTelemetry(iter(()), metadata=bearer("alice"))
        assert [message async for message in stream] == []  # data: counted, not noted
    noted = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["who"], one["role"], one["method"], one["resource"], one["result"]) for one in noted] == [
        ("alice", "operator", RELEASE, "reservations/r", "OK"),
        ("eve", "viewer", RELEASE, "reservations/r", "PERMISSION_DENIED"),
        (None, None, GET, "reservations/r", "UNAUTHENTICATED"),
    ]
    [line] = [one.msg for one in caplog.records if "no valid identity" in str(one.msg)]
    assert isinstance(line, dict)
    assert (line["reason"], line["peer"]) == ("TOKEN_INVALID", noted[2]["from"])
    assert noted[0]["request_id"] == "r-1"
    assert len({one["request_id"] for one in noted} - {""}) == 3
    assert all(one["from"].startswith("ipv4:127.0.0.1:") for one in noted)
    assert "token" not in file.read_text().replace('"by": "token"', "")


class Logs(autoscaler_api.EndpointServiceServicer):
    async def ReadReplicaLog(self, request: Any, context: Any) -> autoscaler_api.ReadReplicaLogResponse:
        if request.offset == 9:
            raise errors.NotFoundError("gone")
        return autoscaler_api.ReadReplicaLogResponse(next_offset=7)


async def test_who_follows_a_log_is_noted_once(tmp_path: Path) -> None:
    def add(server: Server) -> None:
        service = partial(autoscaler_api.add_EndpointServiceServicer_to_server, Logs())
        server.add(Registration("gpuscale.api.autoscaler.v1.EndpointService", service))

    file = tmp_path / "audit.jsonl"
    async with serve(options=ServerOptions(audit=AuditOptions(file, 1 << 20)), prepare=add) as served:
        read: Any = autoscaler_api.EndpointServiceStub(served.channel).ReadReplicaLog
        for offset in (None, 7, 7, 0):
            await read(autoscaler_api.ReadReplicaLogRequest(name="endpoints/e/replicas/r", offset=offset))
        with pytest.raises(errors.NotFoundError), rpc_errors():
            await read(autoscaler_api.ReadReplicaLogRequest(name="endpoints/e/replicas/r", offset=9))
    noted = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(one["resource"], one["result"]) for one in noted] == [
        ("endpoints/e/replicas/r", result) for result in ("OK", "OK", "NOT_FOUND")
    ]


async def test_a_call_that_is_cancelled_is_noted(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    begun = asyncio.Event()

    async def work(request: Any, context: Any) -> Any:
        begun.set()
        await asyncio.Event().wait()

    options = ServerOptions(audit=AuditOptions(file, 1 << 20))
    async with serve(Allocator(work), options=options) as served:
        call = asyncio.ensure_future(served.release())
        await begun.wait()
        call.cancel()
        await eventually(lambda: "CANCELLED" in file.read_text())

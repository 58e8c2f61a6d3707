"""Health is for everybody and tells the truth; reflection is there only when asked for."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from gpuscale.common import errors
from gpuscale.common.config.settings import ProgramSettings
from gpuscale.common.rpc.server import ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from tests.support.ports import free_port
from tests.support.throwaway import ALLOCATOR, FLEET, serve
from tests.support.tokens import authenticator, bearer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_needs_no_token(tmp_path: Path) -> None:
    async with serve(authenticator=authenticator(tmp_path, viewer="viewer")) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        for service in ("", ALLOCATOR, FLEET):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == SERVING
        with pytest.raises(errors.NotFoundError), rpc_errors():
            await stub.Check(health_pb2.HealthCheckRequest(service="no.Such"), timeout=30)
        with pytest.raises(errors.InvalidArgumentError), rpc_errors():
            await served.channel.unary_unary("/grpc.health.v1.Health/Check")(b"\xff", timeout=30)


async def test_watchers_see_the_end_coming(tmp_path: Path) -> None:
    """Watch is a coroutine that writes by itself, the other style of stream handlers."""
    async with serve(authenticator=authenticator(tmp_path, viewer="viewer")) as served:
        stub: Any = health_pb2_grpc.HealthStub(served.channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", FLEET, FLEET)]
        for watch in watches:
            assert (await watch.read()).status == SERVING
        stopping = asyncio.create_task(served.server.stop())
        for watch in watches:
            assert (await watch.read()).status == NOT_SERVING
            assert await watch.code() == grpc.StatusCode.UNAVAILABLE
        await stopping


async def services(channel: grpc.aio.Channel, version: str, caller: Any) -> list[str]:
    method: Any = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = method(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=30, metadata=caller
    )
    answers = [answer async for answer in call]
    return [service.name for service in answers[0].list_services_response.service]


async def test_reflection_is_off_by_default() -> None:
    async with serve() as served:
        for version in ("v1", "v1alpha"):
            path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            call = served.channel.stream_stream(path)(timeout=30)
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_when_asked_for(tmp_path: Path) -> None:
    options = ServerOptions(reflection=True)
    async with serve(options=options, authenticator=authenticator(tmp_path, viewer="viewer")) as served:
        for version in ("v1", "v1alpha"):
            found = await services(served.channel, version, bearer("viewer"))
            assert {ALLOCATOR, FLEET} < set(found)
            path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
            refused = served.channel.stream_stream(path)(timeout=30)
            assert await refused.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_probe_without_tls_is_answered_health_and_nothing_else(tmp_path: Path) -> None:
    where = f"127.0.0.1:{free_port()}"
    async with (
        serve(
            options=ServerOptions(health_listen=where), authenticator=authenticator(tmp_path, viewer="viewer")
        ) as served,
        grpc.aio.insecure_channel(where) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", ALLOCATOR):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == SERVING
        await served.server.report(serving=False)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=ALLOCATOR), timeout=30)
        assert answer.status == NOT_SERVING
        with pytest.raises(errors.UnimplementedError), rpc_errors():
            await channel.unary_unary(f"/{ALLOCATOR}/ListReservations")(
                b"", timeout=30, metadata=bearer("viewer")
            )
        await served.server.stop()
        with pytest.raises(errors.UnavailableError), rpc_errors():
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=30)


async def test_nothing_that_stays_open_keeps_probes_from_their_answer() -> None:
    """As of a program that serves no gRPC. Neither a Watch nor half a Check: whoever reaches this address could have a cluster restart the program."""
    where, check, watch = (
        f"127.0.0.1:{free_port()}",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
    )
    async with (
        ProgramSettings(health_listen=where).open_health(),
        grpc.aio.insecure_channel(where) as channel,
    ):
        assert await channel.unary_stream(watch)(b"", timeout=30).code() is grpc.StatusCode.UNIMPLEMENTED
        halves = [channel.stream_unary(check)() for _ in range(90)]
        assert await channel.unary_unary(check)(b"", timeout=60) == b"\x08\x01"
        for half in halves:
            half.cancel()


async def test_an_address_for_probes_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        async with ProgramSettings(health_listen="nowhere").open_health():
            pass
    assert [one.field for one in caught.value.violations] == ["health_listen"]

"""Certificates alone, through a gateway: services know who calls, and believe nobody but gateways about it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from gpuscale.allocator.app import open_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.app import open_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common.errors import PermissionDeniedError, UnauthenticatedError
from gpuscale.common.names import LEASE_KEY
from gpuscale.common.rpc.audit import AuditOptions
from gpuscale.common.rpc.channel import ClientTls, open_channel
from gpuscale.common.rpc.server import Server, ServerOptions
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import CALLER_KEY, Authenticator
from gpuscale.gateway.main import open_gateway
from gpuscale.gateway.settings import GatewaySettings
from tests.support.allocator import Client
from tests.support.autoscaler_app import endpoint
from tests.support.certificates import Authority
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import grpc

SPIFFE = "spiffe://example.org/gpuscale"
ROLES = {"alice": "operator", "bob": "operator", "root": "admin", "services": "operator", "gate": "gateway"}
ROOT = ((CALLER_KEY, "admin/root"),)


@dataclass
class World:
    """Where the gateway and the allocator are, whom they trust, and what the allocator notes."""

    gateway: str
    allocator: str
    autoscaler: str
    who: Callable[[str], ClientTls]
    audit: Path

    @asynccontextmanager
    async def client(self, name: str, address: str = "") -> AsyncIterator[Client]:
        async with open_channel(address or self.gateway, tls=self.who(name)) as channel:
            yield Client(allocator_api.AllocatorServiceStub(channel))


@asynccontextmanager
async def site(folder: Path, gate: str = "gate") -> AsyncIterator[World]:
    """The services with mutual TLS; `gate`: whose certificate the gateway has."""
    authority = Authority(folder)
    issued = {name: authority.client(f"{SPIFFE}/{role}/{name}", name) for name, role in ROLES.items()}
    issued["namesake"] = authority.client(f"{SPIFFE}/agent/services", "namesake")
    audit, limits = folder / "audit.jsonl", folder / "limits.toml"
    limits.write_text('[tokens]\n[certificates.services]\ntenants = ["*"]\n')
    own = issued["services"]

    def server(name: str) -> tuple[Server, str]:
        tls = authority.server(name, client_ca=authority)
        noted = AuditOptions(audit, 1 << 20) if name == "allocator" else None
        served = Server(
            ServerOptions(tls=tls, audit=noted), Authenticator(tokens_file=limits, accept_certificates=True)
        )
        return served, served.bind()

    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        fleet = await enter(open_channel(await enter(serving(FakeFleet(node_message("n", count=4))))))
        clock, channels = SystemClock(), list[str]()
        for name, kind, opening in (
            ("allocator", AllocatorSettings, open_allocator),
            ("autoscaler", AutoscalerSettings, open_autoscaler),
        ):
            served, address = server(name)
            more = {"allocator": await enter(open_channel(channels[0], tls=own))} if channels else {}
            settings: Any = kind.model_validate({"data_dir": folder / name})
            opened: Any = opening(settings, fleet=fleet, clock=clock, **more)
            served.add(*await enter(opened))
            await enter(served)
            channels.append(address)
        gateway = GatewaySettings(
            ca_file=authority.file,
            cert_file=issued[gate].cert_file,
            key_file=issued[gate].key_file,
            allocator_address=channels[0],
            autoscaler_address=channels[1],
        )
        served, address = server("gateway")
        forwarder, services = await enter(open_gateway(gateway))
        served.add_generic(forwarder, services)
        await enter(served)
        yield World(address, *channels, issued.__getitem__, audit)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with site(tmp_path) as found:
        async with found.client("root") as root:
            await root.ready()
        yield found


async def test_a_reservation_is_of_who_made_it_through_the_gateway(world: World) -> None:
    async with world.client("alice") as alice, world.client("bob") as bob, world.client("root") as root:
        one = await alice.reserve()
        assert (one.owner, one.tenant) == ("alice", "alice")
        for refused in (bob.release(one), bob.renew(one)):
            with pytest.raises(PermissionDeniedError, match="belongs to alice"):
                await refused
        await alice.renew(one)
        await root.release(one)
        await eventually(
            lambda: (
                {("alice", "gateway", "gate", "Reserve"), ("root", "gateway", "gate", "ReleaseReservation")}
                <= noted(world)
            )
        )


def noted(world: World) -> set[tuple[str, str, str | None, str]]:
    """Who made which calls, by whom and through whom, as the audit log says; a line that is being written is left out."""
    lines = [json.loads(line) for line in world.audit.read_text().rpartition("\n")[0].splitlines()]
    return {(line["who"], line["by"], line.get("via"), line["method"].rpartition("/")[2]) for line in lines}


async def test_who_is_no_gateway_calls_for_nobody_else(world: World) -> None:
    """Neither at the gateway, which would pass it on, nor straight at a service; nor may a gateway call for itself."""
    request = allocator_api.ListReservationsRequest()
    for address in (world.gateway, world.allocator):
        async with world.client("bob", address) as bob, world.client("gate", address) as gate:
            with pytest.raises(UnauthenticatedError, match="bob has role operator"), rpc_errors():
                await bob.stub.ListReservations(request, metadata=ROOT)
            with pytest.raises(UnauthenticatedError, match="does not say whom it calls for"), rpc_errors():
                await gate.stub.ListReservations(request)


async def test_a_gateway_with_the_certificate_of_a_service_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, gate="services") as world, world.client("alice") as alice:
        with pytest.raises(UnauthenticatedError, match="only a certificate of role gateway"):
            await alice.page()


async def test_replicas_are_reserved_for_who_created_their_endpoint(world: World) -> None:
    """The autoscaler may renew and release them as well, who created the endpoint may, and nobody else."""
    adapter = FakeAdapter()
    async with AsyncExitStack() as stack:
        alice, bob, services, namesake = [
            await stack.enter_async_context(world.client(name))
            for name in ("alice", "bob", "services", "namesake")
        ]
        channel = await stack.enter_async_context(open_channel(world.gateway, tls=world.who("alice")))
        await stack.enter_async_context(adapter.connected(world.autoscaler, world.who("services")))
        endpoints = autoscaler_api.EndpointServiceStub(channel)
        wanted = endpoint(low=2, high=2, gpus=1)
        created = await endpoints.CreateEndpoint(
            autoscaler_api.CreateEndpointRequest(request_id=str(uuid4()), endpoint=wanted)
        )
        assert (created.endpoint.creator, created.endpoint.tenant) == ("alice", "alice")
        one, other = await eventually(
            services.live, lambda found: found if len(found) == len(adapter.alive) == 2 else None
        )
        assert {(each.owner, each.tenant) for each in (one, other)} == {("alice", "alice")}
        with pytest.raises(PermissionDeniedError):
            await bob.release(one)
        with pytest.raises(PermissionDeniedError, match="bob can only reserve for itself"):
            await bob.reserve(owner="alice")
        await services.renew(one)
        asked = allocator_api.GetReservationRequest(name=one.name)
        seen = [await each.stub.GetReservation(asked) for each in (services, alice, namesake)]
        tokens = [bool(each.lease_token) for each in seen]
        assert tokens == [True, False, False], "whoever reserved proves it, nobody else, by whatever name"
        assert [bool(each.reservation.fence) for each in seen] == [True, True, False]
        await alice.release(other)
        await endpoints.DeleteEndpoint(autoscaler_api.DeleteEndpointRequest(name="endpoints/e"))
        await eventually(services.live, lambda found: not found)


async def test_a_stream_is_of_who_opened_it(world: World) -> None:
    """KeepAlive renews the caller's own leases of a holder, and no others."""
    async with world.client("alice") as alice, world.client("bob") as bob:
        one, other = await alice.reserve(), await bob.reserve()
        stream: grpc.aio.StreamStreamCall[Any, Any] = alice.stub.KeepAlive()
        await stream.write(allocator_api.KeepAliveRequest(holder="test"))
        answer = await stream.read()
        assert [lease.name for lease in answer.leases] == [one.name] != [other.name]
        stream.cancel()


async def test_a_lease_token_stands_for_its_holder(world: World) -> None:
    """Whatever certificate the connection has: that of a node's agent, which passes the call on."""
    for address in (world.gateway, world.allocator):
        await a_lease_token_stands_for_its_holder(world, address)


async def a_lease_token_stands_for_its_holder(world: World, address: str) -> None:
    request = allocator_api.ReserveRequest(
        request_id=str(uuid4()), holder="a", ask=allocator_api.Ask(gpu_count=1)
    )
    async with world.client("alice") as alice, world.client("namesake", address) as node:
        granted, other = await alice.stub.Reserve(request), await alice.reserve()
        shown = ((LEASE_KEY, granted.lease_token),)
        one = granted.reservation
        renewal = allocator_api.RenewReservationRequest(name=one.name, fence=one.fence)
        with pytest.raises(PermissionDeniedError), rpc_errors():
            await node.stub.RenewReservation(renewal)
        assert (await node.stub.RenewReservation(renewal, metadata=shown)).reservation.name == one.name
        for kind, call in (
            (allocator_api.RenewReservationRequest, node.stub.RenewReservation),
            (allocator_api.ReleaseReservationRequest, node.stub.ReleaseReservation),
        ):
            with pytest.raises(PermissionDeniedError) as refused, rpc_errors():
                await call(kind(name=other.name, fence=other.fence), metadata=shown)
            assert refused.value.reason == "LEASE_TOKEN_INVALID"
        release = allocator_api.ReleaseReservationRequest(name=one.name, fence=one.fence)
        await node.stub.ReleaseReservation(release, metadata=shown)
        assert [each.name for each in await alice.live()] == [other.name]
        await alice.release(other)
    assert granted.lease_token not in world.audit.read_text()

"""The gateway as a program: its metrics, its audit log, and callers that call too often."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.allocator import v1 as api
from gpuscale.client import AsyncClient, PermissionDeniedError, UnavailableError, connect_async
from gpuscale.gateway import main
from gpuscale.gateway.settings import GatewaySettings
from gpuscale.testing import FakeServer
from tests.support.first_host import programs
from tests.support.ports import free_port
from tests.support.promtool import value
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

SERVICE = "gpuscale.api.allocator.v1.AllocatorService"


@asynccontextmanager
async def gateway(folder: Path, fake: FakeServer, **more: object) -> AsyncIterator[GatewaySettings]:
    """A gateway in front of a fake server, with tokens for alice, an operator, and eve, a viewer."""
    settings = GatewaySettings.model_validate(
        {
            "listen": f"127.0.0.1:{free_port()}",
            "fleet_address": fake.address,
            "allocator_address": fake.address,
            "autoscaler_address": fake.address,
            "tokens_file": write_tokens(folder / "tokens.toml", alice="operator", eve="viewer"),
        }
        | more
    )
    async with programs(gateway=(main.serve, settings)):
        async with client(settings, "alice") as alice:
            await eventually(
                lambda: alice.allocator.ListReservations(api.ListReservationsRequest()),
                timeout=60,
                retry_on=(UnavailableError,),
            )
        yield settings


def client(settings: GatewaySettings, name: str) -> AsyncClient:
    return connect_async(settings.listen, token=token(name))


def scrape(address: str) -> str:
    request = urllib.request.Request(
        f"http://{address}/metrics", headers={"authorization": f"Bearer {token('eve')}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
    return text


async def refusal(address: str) -> str | None:
    """The page once a refused call is on it: the caller may have its answer before the gateway has counted it."""
    page = await asyncio.to_thread(scrape, address)
    return page if "PERMISSION_DENIED" in page else None


async def test_calls_are_counted_and_changes_are_noted(tmp_path: Path) -> None:
    metrics, audit = f"127.0.0.1:{free_port()}", tmp_path / "audit.jsonl"
    with FakeServer() as fake:
        async with gateway(tmp_path, fake, metrics_listen=metrics, audit_file=audit) as settings:
            async with client(settings, "alice") as alice, client(settings, "eve") as eve:
                async with alice.reserve(1, "training"):
                    pass
                with pytest.raises(PermissionDeniedError):
                    await eve.reserve(1)
            page = await eventually(lambda: refusal(metrics), timeout=60)
    method = f"{SERVICE}/Reserve"
    assert value(page, "gpuscale_gateway_calls_total", method=method, code="OK") == 1
    assert value(page, "gpuscale_gateway_calls_total", method=method, code="PERMISSION_DENIED") == 1
    assert value(page, "gpuscale_gateway_calls_open") == 0
    noted = [json.loads(line) for line in audit.read_text().splitlines()]
    rows = [(one["who"], one["method"].rpartition("/")[2], one["resource"], one["result"]) for one in noted]
    name = fake.reservations[0].name
    assert fake.reservations[0].owner == "alice", "though the services, on loopback, check no token"
    assert rows == [
        ("alice", "Reserve", "training", "OK"),
        ("alice", "ReleaseReservation", name, "OK"),
        ("eve", "Reserve", noted[2]["resource"], "PERMISSION_DENIED"),
    ]
    assert (noted[0]["reservations"], len(noted[0]["gpus"])) == ([name], 1)
    assert "-token" not in audit.read_text()

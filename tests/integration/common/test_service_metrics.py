"""Services that keep state show their calls, and what they did about connections, on /metrics."""

import asyncio
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpuscale.allocator.main import serve as serve_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.autoscaler.main import serve as serve_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.common.rpc.channel import open_channel
from tests.support.ports import free_port

METHODS = {
    "allocator": "/gpuscale.api.allocator.v1.AllocatorService/ListReservations",
    "autoscaler": "/gpuscale.api.autoscaler.v1.EndpointService/ListEndpoints",
}


def _scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize(
    ("settings_type", "serve"),
    [(AllocatorSettings, serve_allocator), (AutoscalerSettings, serve_autoscaler)],
    ids=METHODS,
)
async def test_calls_and_connections_are_counted(
    settings_type: Any, serve: Callable[[Any, asyncio.Event], Awaitable[None]], tmp_path: Path
) -> None:
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    settings = settings_type(
        listen=listen, metrics_listen=metrics, data_dir=tmp_path, fleet_address="127.0.0.1:1"
    )
    stop, service = asyncio.Event(), settings_type.section
    serving = asyncio.ensure_future(serve(settings, stop))
    async with open_channel(listen) as channel:
        await channel.unary_unary(METHODS[service])(b"", wait_for_ready=True, timeout=30)
    page = (await asyncio.to_thread(_scrape, metrics)).splitlines()
    stop.set()
    await serving
    method = METHODS[service].removeprefix("/")
    assert f'gpuscale_{service}_calls_total{{method="{method}",code="OK"}} 1' in page
    for series in ("connections_cut_total", "descriptor_shortages_total"):
        assert any(line.startswith(f"gpuscale_{service}_{series} ") for line in page)

"""Services that keep state show their calls, their tokens and what they did about connections on /metrics."""

import asyncio
import time
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
from tests.support.tokens import bearer, token, write_tokens

METHODS = {
    "allocator": "/gpuscale.api.allocator.v1.AllocatorService/ListReservations",
    "autoscaler": "/gpuscale.api.autoscaler.v1.EndpointService/ListEndpoints",
}


def _scrape(address: str) -> str:
    headers = {"authorization": f"Bearer {token('alice')}"}
    request = urllib.request.Request(f"http://{address}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize(
    ("settings_type", "serve"),
    [(AllocatorSettings, serve_allocator), (AutoscalerSettings, serve_autoscaler)],
    ids=METHODS,
)
async def test_calls_tokens_and_connections_are_shown(
    settings_type: Any, serve: Callable[[Any, asyncio.Event], Awaitable[None]], tmp_path: Path
) -> None:
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    tokens = write_tokens(tmp_path / "tokens.toml", alice="viewer")
    tokens.write_text(f'{tokens.read_text()}label = "now"\nexpires = 2100-01-01T00:00:00Z\n')
    settings = settings_type(
        listen=listen,
        metrics_listen=metrics,
        data_dir=tmp_path,
        fleet_address="127.0.0.1:1",
        tokens_file=tokens,
    )
    stop, service = asyncio.Event(), settings_type.section
    serving = asyncio.ensure_future(serve(settings, stop))
    async with open_channel(listen) as channel:
        await channel.unary_unary(METHODS[service])(
            b"", wait_for_ready=True, timeout=30, metadata=bearer("alice")
        )
    page = (await asyncio.to_thread(_scrape, metrics)).splitlines()
    stop.set()
    await serving
    method = METHODS[service].removeprefix("/")
    assert f'gpuscale_{service}_calls_total{{method="{method}",code="OK"}} 1' in page
    for series in ("connections_cut_total", "descriptor_shortages_total"):
        assert any(line.startswith(f"gpuscale_{service}_{series} ") for line in page)
    assert (
        f'gpuscale_{service}_token_expires_timestamp_seconds{{name="alice",label="now"}} 4102444800' in page
    )
    used = f'gpuscale_{service}_token_last_use_timestamp_seconds{{name="alice",label="now"}} '
    assert any(line.startswith(used) and abs(float(line.split()[1]) - time.time()) < 60 for line in page)

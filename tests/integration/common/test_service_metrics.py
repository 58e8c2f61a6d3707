"""What services that keep state show of themselves on /metrics: calls, tokens, leases, endpoints, the database."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
from pydantic import SecretStr

from gpuscale.allocator.app import serve as serve_allocator
from gpuscale.allocator.settings import AllocatorSettings
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.autoscaler.app import serve as serve_autoscaler
from gpuscale.autoscaler.settings import AutoscalerSettings
from gpuscale.autoscaler.signals.prometheus import PrometheusSettings
from gpuscale.common import errors
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.rpc.limits import Connections
from gpuscale.common.secrets import SecretUrl
from gpuscale.common.store.store import Store
from tests.support.allocator import Client
from tests.support.autoscaler_app import endpoint
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_fleet import FakeFleet, node_message, serving
from tests.support.first_host import programs
from tests.support.ports import free_port, silent_port
from tests.support.promtool import named, promtool, value
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

METHODS = {
    "allocator": "/gpuscale.api.allocator.v1.AllocatorService/ListReservations",
    "autoscaler": "/gpuscale.api.autoscaler.v1.EndpointService/ListEndpoints",
}
Scrape = Callable[[], Awaitable[str]]


@asynccontextmanager
async def running(
    settings_type: Any, serve: Callable[[Any, asyncio.Event], Awaitable[None]], folder: Path, **settings: Any
) -> AsyncGenerator[tuple[grpc.aio.Channel, Scrape]]:
    """The program with a tokens file; a channel to it, and its page."""
    listen, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    tokens = write_tokens(folder / "tokens.toml", alice="admin")
    tokens.write_text(f'{tokens.read_text()}label = "now"\nexpires = 2100-01-01T00:00:00Z\n')

    def page() -> str:
        headers = {"authorization": f"Bearer {token('alice')}"}
        request = urllib.request.Request(f"http://{metrics}/metrics", headers=headers)
        with urllib.request.urlopen(request, timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    made = settings_type(
        listen=listen,
        metrics_listen=metrics,
        data_dir=folder,
        tokens_file=tokens,
        **{"fleet_address": "127.0.0.1:1", **settings},
    )
    async with (
        programs(service=(serve, made)),
        open_channel(listen, token=SecretStr(token("alice"))) as channel,
    ):
        yield channel, lambda: asyncio.to_thread(page)


@pytest.mark.parametrize(
    ("settings_type", "serve"),
    [(AllocatorSettings, serve_allocator), (AutoscalerSettings, serve_autoscaler)],
    ids=METHODS,
)
async def test_every_service_shows_its_calls_tokens_connections_database_and_term(
    settings_type: Any,
    serve: Callable[[Any, asyncio.Event], Awaitable[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Store, "failures", 0)  # of the whole process, with all tests before
    monkeypatch.setattr(Connections, "cut", 3)
    monkeypatch.setattr(Connections, "short", 2)
    service = settings_type.section
    prefix, method = f"gpuscale_{service}", METHODS[service]
    async with running(settings_type, serve, tmp_path) as (channel, scrape):
        await channel.unary_unary(method)(b"", wait_for_ready=True, timeout=30)
        page = await scrape()
    assert promtool("check", "metrics", stdin=page) == (0, "")
    of = {"method": method.removeprefix("/")}
    assert value(page, f"{prefix}_calls_total", code="OK", **of) == 1
    assert value(page, f"{prefix}_call_seconds_bucket", le="+Inf", **of) == 1
    assert value(page, f"{prefix}_call_seconds_count", **of) == 1
    assert value(page, f"{prefix}_token_expires_timestamp_seconds", name="alice", label="now") == 4102444800
    used = value(page, f"{prefix}_token_last_use_timestamp_seconds", name="alice", label="now")
    assert abs(used - time.time()) < 60
    assert value(page, f"{prefix}_leads") == 1
    assert value(page, f"{prefix}_terms_total") == 1
    assert value(page, f"{prefix}_store_commit_seconds_count") > 0
    assert value(page, f"{prefix}_store_bytes") > 0
    assert value(page, f"{prefix}_store_free_bytes") > 0
    for series, count in {"connections_cut": 3, "descriptor_shortages": 2, "store_commits_failed": 0}.items():
        assert value(page, f"{prefix}_{series}_total") == count
    for series in ("process_open_fds", "process_max_fds", "process_resident_memory_bytes"):
        assert value(page, series) > 0
    assert named(page, f"{prefix}_loop_lag_seconds_count")


async def test_a_standby_that_never_led_shows_that_it_does_not(tmp_path: Path) -> None:
    """Else no alert would see that nobody leads while the database has been away since the processes began."""
    with silent_port() as port:
        database = SecretUrl(f"postgresql://gpuscale@127.0.0.1:{port}/gpuscale")
        async with running(AllocatorSettings, serve_allocator, tmp_path, database=database) as (_, scrape):
            page = await eventually(scrape, retry_on=(OSError,))
    assert value(page, "gpuscale_allocator_leads") == 0
    assert value(page, "gpuscale_allocator_terms_total") == 0
    assert named(page, "gpuscale_allocator_epoch") == []


async def test_the_allocator_shows_leases_who_waits_and_why_it_refused(tmp_path: Path) -> None:
    async with (
        serving(FakeFleet(node_message("alpha", count=2))) as fleet,
        running(AllocatorSettings, serve_allocator, tmp_path, fleet_address=fleet) as (channel, scrape),
    ):
        client = Client(allocator_api.AllocatorServiceStub(channel))
        await client.ready()
        held = await client.reserve(2)
        with pytest.raises(errors.ResourceExhaustedError):
            await client.reserve(1)
        waiting = asyncio.ensure_future(client.reserve(1, wait={"seconds": 30}))
        await eventually(
            scrape,
            lambda found: [one.value for one in named(found, "gpuscale_allocator_queue_length")] == [1],
        )
        page = await scrape()
        waiting.cancel()
    assert promtool("check", "metrics", stdin=page) == (0, "")
    assert value(page, "gpuscale_allocator_reservations", state="ACTIVE") == 1
    assert value(page, "gpuscale_allocator_node_reservations", node="alpha") == 1
    assert value(page, "gpuscale_allocator_gpus_held") == 2
    shares = named(page, "gpuscale_allocator_gpu_held_ratio")
    assert {(one.labels["uuid"], one.value) for one in shares} == {(gpu.uuid, 1) for gpu in held.gpus}
    assert {(one.labels["holder"], one.labels["tenant"]) for one in shares} == {(held.holder, held.tenant)}
    assert value(page, "gpuscale_allocator_nodes", state="ONLINE") == 1
    assert value(page, "gpuscale_allocator_queue_longest_wait_seconds") > 0
    refused = named(page, "gpuscale_allocator_calls_failed_total", reason="NO_CAPACITY")
    assert [one.value for one in refused] == [1]


async def test_the_autoscaler_shows_its_endpoints_and_what_fails(tmp_path: Path) -> None:
    silent = PrometheusSettings(url=SecretUrl("http://127.0.0.1:1"), allow_private=True)
    fails, adapter = endpoint(low=1, name="fails"), FakeAdapter()
    query = autoscaler_api.PrometheusSignal(server="main", query="up")
    fails.spec.signals.append(autoscaler_api.Signal(id="depth", prometheus=query))
    fails.spec.rules.append(autoscaler_api.Rule(id="t", signal="depth", target={"value": 1}))
    async with running(
        AutoscalerSettings,
        serve_autoscaler,
        tmp_path,
        allocator_address="127.0.0.1:1",
        prometheus={"main": silent},
    ) as (channel, scrape):
        endpoints = autoscaler_api.EndpointServiceStub(channel)
        for one in (endpoint(low=2, gpus=1, name="jobs"), fails):
            request = autoscaler_api.CreateEndpointRequest(endpoint=one, request_id=str(uuid4()))
            await endpoints.CreateEndpoint(request, wait_for_ready=True, timeout=30)
        connected = asyncio.create_task(adapter._connect(channel))
        await eventually(lambda: adapter.alive)
        adapter.set(adapter.alive[0], autoscaler_api.Replica.STATE_FAILED)

        async def looked() -> str:
            page = await scrape()
            waits = named(page, "gpuscale_autoscaler_endpoint_back_off_seconds", endpoint="fails")
            unanswered = named(page, "gpuscale_autoscaler_prometheus_unanswered", server="main")
            assert [one.value > 0 for one in waits] == [one.value == 1 for one in unanswered] == [True]
            return page if named(page, "gpuscale_autoscaler_endpoint_desired", endpoint="jobs") else ""

        page = await eventually(looked)
        connected.cancel()
    assert promtool("check", "metrics", stdin=page) == (0, "")
    assert value(page, "gpuscale_autoscaler_endpoint_desired", endpoint="jobs") == 2
    assert value(page, "gpuscale_autoscaler_endpoint_back_off_seconds", endpoint="jobs") == 0
    for counted in ("granted", "ready"):
        assert value(page, f"gpuscale_autoscaler_endpoint_{counted}", endpoint="jobs") == 0
    assert value(page, "gpuscale_autoscaler_endpoint_late_seconds", endpoint="jobs") < 30

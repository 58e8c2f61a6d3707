"""Instant queries over HTTP and of a real Prometheus: their values and ages, and every way in which there are none, each told apart."""

import asyncio
import gzip
import math
import time
import tracemalloc
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from pydantic import ValidationError

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.domain.inputs import ObservationStatus
from gpuscale.autoscaler.domain.signals import QueueState, observe
from gpuscale.autoscaler.domain.spec import PrometheusSignal, Signal
from gpuscale.autoscaler.signals import prometheus as module
from gpuscale.autoscaler.signals.brokers import Broker, VirtualHostError
from gpuscale.autoscaler.signals.polling import NoAnswerError, PollAnswer
from gpuscale.autoscaler.signals.prometheus import (
    InstantQuery,
    InstantVector,
    PrometheusServer,
    PrometheusSettings,
    prometheus_sample,
)
from gpuscale.autoscaler.signals.rabbitmq import ManagementClient
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.secrets import SecretUrl
from tests.support import fake_allocator
from tests.support.autoscaler_app import endpoint, reason, running
from tests.support.fixtures import need
from tests.support.guarded import GuardedFolder
from tests.support.ports import free_port
from tests.support.prometheus import FakePrometheus, serving, vector
from tests.support.promtool import why_unavailable
from tests.support.waiting import eventually

Fake = FakePrometheus


@pytest.fixture
async def fake() -> AsyncGenerator[Fake]:
    one = FakePrometheus()
    async with serving(one):
        yield one


async def fetch(
    fake: Fake, query: str = "up", host: str = "127.0.0.1", path: str = "", **fields: Any
) -> tuple[float, ...]:
    settings = {"url": SecretUrl(f"http://{host}:{fake.port}{path}"), "allow_private": True} | fields
    server = PrometheusServer("main", PrometheusSettings.model_validate(settings))
    try:
        return (await server.fetch(InstantQuery(query, 90.0))).values
    finally:
        await server.close()


async def problem(fake: Fake, **fields: Any) -> str:
    with pytest.raises(NoAnswerError) as caught:
        await fetch(fake, **fields)
    return str(caught.value)


async def test_a_vector_has_one_value_for_each_series_and_a_scalar_one(fake: Fake) -> None:
    fake.answer = vector("1.5", "2e3")
    assert await fetch(fake, 'rate(http_requests_total{job="a"}[1m])', path="/prometheus/") == (1.5, 2000.0)
    head, form = fake.requests[0]
    assert head.startswith("POST /prometheus/api/v1/query HTTP/1.1")
    assert form["query"] == ['rate(http_requests_total{job="a"}[1m])']
    assert form["lookback_delta"] == ["90"], "what was scraped before is found by no part of the query"
    fake.answer = '{"status":"success","data":{"resultType":"scalar","result":[1.5,"42"]}}'
    assert await fetch(fake) == (42.0,)
    fake.answer = vector("NaN", "+Inf", "-Inf")
    values = await fetch(fake)
    assert math.isnan(values[0])
    assert values[1:] == (math.inf, -math.inf), "handed on, to be found invalid"


def test_only_zero_everywhere_proves_that_no_work_is_left() -> None:
    for values, proven in (
        ((0.0, 0.0), True),
        ((0.0, 1.0), False),
        ((math.nan,), False),
        ((0.0, math.nan), False),
    ):
        assert prometheus_sample(PollAnswer(InstantVector(values), 1.0, "")).proven_empty is proven


def test_a_series_that_is_nan_is_silent_and_counted() -> None:
    """One among numbers is left out, and said; where there is nothing else the signal is invalid."""
    depth = Signal("depth", PrometheusSignal("main", "depth"))
    found = observe(depth, prometheus_sample(PollAnswer(InstantVector((2.0, math.nan, 4.0)), 1.0, "")), 1.0)
    assert (found.status, found.value, found.silent_count) == (ObservationStatus.OK, 3.0, 1)
    assert found.detail == "1 of 3 said nothing"
    alone = observe(depth, prometheus_sample(PollAnswer(InstantVector((math.nan,)), 1.0, "")), 1.0)
    assert alone.status is ObservationStatus.INVALID


def test_a_sample_is_as_old_as_the_oldest_that_was_scraped() -> None:
    """Not as old as the query. By default one that was scraped a minute ago still counts."""
    sample = prometheus_sample(PollAnswer(InstantVector((0.0,), age=80.0), 100.0, ""))
    for oldest, status in ((None, ObservationStatus.OK), (75.0, ObservationStatus.STALE)):
        assert (
            observe(Signal("depth", PrometheusSignal("main", "depth"), oldest), sample, 105.0).status
            is status
        )


async def test_an_answer_that_is_none_says_why(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SERIES", 1)
    ok, wrong = "200 OK", "neither a vector nor a scalar"
    parse = '{"status":"error","error":"parse error:\\u0007 bad"}'
    for status, answer, said in (
        (ok, vector(), "finds no series"),
        (ok, vector("1", "2"), "more than 1 series"),
        (ok, "<html>", wrong),
        (ok, vector("one"), wrong),
        (ok, " " * (module.MAX_ANSWER_BYTES + 1), "more than 1048576 bytes"),
        ("401 Unauthorized", vector("1"), "refuses the token"),
        ("502 Bad Gateway", vector("1"), "HTTP status 502"),
        ("400 Bad Request", parse, "prometheus main refuses the query: parse error:  bad"),
    ):
        fake.status, fake.answer = status, answer
        assert said in await problem(fake)


async def test_a_server_that_says_nothing_is_waited_for_no_longer_than_the_limit(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    fake.silent = True
    assert "does not answer within 0.2 s" in await problem(fake)


async def test_a_server_that_is_not_there(fake: Fake) -> None:
    fake.port = 1
    assert "cannot be reached" in await problem(fake)
    assert "cannot be resolved" in await problem(fake, host="no-such-host.invalid")


async def test_a_private_address_is_refused_unless_it_is_allowed(fake: Fake) -> None:
    for host in ("127.0.0.1", "localhost", "10.0.0.1", "[::1]", "[::ffff:10.0.0.1]"):
        assert "not allowed" in await problem(fake, host=host, allow_private=False)
    # Clouds keep their credentials at an address of the link: it is never allowed.
    for host in ("169.254.169.254", "0.0.0.0", "[fe80::1]", "[::ffff:169.254.169.254]", "224.0.0.1"):
        assert "not allowed" in await problem(fake, host=host)
    assert fake.requests == []


async def test_the_connection_goes_to_the_address_that_was_checked(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is looked up again could lead elsewhere by then."""
    looked_up: list[str] = []

    async def addresses(server: PrometheusServer) -> list[str]:
        looked_up.append("once")
        return ["127.0.0.1"]

    monkeypatch.setattr(PrometheusServer, "_addresses", addresses)
    assert await fetch(fake, host="prometheus.example.org") == (1.0,)
    assert looked_up == ["once"]
    assert f"Host: prometheus.example.org:{fake.port}" in fake.requests[-1][0]


async def test_of_several_addresses_the_first_that_anybody_listens_at_is_asked(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def both(_loop: object, _host: str, port: int, **_: object) -> list[tuple[Any, ...]]:
        return [(10, 1, 6, "", ("127.0.0.9", port)), (2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", both)
    assert await fetch(fake, host="localhost") == (1.0,)
    fake.port = free_port()
    assert "cannot be reached: ConnectError" in await problem(fake, host="localhost")


async def test_a_redirect_is_not_followed(fake: Fake) -> None:
    fake.status, fake.header = "307 Temporary Redirect", "Location: http://127.0.0.1:1/\r\n"
    assert "a redirect" in await problem(fake)
    assert len(fake.requests) == 1


async def test_the_token_or_the_user_is_sent_and_never_shown(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to a proxy either that the environment happens to name."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    await fetch(fake, token_file=token)
    assert "Authorization: Bearer s3cret" in fake.requests[-1][0]
    url = SecretUrl(f"http://ada:pass@127.0.0.1:{fake.port}")
    await fetch(fake, url=url)
    assert "Authorization: Basic YWRhOnBhc3M=" in fake.requests[-1][0]
    fake.status = "403 Forbidden"
    assert "s3cret" not in await problem(fake, token_file=token)
    with pytest.raises(ValidationError, match="exclude each other"):
        PrometheusSettings(url=url, token_file=token)


def test_settings_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    url = SecretUrl("https://prometheus.example.org")
    for settings in (
        PrometheusSettings(url=url, token_file=missing),
        PrometheusSettings(url=url, ca_file=missing),
    ):
        with pytest.raises(InvalidArgumentError, match=r"prometheus main: .*missing") as caught:
            PrometheusServer("main", settings)
        assert caught.value.reason == "PROMETHEUS_CONFIGURATION"
    with pytest.raises(ValidationError, match="must begin with http"):
        PrometheusSettings(url=SecretUrl("ftp://prometheus.example.org"))


async def test_an_endpoint_scales_on_a_query_and_names_only_servers_that_there_are(
    fake: Fake, tmp_path: Path
) -> None:
    fake.answer = vector("30", "40")
    settings = PrometheusSettings(url=SecretUrl(f"http://127.0.0.1:{fake.port}"), allow_private=True)
    wanted = endpoint(high=5)
    query = api.PrometheusSignal(server="main", query="sum by (pod) (depth)")
    across = api.Aggregation.AGGREGATION_SUM
    wanted.spec.signals.append(api.Signal(id="depth", prometheus=query, across=across))
    wanted.spec.rules.append(api.Rule(id="t", signal="depth", target=api.TargetRule(value=35)))
    async with (
        fake_allocator.serving(fake_allocator.FakeAllocator({})) as address,
        running(tmp_path, address, prometheus={"main": settings}) as autoscaler,
    ):
        await autoscaler.create(wanted)
        await eventually(lambda: autoscaler.wants(2))
        wanted.spec.signals[0].prometheus.server = "other"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await autoscaler.update(wanted)
        assert reason(caught.value) == ("FAILED_PRECONDITION", "UNKNOWN_PROMETHEUS")


AGE = 110.0
CONFIG = """
scrape_configs:
  - job_name: jobs
    scrape_interval: 500ms
    scrape_timeout: 500ms
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


async def expose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A page with a sample that was taken long ago, and one of now."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        page = f"old 0 {int((time.time() - AGE) * 1000)}\nyoung 7\n"
        writer.write(f"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{page}".encode())
        await writer.drain()
    writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[PrometheusServer]:
    """A Prometheus that scrapes that page."""
    need(why_unavailable("prometheus"))
    target = await asyncio.start_server(expose, "127.0.0.1", 0)
    folder, port = GuardedFolder("gpuscale-prometheus-"), free_port()
    url = f"http://127.0.0.1:{port}"
    try:
        config = folder.path / "prometheus.yml"
        config.write_text(CONFIG.format(port=target.sockets[0].getsockname()[1]))
        data = folder.path / "data"
        command = ("prometheus", f"--config.file={config}", f"--storage.tsdb.path={data}")
        folder.spawn("prometheus", (*command, f"--web.listen-address=127.0.0.1:{port}"), {})
        one = PrometheusServer("main", PrometheusSettings(url=SecretUrl(url), allow_private=True))
        await eventually(
            lambda: one.fetch(InstantQuery("young + on() old", 300.0)),
            lambda found: found.values == (7.0,),
            timeout=60.0,
            retry_on=(NoAnswerError, httpx.HTTPError),
        )
        yield one
        await one.close()
    finally:
        folder.close()
        target.close()


async def ask(server: PrometheusServer, query: str, lookback: float) -> InstantVector:
    return await server.fetch(InstantQuery(query, lookback))


async def test_what_counts_is_when_a_sample_was_taken(server: PrometheusServer) -> None:
    """Of a selector the server tells it, though it dates the answer now."""
    found = await ask(server, "old # the oldest", 300.0)
    assert found.values == (0.0,)
    assert AGE - 1 < found.age < AGE + 60
    assert (await ask(server, "young", 300.0)).age < 60
    assert (await ask(server, "scalar(old)", 300.0)).values == (0.0,)
    both = await ask(server, '{__name__=~"old|young"}', 300.0)
    assert (sorted(both.values), both.age) == ([0.0, 7.0], 0.0), "their age cannot be asked for in one"


UNFOLDED = 32 * 1024 * 1024
MOST = 4 * 1024 * 1024


@pytest.fixture
async def bomb() -> AsyncGenerator[FakePrometheus]:
    """A server whose every answer is some hundred bytes, compressed twice."""
    one = FakePrometheus()
    one.answer = gzip.compress(gzip.compress(bytes(UNFOLDED)))
    one.header = "Content-Encoding: gzip, gzip\r\n"
    async with serving(one):
        yield one


@contextmanager
def little_memory() -> Generator[None]:
    """What is done inside takes less than a small part of what the answer would unfold to."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


async def test_an_answer_of_prometheus_is_not_unfolded(bomb: FakePrometheus) -> None:
    url = SecretUrl(f"http://127.0.0.1:{bomb.port}")
    server = PrometheusServer("main", PrometheusSettings(url=url, allow_private=True))
    with little_memory(), pytest.raises(NoAnswerError, match="neither a vector nor a scalar"):
        await server.fetch(InstantQuery("up", 90.0))
    await server.close()
    assert "accept-encoding: identity" in bomb.requests[-1][0].lower()


async def test_an_answer_of_a_management_api_is_not_unfolded(
    bomb: FakePrometheus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked, with the password, through a proxy that the environment happens to name."""
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    url = SecretUrl(f"http://user:word@127.0.0.1:{bomb.port}")
    client = ManagementClient(Broker("b", SecretUrl("amqp://user:word@127.0.0.1:1"), url), url)
    with little_memory(), pytest.raises(VirtualHostError) as caught:
        await client.totals("/")
    await client.close()
    assert caught.value.failure.state is QueueState.ERROR
    assert "accept-encoding: identity" in bomb.requests[-1][0].lower()

"""The age of samples, as a real Prometheus has them: an instant query of it dates all that it finds now."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import suppress

import httpx
import pytest

from gpuscale.autoscaler.signals.polling import NoAnswerError
from gpuscale.autoscaler.signals.prometheus import (
    InstantQuery,
    InstantVector,
    PrometheusServer,
    PrometheusSettings,
)
from gpuscale.common.secrets import SecretUrl
from tests.support.fixtures import need
from tests.support.guarded import GuardedFolder
from tests.support.ports import free_port
from tests.support.promtool import why_unavailable
from tests.support.waiting import eventually

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

        async def scraped() -> bool:
            return (await one.fetch(InstantQuery("young + on() old", 300.0))).values == (7.0,)

        await eventually(scraped, timeout=60.0, retry_on=(NoAnswerError, httpx.HTTPError))
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

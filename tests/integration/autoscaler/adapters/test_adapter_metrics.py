"""What an adapter shows of itself on /metrics: its engine, its replicas, and whether it hears of the autoscaler."""

import asyncio
import urllib.request
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.main import serve
from tests.support.ports import free_port
from tests.support.promtool import named, promtool, value
from tests.support.scripted_autoscaler import TEMPLATES, replica, scripted_autoscaler
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

READY = api.Replica.STATE_READY


async def test_an_adapter_shows_its_engine_its_replicas_and_the_autoscalers_silence(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_port()}"
    request = urllib.request.Request(
        f"http://{metrics}/metrics", headers={"authorization": f"Bearer {token('viewer')}"}
    )

    def fetch() -> str:
        with urllib.request.urlopen(request, timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    async def page() -> str:
        return await asyncio.to_thread(fetch)

    async with scripted_autoscaler() as (autoscaler, address):
        settings = ProcessSettings.model_validate(
            {
                "node": "here",
                "data_dir": tmp_path / "adapter",
                "templates": TEMPLATES,
                "end_replicas": True,
                "autoscaler_address": address,
                "metrics_listen": metrics,
                "tokens_file": write_tokens(tmp_path / "tokens.toml", viewer="viewer"),
            }
        )
        stop = asyncio.Event()
        served = asyncio.ensure_future(serve(settings, stop))
        await autoscaler.run(replica(1), "sleeper")
        await autoscaler.shows(replica(1), READY)
        text = await page()
    silent = await eventually(lambda: silence(page))
    stop.set()
    await served
    with pytest.raises(OSError, match="refused"):
        await page()
    assert promtool("check", "metrics", stdin=text) == (0, "")
    [info] = named(text, "gpuscale_adapter_info")
    assert (info.labels["adapter"], info.labels["engine"]) == ("here", "process")
    assert value(text, "gpuscale_adapter_replicas", state="READY") == 1
    assert value(text, "gpuscale_adapter_replicas", state="FAILED") == 0
    assert value(text, "gpuscale_adapter_engine_known") == 1
    for operation in ("observe", "apply"):
        assert value(text, "gpuscale_adapter_engine_seconds_count", operation=operation) > 0
        assert (
            value(text, "gpuscale_adapter_engine_failures_total", operation=operation, reason="TIMEOUT") == 0
        )
    assert value(text, "gpuscale_adapter_autoscaler_silent_seconds") == 0
    assert named(text, "gpuscale_adapter_loop_lag_seconds_count")
    assert value(text, "process_open_fds") > 0
    assert silent > 0


async def silence(page: object) -> float:
    assert callable(page)
    return value(await page(), "gpuscale_adapter_autoscaler_silent_seconds")

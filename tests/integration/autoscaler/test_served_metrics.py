"""Signals from the replicas' own /metrics: real servers as processes, their adapter beside them, and the autoscaler."""

import asyncio
import os
import urllib.request
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters import served
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.main import open_adapter
from gpuscale.autoscaler.domain.rules import slo
from gpuscale.common.rpc.channel import open_channel
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.wire import to_duration
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, running
from tests.support.fake_adapter import FakeAdapter
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

ROOT = str(Path(__file__).resolve().parents[3])
PORT = "{free_port:int}"


SERVER = {
    "command": ["{python}", "-m", "tests.support.llm_server", PORT, "0.0", "0.01"],
    "env": {"PYTHONPATH": os.pathsep.join([ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])},
    "working_dir": ROOT,
    "metrics": {"port": PORT},
    "probe": {"http": f"http://127.0.0.1:{PORT}/health", "period": 0.2, "timeout": 60, "start_timeout": 60},
}
"""A template of the stub of vLLM."""


@pytest.fixture
async def autoscaler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Autoscaler]:
    monkeypatch.setattr(served, "PERIOD", 1.0)
    templates = {"llm": SERVER, "other": {"command": ["/bin/sleep", "1000"], "metrics": {"port": "1"}}}
    settings = ProcessSettings.model_validate(
        {"node": "n", "data_dir": tmp_path / "adapter", "templates": templates, "end_replicas": True}
    )
    async with (
        serving(FakeAllocator({})) as address,
        running(tmp_path, address) as one,
        open_channel(one.address) as channel,
        open_adapter(settings, autoscaler=channel, clock=SystemClock()),
    ):
        yield one


def endpoint(metric: str, template: str = "llm", **spec: Any) -> api.Endpoint:
    signal = api.Signal(
        id="s", replicas=api.ReplicaSignal(metric=metric), across=api.Aggregation.AGGREGATION_SUM
    )
    rule = api.Rule(id="r", signal="s", target=api.TargetRule(value=8.0))
    return api.Endpoint(
        name="endpoints/e",
        spec=api.EndpointSpec(
            min_replicas=2,
            max_replicas=3,
            tick=to_duration(0.5),
            template=api.ReplicaTemplate(template=template),
            signals=[signal],
            rules=[rule],
            **spec,
        ),
    )


async def seen(autoscaler: Autoscaler, wanted: Callable[[api.Observation], bool]) -> api.Observation:
    """What the signal shows at the last evaluation, once it is so."""

    async def look() -> api.Observation | None:
        shown = [one for decision in await autoscaler.history() for one in decision.observations]
        return shown[0] if shown and wanted(shown[0]) else None

    return await eventually(look)


def ports(replicas: list[api.Replica]) -> list[int]:
    """The ports that processes were started with."""
    lines = (Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0") for one in replicas)
    return [int(words[words.index(b"tests.support.llm_server") + 1]) for words in lines]


async def load(port: int, requests: int) -> None:
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/load?requests={requests}", method="POST")
    await asyncio.to_thread(lambda: urllib.request.urlopen(asked, timeout=60).close())


async def test_replicas_tell_each_for_itself_on_ports_of_their_own_and_are_scaled_on_what_they_tell(
    autoscaler: Autoscaler,
) -> None:
    await autoscaler.create(endpoint("llm:running"))
    await seen(autoscaler, lambda one: one.HasField("value") and one.value == 0 and not one.detail)
    replicas = await autoscaler.replicas()
    first, second = ports(replicas)
    assert first != second
    await load(first, 64)
    await eventually(lambda: autoscaler.wants(3))


async def test_a_replica_that_does_not_answer_is_named_and_is_not_zero(autoscaler: Autoscaler) -> None:
    await autoscaler.create(endpoint("llm:running", "other"))
    found = await seen(autoscaler, lambda one: "cannot be reached" in one.detail)
    replicas = sorted(one.name.rpartition("/")[2] for one in await autoscaler.replicas())
    assert not found.HasField("value")
    assert [word for word in found.detail.split() if word in replicas] == replicas
    assert (await autoscaler.status()).desired_replicas == 2


async def test_a_metric_that_no_server_has_is_refused_by_its_name(autoscaler: Autoscaler) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="llm:requests_per_second") as refused:
        await autoscaler.create(endpoint("llm:tokens"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_goals_are_held_by_what_replicas_tell_and_the_decision_can_be_evaluated_again(
    autoscaler: Autoscaler,
) -> None:
    """A batch of 64 takes 0.65 s for each token: the second goal is missed, and that is what the decision says."""
    goals = api.SloRule(ttft=to_duration(600.0), itl=to_duration(0.04))
    one = endpoint("llm:running")
    del one.spec.signals[:], one.spec.rules[:]
    one.spec.rules.add(id="goal", slo=goals)
    await autoscaler.create(one)
    await eventually(lambda: _told(autoscaler, "goal.running"))
    for port in ports(await autoscaler.replicas()):
        await load(port, 64)
    await eventually(lambda: autoscaler.wants(3))
    # What waits in one of them may be told before anything that it served.
    await eventually(lambda: _says(autoscaler, "s of 40 ms"))
    grown = next(one for one in await autoscaler.history() if one.wanted == 3)
    request = api.VerifyDecisionRequest(name=grown.name)
    verified = await autoscaler.decisions.VerifyDecision(request, timeout=TIMEOUT)
    assert not verified.differences


async def _told(autoscaler: Autoscaler, signal: str) -> bool:
    shown = (one for decision in await autoscaler.history() for one in decision.observations)
    return any(one.signal == signal and one.HasField("value") for one in shown)


async def test_what_a_replica_carries_is_known_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("running", "fullest", "waiting", "requests", "served", "tokens", "itl")
    one = endpoint("llm:running")
    del one.spec.signals[:], one.spec.rules[:]
    one.spec.rules.add(id="goal", slo=api.SloRule(itl=to_duration(0.04)))
    for name in names:
        one.spec.signals.add(id=f"goal.{name}", pushed=api.PushedSignal(metric=name))
    one.spec.template.template = "worker"
    async with serving(FakeAllocator({})) as address:
        values = dict.fromkeys(names, 0.02) | {"running": 10.0}
        for nothing_new in (1.0, 1e6):
            monkeypatch.setattr(slo, "STEADY_FOR", nothing_new)
            async with running(tmp_path, address) as autoscaler, FakeAdapter().connected(autoscaler.address):
                if nothing_new == 1.0:
                    await autoscaler.create(one)
                task = asyncio.create_task(_report(autoscaler, values))
                await eventually(lambda: _says(autoscaler, "itl binds"))
                await eventually(lambda: _decided(autoscaler, "itl binds"))
                values |= {"requests": 1.0}  # another decision, and what was known by then is stored with it
                await eventually(lambda: autoscaler.wants(3))
                task.cancel()


async def _report(autoscaler: Autoscaler, values: dict[str, float]) -> None:
    while True:
        reported = [api.MetricValue(metric=name, value=value) for name, value in values.items()]
        request = api.ReportMetricsRequest(name="endpoints/e", values=reported)
        await autoscaler.metrics.ReportMetrics(request, timeout=TIMEOUT)
        await asyncio.sleep(0.2)


async def _says(autoscaler: Autoscaler, text: str) -> bool:
    found = await autoscaler.decisions.Evaluate(api.EvaluateRequest(name="endpoints/e"), timeout=TIMEOUT)
    return any(text in step.text for step in found.decision.steps)


async def _decided(autoscaler: Autoscaler, text: str) -> bool:
    return any(text in step.text for decision in await autoscaler.history() for step in decision.steps)

"""An autoscaler that only answers questions: evaluations, presets and backtests over gRPC, without adapters or brokers."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gpuscale.api.autoscaler import v1 as api
from tests.support.autoscaler_app import TIMEOUT, Autoscaler, FakeWatchers, running


class Asking:
    """The services that answer questions, and the autoscaler they belong to."""

    def __init__(self, autoscaler: Autoscaler) -> None:
        self.autoscaler = autoscaler
        self.decisions = api.DecisionServiceStub(autoscaler.channel)
        self.presets = api.PresetServiceStub(autoscaler.channel)
        self.backtests = api.BacktestServiceStub(autoscaler.channel)

    async def evaluate(self, request: api.EvaluateRequest) -> api.EvaluateResponse:
        return await self.decisions.Evaluate(request, timeout=TIMEOUT)

    async def render(self, preset: str, **fields: Any) -> api.EndpointSpec:
        """The spec of a preset for the watcher `jobs`, 1 to 10 replicas."""
        template = api.ReplicaTemplate(template="worker")
        wish = {"watcher": "watchers/jobs", "max_replicas": 10, "template": template} | fields
        request = api.RenderPresetRequest(wish=api.PresetWish(preset=preset, **wish))
        return (await self.presets.RenderPreset(request, timeout=TIMEOUT)).spec


@asynccontextmanager
async def asking(folder: Path, watchers: FakeWatchers | None = None) -> AsyncGenerator[Asking]:
    """Run one; nobody is at its allocator's address."""
    async with running(folder, "127.0.0.1:1", watchers) as autoscaler:
        yield Asking(autoscaler)

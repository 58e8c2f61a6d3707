"""Replicas as tasks of ECS: started, listed and stopped, found again by their tags."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import (
    Finish,
    Sighting,
    Start,
    Step,
    StepwiseEngine,
    WorkerLife,
    split_duplicates,
)
from gpuscale.autoscaler.adapters.settings import EngineSettings, Host, OpenEngine
from gpuscale.autoscaler.adapters.templates import template_named
from gpuscale.common.runtime.logs import get_logger
from gpuscale_ecs.tasks import NoRoomError, Task, TaskTemplate, run_request, sighting, started_by

if TYPE_CHECKING:
    from gpuscale_ecs.client import EcsCalls

LISTED_WITHIN = 60.0
"""Seconds that a started task may take to be listed; until then it is described by its ARN."""

_log = get_logger(__name__)


class EcsSettings(EngineSettings):
    """Settings of the ECS adapter. Credentials come from AWS' usual chain."""

    section: ClassVar[str] = "ecs_adapter"
    kind: ClassVar[str] = "ecs"
    description: ClassVar[str] = "Starts and stops replicas as tasks of Amazon ECS."
    library: ClassVar[str] = "boto3"
    templates_field: ClassVar[str] = "ecs_templates"

    region: str = Field(
        "", max_length=64, description="region of the cluster; by AWS' usual chain when empty"
    )
    cluster: str = Field("default", min_length=1, max_length=255, description="name or ARN of the cluster")
    endpoint_url: str = Field("", description="address of ECS instead of the region's own")
    poll_seconds: float = Field(3.0, ge=0.2, le=5, description="seconds between two looks at the cluster")
    ecs_templates: dict[str, TaskTemplate] = Field(
        default_factory=dict[str, TaskTemplate], description="templates of tasks by name"
    )

    @asynccontextmanager
    async def open_engine(self, _host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The tasks of this adapter, which go on when it ends. Each has the time of its definition to end.

        Raises:
            InvalidArgumentError: boto3 finds no region.
        """
        from gpuscale_ecs.client import EcsCalls, open_client

        client = await asyncio.to_thread(open_client, self.region, self.endpoint_url)
        checked = [template.has_health_check for template in self.ecs_templates.values()]
        capabilities = api.AdapterCapabilities(
            gives_gpus=True, picks_victims=True, drains=False, probes=bool(checked) and all(checked)
        )
        yield OpenEngine(EcsEngine(self, EcsCalls(client, self.cluster)), capabilities)


class EcsEngine(StepwiseEngine):
    """The tasks of one adapter."""

    def __init__(self, settings: EcsSettings, calls: EcsCalls) -> None:
        self._calls = calls
        self._adapter = settings.adapter
        self._cluster = settings.cluster
        self._templates = settings.ecs_templates
        self._poll = settings.poll_seconds
        self._tasks: dict[str, Task] = {}
        self._waits: dict[str, str] = {}  # by replica: why it has no task
        self._full: dict[str, str] = {}  # by template: why it has no room
        self._recent: dict[str, float] = {}
        self._over: dict[str, Task] = {}
        self._removed: set[str] = set()

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`. A task that stopped does not change any more and is described once."""
        described = [(task.replica, task) for task in await self._described()]
        counts, others = split_duplicates(described, lambda task: (task.created, task.arn))
        for task in others:
            if not task.over:
                _log.warning("stopping a task that was started twice", task=task.arn, replica=task.replica)
                await self._calls.stop(task.arn)
        self._tasks = {name: task for name, task in counts.items() if task.arn not in self._removed}
        self._waits = {name: why for name, why in self._waits.items() if name not in self._tasks}
        waiting = {name: Sighting(WorkerLife.WAITING, reason=why) for name, why in self._waits.items()}
        return waiting | {name: sighting(task) for name, task in self._tasks.items()}

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`. Once a template finds no room, its other starts wait without a call each."""
        self._full.clear()
        return await super().apply(steps)

    async def watch(self) -> None:
        """As `Engine.watch`: ECS sends no events here."""
        await asyncio.sleep(self._poll)

    async def start(self, step: Start) -> None:
        """As `StepwiseEngine.start`."""
        replica = step.replica
        if replica in self._tasks:
            return
        if step.template in self._full:
            self._waits[replica] = self._full[step.template]
            return
        template = template_named(self._templates, step.template)
        request = run_request(step.template, template, step.order, self._adapter, self._cluster)
        try:
            arn = await self._calls.run(request)
        except NoRoomError as error:
            if self._waits.get(replica) != str(error):
                _log.warning("no task for now", replica=replica, why=str(error))
            self._waits[replica] = self._full[step.template] = str(error)
        else:
            self._waits.pop(replica, None)
            self._recent[arn] = asyncio.get_running_loop().time()
            _log.info("started a task", task=arn, replica=replica)

    async def finish(self, step: Finish) -> None:
        """As `StepwiseEngine.finish`."""
        await self.kill(step.replica)

    async def kill(self, replica: str) -> None:
        """As `StepwiseEngine.kill`."""
        task = self._tasks.get(replica)
        if task is not None and not task.over:
            await self._calls.stop(task.arn)

    async def remove(self, replica: str) -> None:
        """As `StepwiseEngine.remove`. What has ended is hidden; ECS forgets it about an hour after its end."""
        self._waits.pop(replica, None)
        task = self._tasks.pop(replica, None)
        if task is not None and task.over:
            self._removed.add(task.arn)

    async def _described(self) -> list[Task]:
        """Every task, whether it was listed or only just started."""
        listed = await self._calls.list_arns(started_by(self._adapter))
        now = asyncio.get_running_loop().time()
        unlisted = {arn: since for arn, since in self._recent.items() if arn not in listed}
        self._recent = {arn: since for arn, since in unlisted.items() if now - since < LISTED_WITHIN}
        arns = [*listed, *self._recent]
        self._over = {arn: self._over[arn] for arn in arns if arn in self._over}
        self._removed.intersection_update(arns)
        asked = [arn for arn in arns if arn not in self._over]
        described = await self._calls.describe(asked) if asked else []
        found = [*self._over.values(), *described]
        self._over |= {task.arn: task for task in described if task.over}
        return found

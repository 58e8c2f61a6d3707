"""ECS as an engine: tasks started, listed and stopped, found again by their tags."""

import asyncio
from collections.abc import Mapping, Sequence

from gpuscale.autoscaler.adapters.engine import (
    Finish,
    Kill,
    Life,
    Remove,
    Sighting,
    Start,
    Step,
    Taking,
    one_each,
)
from gpuscale.autoscaler.adapters.engines.ecs.client import EcsCalls, NoRoomError, TaskRefusedError
from gpuscale.autoscaler.adapters.engines.ecs.tasks import (
    Task,
    TaskTemplate,
    first,
    run_request,
    sighting,
    started_by,
)
from gpuscale.autoscaler.adapters.templates import LaunchRefusedError
from gpuscale.common.runtime.logs import get_logger

LISTED_WITHIN = 60.0
"""Seconds that a task which was started may take to be listed; until then it is looked at by its name."""

_log = get_logger(__name__)


class EcsEngine:
    """The tasks of one adapter.

    Args:
        calls: of the cluster.
        adapter: id of the adapter; its tasks are marked with it.
        cluster: name or ARN of the cluster.
        templates: how replicas become tasks, by name.
        poll: seconds between two looks.
    """

    def __init__(
        self,
        calls: EcsCalls,
        adapter: str,
        cluster: str,
        templates: Mapping[str, TaskTemplate],
        *,
        poll: float,
    ) -> None:
        self._calls = calls
        self._adapter = adapter
        self._cluster = cluster
        self._templates = templates
        self._poll = poll
        self._tasks: dict[str, Task] = {}
        self._waits: dict[str, str] = {}
        self._recent: dict[str, float] = {}
        self._over: dict[str, Task] = {}
        self._removed: set[str] = set()

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`. A task that stopped does not change any more and is described once."""
        described = [(task.replica, task) for task in await self._described()]
        counts = await one_each(described, first, lambda task: self._calls.stop(task.arn))
        self._tasks = {name: task for name, task in counts.items() if task.arn not in self._removed}
        self._waits = {name: why for name, why in self._waits.items() if name not in self._tasks}
        waiting = {name: Sighting(Life.WAITING, reason=why) for name, why in self._waits.items()}
        return waiting | {name: sighting(task) for name, task in self._tasks.items()}

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`. Where a template finds no room, its other starts wait with it, and cost no call each."""
        taking = Taking()
        full: dict[str, str] = {}
        for step in steps:
            await taking.note(step, self._take(step, full))
        return taking.outcome()

    async def watch(self) -> None:
        """As `Engine.watch`: ECS tells nobody here, so it is asked again after a while."""
        await asyncio.sleep(self._poll)

    async def _take(self, step: Step, full: dict[str, str]) -> str:
        """Take one step; of a start, why it will never be. `full` is why a template has no room, by its name."""
        match step:
            case Start(order, template) if order.replica not in self._tasks:
                if template in full:
                    self._waits[order.replica] = full[template]
                    return ""
                why = await self._start(step)
                if order.replica in self._waits:
                    full[template] = self._waits[order.replica]
                return why
            case Finish(replica) | Kill(replica) if (task := self._tasks.get(replica)) and not task.over:
                await self._calls.stop(task.arn)
            case Remove(replica):
                self._remove(replica)
            case Start() | Finish() | Kill():
                pass
        return ""

    async def _described(self) -> list[Task]:
        """Every task, whether it was listed or only just started."""
        listed = await self._calls.list_arns(started_by(self._adapter))
        now = asyncio.get_running_loop().time()
        self._recent = {
            arn: since
            for arn, since in self._recent.items()
            if arn not in listed and now - since < LISTED_WITHIN
        }
        arns = [*listed, *self._recent]
        self._over = {arn: self._over[arn] for arn in arns if arn in self._over}
        self._removed.intersection_update(arns)
        asked = [arn for arn in arns if arn not in self._over]
        described = await self._calls.describe(asked) if asked else []
        found = [*self._over.values(), *described]
        self._over |= {task.arn: task for task in described if task.over}
        return found

    async def _start(self, step: Start) -> str:
        """Start a task; returns why it never will be, if it was refused."""
        replica = step.order.replica
        template = self._templates.get(step.template)
        if template is None:
            return f"this adapter has no template {step.template}"
        try:
            arn = await self._calls.run(run_request(template, step.order, self._adapter, self._cluster))
        except (LaunchRefusedError, TaskRefusedError) as error:
            self._waits.pop(replica, None)
            return str(error)
        except NoRoomError as error:
            if self._waits.get(replica) != str(error):
                _log.warning("no task for now", replica=replica, why=str(error))
            self._waits[replica] = str(error)
            return ""
        self._waits.pop(replica, None)
        self._recent[arn] = asyncio.get_running_loop().time()
        _log.info("started a task", task=arn, replica=replica)
        return ""

    def _remove(self, replica: str) -> None:
        """Hide what has ended; ECS forgets it by itself, about an hour after its end."""
        self._waits.pop(replica, None)
        if (task := self._tasks.pop(replica, None)) is not None and task.over:
            self._removed.add(task.arn)

"""Ray as an engine of replicas."""

import asyncio
from collections.abc import Mapping, Sequence

from gpuscale.autoscaler.adapters.engines.model import (
    Finish,
    Kill,
    Remove,
    Sighting,
    Start,
    Step,
    StepsFailedError,
)
from gpuscale.autoscaler.adapters.engines.ray.driver_process import RayDriver
from gpuscale.autoscaler.adapters.engines.ray.messages import Order, Question, Verb, sighting
from gpuscale.autoscaler.adapters.engines.ray.settings import RayTemplateSettings, ray_launch
from gpuscale.autoscaler.adapters.templates import LaunchRefusedError

LOOK_EVERY = 1.0
"""Seconds after which Ray is asked again: it has nothing public that tells of changes."""

_VERBS: Mapping[type[Step], Verb] = {Finish: Verb.FINISH, Kill: Verb.KILL, Remove: Verb.REMOVE}


class RayEngine:
    """Replicas as actors in placement groups; an `Engine`.

    Args:
        driver: what speaks to Ray.
        templates: how replicas are started.
        environment: the adapter's own, of which templates hand on what they name.
    """

    def __init__(
        self,
        driver: RayDriver,
        templates: Mapping[str, RayTemplateSettings],
        environment: Mapping[str, str],
    ) -> None:
        self._driver = driver
        self._templates = templates
        self._environment = environment

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`."""
        answer = await self._driver.ask(Question())
        return {group.replica: sighting(group) for group in answer.groups}

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`."""
        refused: dict[str, str] = {}
        orders: list[Order] = []
        for step in steps:
            if not isinstance(step, Start):
                orders.append(Order(_VERBS[type(step)], step.replica))
                continue
            try:
                launch = ray_launch(step.template, self._templates, step.order, self._environment)
            except LaunchRefusedError as error:
                refused[step.order.replica] = str(error)
            else:
                orders.append(Order(Verb.START, step.order.replica, launch))
        if orders:
            answer = await self._driver.ask(Question(tuple(orders)))
            if answer.failed:
                raise StepsFailedError(answer.failed, refused)
        return refused

    async def watch(self) -> None:
        """As `Engine.watch`."""
        await asyncio.sleep(LOOK_EVERY)

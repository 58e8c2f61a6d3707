"""Ray as an engine of replicas."""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    Remove,
    Sighting,
    Start,
    Step,
    StepsFailedError,
)
from gpuscale.autoscaler.adapters.engines.ray.messages import (
    ANSWER,
    QUESTION,
    Answer,
    Order,
    Question,
    Verb,
    sighting,
)
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


MODULE = "gpuscale.autoscaler.adapters.engines.ray.driver"
ANSWER_TIMEOUT = 25.0
"""Seconds that an answer may take; the first one comes after Ray's library was loaded and has connected."""
LONGEST_ANSWER = 64 * 1024 * 1024


class RayDriver:
    """One driver at a time. Not for two callers at once.

    Args:
        address: of the Ray cluster, as Ray takes it.
        namespace: of Ray, that the actors live in.
        adapter: id of the adapter.
    """

    def __init__(self, address: str, namespace: str, adapter: str) -> None:
        self._arguments = (address, namespace, adapter)
        self._process: Process | None = None

    async def ask(self, question: Question) -> Answer:
        """Ask Ray.

        Raises:
            EngineUnavailableError: it did not answer, or not in time, or with an error; whether it did what it was asked
                to is unknown then.
        """
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT):
                answer = await self._exchange(question)
        except TimeoutError as error:
            raise EngineUnavailableError(f"Ray did not answer within {ANSWER_TIMEOUT:.0f} s") from error
        if answer.error:
            raise EngineUnavailableError(answer.error)
        return answer

    async def close(self) -> None:
        """End the driver; what it started in Ray goes on."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _exchange(self, question: Question) -> Answer:
        """One question and its answer. Where that fails or is cut short, the driver is of no more use."""
        sound = False
        try:
            process = self._process or await self._start()
            line = b""
            if process.stdin is not None and process.stdout is not None:
                process.stdin.write(QUESTION.dump_json(question) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            if not line:
                raise EngineUnavailableError("the process that speaks to Ray has ended; its log says why")
            answer = ANSWER.validate_json(line)
        except (OSError, ValueError) as error:
            raise EngineUnavailableError(f"the process that speaks to Ray: {error}") from error
        else:
            sound = not answer.error
            return answer
        finally:
            if not sound:
                await self.close()

    async def _start(self) -> Process:
        environment = {"RAY_USAGE_STATS_ENABLED": "0", **os.environ}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            *self._arguments,
            stdin=PIPE,
            stdout=PIPE,
            limit=LONGEST_ANSWER,
            env=environment,
            start_new_session=True,
        )
        return self._process

"""Replicas as actors in the placement groups of a Ray cluster: settings, engine, and the adapter's end of the driver.

The driver is the process that speaks to Ray: started when it is needed, and killed whenever it does not answer.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    LaunchRefusedError,
    Remove,
    ReplicaOrder,
    Sighting,
    Start,
    Step,
    StepsFailedError,
)
from gpuscale.autoscaler.adapters.settings import EngineSettings, Host, OpenEngine
from gpuscale.autoscaler.adapters.templates import (
    PYTHON,
    check_command,
    check_environment,
    fill_arguments,
    handed_on,
    parse_arguments,
    placeholders,
    template_named,
)
from gpuscale.common.secrets import environment
from gpuscale_ray.messages import (
    ANSWER,
    QUESTION,
    RayAnswer,
    RayLaunch,
    RayOrder,
    RayQuestion,
    Verb,
    sighting,
)

MODULE = "gpuscale_ray.driver"
ANSWER_TIMEOUT = 25.0
"""Seconds that an answer may take; the first comes after Ray's library has loaded and connected."""
LONGEST_ANSWER = 64 * 1024 * 1024
FINEST_DIGITS = 4
"""Decimal places: Ray counts no finer parts of a resource."""
_OWN_RESOURCES = frozenset({"CPU", "GPU", "memory", "object_store_memory"})
LOOK_EVERY = 1.0
"""Seconds between two observations: Ray has no public events."""

_VERBS: Mapping[type[Step], Verb] = {Finish: Verb.FINISH, Kill: Verb.KILL, Remove: Verb.REMOVE}


class RayTemplate(BaseModel):
    """One table [ray_templates.NAME]: how replicas of endpoints that name it are started in Ray."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    command: tuple[str, ...]
    """The program, an absolute path on Ray's nodes or {python}, the interpreter of Ray's workers; and its arguments."""
    working_dir: str = ""
    """Where it is started on its node; by default where Ray's worker runs."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables to set. Of the node's own the command has PATH, HOME and LANG."""
    pass_env: tuple[str, ...] = ()
    """Variables to hand on from the adapter's own environment; Ray keeps them with the actor."""
    num_cpus: float = Field(1.0, ge=0, le=10_000)
    """Logical CPUs that a replica holds."""
    resources: dict[str, float] = Field(default_factory=dict[str, float])
    """Further resources of Ray that a replica holds, such as one that only some nodes have."""

    @field_validator("command")
    @classmethod
    def _check_command(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if "python" in placeholders(parse_arguments(command[1:])):
            raise ValueError("{python} stands for the program alone")
        return check_command(command)

    @model_validator(mode="after")
    def _check_rest(self) -> Self:
        check_environment(self.env, self.pass_env)
        for name, amount in {"num_cpus": self.num_cpus, **self.resources}.items():
            if round(amount, FINEST_DIGITS) != amount:
                raise ValueError(f"{name}: Ray counts no finer than {10**-FINEST_DIGITS:g}")
        for name, amount in self.resources.items():
            if name in _OWN_RESOURCES or not name.strip() or not 0 < amount <= 1_000_000:
                raise ValueError(
                    f"resources.{name}: must be above 0, and a resource that Ray does not define"
                )
        return self


class RaySettings(EngineSettings):
    """Settings of the Ray adapter."""

    section: ClassVar[str] = "ray_adapter"
    kind: ClassVar[str] = "ray"
    description: ClassVar[str] = "Keeps replicas as actors in the placement groups of a Ray cluster."
    library: ClassVar[str] = "ray"
    templates_field: ClassVar[str] = "ray_templates"

    address: str = Field(
        "auto",
        min_length=1,
        description="address of the cluster: HOST:PORT, ray://HOST:PORT, or auto for this host's",
    )
    namespace: str = Field("gpuscale", min_length=1, description="namespace of Ray that the replicas live in")
    ray_templates: dict[str, RayTemplate] = Field(
        default_factory=dict[str, RayTemplate], description="how replicas are started, by template"
    )

    @asynccontextmanager
    async def open_engine(self, _host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The actors of this adapter, which go on when it ends."""
        driver = RayDriver(self.address, self.namespace, self.adapter)
        capabilities = api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True)
        try:
            yield OpenEngine(RayEngine(driver, self.ray_templates, environment()), capabilities)
        finally:
            await driver.close()


class RayDriver:
    """The driver, one at a time. Not for two callers at once."""

    def __init__(self, address: str, namespace: str, adapter: str) -> None:
        self._arguments = (address, namespace, adapter)
        self._process: Process | None = None

    async def ask(self, question: RayQuestion) -> RayAnswer:
        """Ask Ray.

        Raises:
            EngineUnavailableError: it did not answer in time, or with an error; it may have done what it was asked to.
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
        """Kill the driver; what it started in Ray goes on."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _exchange(self, question: RayQuestion) -> RayAnswer:
        """Send one question and read its answer. If that fails or is interrupted, the driver is killed."""
        sound = False
        try:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    MODULE,
                    *self._arguments,
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=LONGEST_ANSWER,
                    env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
                    start_new_session=True,
                )
            process, line = self._process, b""
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


class RayEngine:
    """Replicas as actors in placement groups; an `Engine`."""

    def __init__(
        self, driver: RayDriver, templates: Mapping[str, RayTemplate], environment: Mapping[str, str]
    ) -> None:
        self._driver = driver
        self._templates = templates
        self._environment = environment

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`."""
        answer = await self._driver.ask(RayQuestion())
        return {group.replica: sighting(group) for group in answer.groups}

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`."""
        refused: dict[str, str] = {}
        orders: list[RayOrder] = []
        for step in steps:
            if not isinstance(step, Start):
                orders.append(RayOrder(_VERBS[type(step)], step.replica))
                continue
            try:
                launch = ray_launch(step.template, self._templates, step.order, self._environment)
            except LaunchRefusedError as error:
                refused[step.order.replica] = str(error)
            else:
                orders.append(RayOrder(Verb.START, step.order.replica, launch))
        if orders:
            answer = await self._driver.ask(RayQuestion(tuple(orders)))
            if answer.failed:
                raise StepsFailedError(answer.failed, refused)
        return refused

    async def watch(self) -> None:
        """As `Engine.watch`."""
        await asyncio.sleep(LOOK_EVERY)


def ray_launch(
    name: str, templates: Mapping[str, RayTemplate], order: ReplicaOrder, environment: Mapping[str, str]
) -> RayLaunch:
    """What Ray starts for a replica, by the template of that name.

    Raises:
        LaunchRefusedError: the template does not exist or asks Ray for no resource, or a value does not fit it.
    """
    template = template_named(templates, name)
    # Ray picks the GPUs and sets CUDA_VISIBLE_DEVICES; there is no reservation, and no fence.
    made = RayLaunch(
        argv=fill_arguments(name, template.command, order, PYTHON),
        env={**handed_on(name, template.pass_env, environment), **template.env, **order.variables()},
        working_dir=template.working_dir,
        cpus=template.num_cpus,
        gpus=order.gpu_count,
        resources=template.resources,
    )
    if not made.bundle:
        raise LaunchRefusedError(
            f"template {name} asks Ray for nothing: give it num_cpus, or the endpoint GPUs"
        )
    return made

"""Replicas as containers of a Docker-compatible engine: settings, engine, and how it is opened.

Each replica has one container, identified by its name and labels; nothing else is touched.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    LaunchRefusedError,
    ReplicaOrder,
    Sighting,
    Start,
    Step,
    StepOutcomes,
    StepwiseEngine,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container import containers
from gpuscale.autoscaler.adapters.served import with_free_port
from gpuscale.autoscaler.adapters.settings import Host, NodeEngineSettings, OpenEngine
from gpuscale.autoscaler.adapters.templates import template_named
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, TaskScope, hit_async, wait_at_most
from gpuscale.common.secrets import environment


@dataclass(slots=True)
class _Wait:
    """A replica that waits for an image; `outcome` is None during the pull, then empty or the error."""

    image: str
    outcome: str | None = None


class Pulls:
    """Pulls images in background tasks; `changed` is called whenever one has ended."""

    def __init__(
        self, pull: Callable[[str], Awaitable[None]], changed: Callable[[], None], tasks: TaskScope
    ) -> None:
        self._pull_image = pull
        self._changed = changed
        self._tasks = tasks
        self._under_way: set[str] = set()
        self._waits: dict[str, _Wait] = {}

    def waiting(self) -> dict[str, Sighting]:
        """The replicas that wait for an image."""
        return {
            replica: Sighting(WorkerLife.WAITING, reason=f"its image {wait.image} is being pulled")
            for replica, wait in self._waits.items()
        }

    def missing(self, replica: str, image: str, why: str) -> None:
        """Pull an image that the engine says is missing, once; LaunchRefusedError if that does not help."""
        wait = self._waits.get(replica)
        if wait is None:
            self._waits[replica] = _Wait(image)
            if image not in self._under_way:
                self._under_way.add(image)
                self._tasks.start(f"pull of {image}", self._pull(image))
        elif wait.outcome is not None:
            del self._waits[replica]
            raise LaunchRefusedError(
                wait.outcome or f"its image {image} was pulled, but the engine still says: {why}"
            )

    def drop(self, replica: str) -> None:
        """This replica does not wait any more; a pull under way continues, for the next one."""
        self._waits.pop(replica, None)

    async def _pull(self, image: str) -> None:
        _log.info("pulling an image", image=image)
        outcome = ""
        try:
            await self._pull_image(image)
            _log.info("image pulled", image=image)
        except (containers.EngineRefusedError, EngineUnavailableError) as error:
            outcome = f"its image {image} cannot be pulled: {error}"
            _log.warning("image not pulled", image=image, why=str(error))
        self._under_way.discard(image)
        for wait in self._waits.values():
            if wait.image == image:
                wait.outcome = outcome
        self._changed()


if TYPE_CHECKING:
    from gpuscale.autoscaler.adapters.engines.container.docker_api import DockerApi, Listed

NO_RUNTIME = "could not select device driver"
"""Docker's message if the NVIDIA runtime is not set up."""
NO_GPUS = "the engine accepted the request for GPUs but ignored it, so the container would run without; Podman does that"
POLL = 3.0
"""Seconds between two observations while no event arrives."""
AT_ONCE = 8
"""Calls to the engine at a time."""

T = TypeVar("T")
_NOT_INSPECTED = ("", containers.Details())
_log = get_logger(__name__)


class ContainerSettings(NodeEngineSettings):
    """Settings of the container adapter."""

    section: ClassVar[str] = "container_adapter"
    kind: ClassVar[str] = "container"
    description: ClassVar[str] = "Starts and stops replicas as containers of a Docker-compatible engine."
    library: ClassVar[str] = "aiodocker"
    templates_field: ClassVar[str] = "container_templates"

    engine: str = Field(
        "unix:///run/docker.sock",
        pattern=r"^unix:///",
        description="address of the engine, which runs on this host: unix:///PATH",
    )
    allowed_images: tuple[str, ...] = Field(
        (), description="patterns of allowed images, with * for any text without a slash; none when empty"
    )
    container_templates: dict[str, containers.ContainerTemplate] = Field(
        default_factory=dict[str, containers.ContainerTemplate], description="container templates by name"
    )

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        for name, table in self.container_templates.items():
            if not containers.is_allowed(table.image, self.allowed_images):
                raise ValueError(f"container_templates.{name}: its image is not among allowed_images")
        return self

    @asynccontextmanager
    async def open_engine(self, host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The containers of this adapter, which survive it."""
        from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api

        admission = Admission(host.agent, required=self.require_admission)
        finishing = {record.replica for record in host.records if record.asked_to_stop_at is not None}
        checks = [template.health_check for template in self.container_templates.values()]
        capabilities = api.AdapterCapabilities(
            picks_victims=True, drains=True, probes=any(check and check.command for check in checks)
        )
        async with (
            open_docker_api(self.engine, self.adapter) as docker,
            open_container_engine(self, admission, docker, finishing) as engine,
        ):
            yield OpenEngine(engine, capabilities, self.node)


class ContainerEngine(StepwiseEngine):
    """The containers of one adapter; `finishing` has replicas that an earlier run asked to finish."""

    def __init__(
        self,
        settings: ContainerSettings,
        admission: Admission,
        docker: DockerApi,
        pulls: Pulls,
        changed: asyncio.Event,
        finishing: Iterable[str] = (),
    ) -> None:
        self._api = docker
        self._settings = settings
        self._adapter = settings.adapter
        self._pulls = pulls
        self._environment = environment()
        self._admission = admission
        self._changed = changed
        self._calls = asyncio.Semaphore(AT_ONCE)
        self._found: dict[str, Listed] = {}  # by replica
        # by container: the state inspected, and the rest
        self._details: dict[str, tuple[str, containers.Details]] = {}
        self._finishing = set(finishing)
        self._given_up: dict[str, str] = {}  # by container: why
        self._untold: set[str] = set()  # containers that the engine lists, but cannot inspect

    async def observe(self) -> Mapping[str, Sighting]:
        """See `Engine.observe`: one listing, and an inspection of each changed container.

        A container whose health check failed too often is killed, unless it is finishing its work. A container that the engine
        lists but cannot inspect, such as a hanging one, does not affect the others.
        """
        found = {
            replica: container
            for container in await self._api.containers()
            if (replica := containers.owned(self._adapter, container.names, container.labels))
        }
        problems = await self._all(self._inspect(container) for container in found.values())
        if found and all(problems):
            raise EngineUnavailableError(problems[0])
        self._found = {
            replica: container for replica, container in found.items() if container.id in self._details
        }
        living = {container.id for container in self._found.values()}
        for by_container in (self._details, self._given_up):
            for container in by_container.keys() - living:
                del by_container[container]
        self._untold &= living
        self._finishing &= self._found.keys()
        sightings = await self._all(self._judge(*item) for item in self._found.items())
        return self._pulls.waiting() | dict(sightings)

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """See `Engine.apply`."""
        outcomes = StepOutcomes()
        await self._all(self.take(step, outcomes) for step in steps)
        return outcomes.result()

    async def watch(self) -> None:
        """See `Engine.watch`: until an event arrives, or for `POLL` seconds."""
        await wait_at_most(self._changed, POLL)
        self._changed.clear()

    async def start(self, step: Start) -> None:
        """See `StepwiseEngine.start`: create its container, unless it exists, and start it.

        Inspecting it in between reveals what the engine left out. A start may be interrupted anywhere and repeated: the
        container is found by its name, and one that has run is never started again. A start is also repeated after a missing
        image was pulled.
        """
        name = step.template
        template = template_named(self._settings.container_templates, name)
        order = with_free_port(step.order, template.arguments)
        request = containers.container_request(
            self._adapter, name, template, order, self._environment, self._settings.replica_log_max_bytes
        )
        try:
            container = await self._create(order, request)
        except containers.EngineRefusedError as error:
            if not error.not_found:
                raise LaunchRefusedError(f"its container cannot be created: {error}") from error
            if template.pull == "never":
                raise LaunchRefusedError(
                    f"its image is missing, and the template does not allow pulling it: {error}"
                ) from error
            self._pulls.missing(order.replica, template.image, str(error))
            return
        self._pulls.drop(order.replica)
        if container is None:
            return
        await hit_async("adapter.container.after_create")
        try:
            await self._run(order, container)
        except LaunchRefusedError:
            await self._discard(container)
            raise

    async def finish(self, step: Finish) -> None:
        """See `StepwiseEngine.finish`; the engine's own `stop` would kill it after a time that we do not control."""
        container = self._found.get(step.replica)
        if container is None:
            return
        self._finishing.add(step.replica)
        details = await self._api.inspect(container.id)
        if details is not None:
            await self._signal(step.replica, details.stop_signal or "SIGTERM")

    async def kill(self, replica: str) -> None:
        """See `StepwiseEngine.kill`."""
        await self._signal(replica, "SIGKILL")

    async def remove(self, replica: str) -> None:
        """See `StepwiseEngine.remove`."""
        self._pulls.drop(replica)
        if container := self._found.get(replica):
            await self._discard(container.id)

    async def _inspect(self, container: Listed) -> str:
        """Inspect a container if it changed; returns why the engine could not, in which case its listing stands."""
        health = containers.listed_health(container.status)
        state = f"{container.state} {health}"
        before, details = self._details.get(container.id, _NOT_INSPECTED)
        # Some engines omit the health from listings.
        if before == state and (health or not details.health):
            return ""
        try:
            found = await self._api.inspect(container.id)
        except EngineUnavailableError as error:
            if container.id not in self._untold:
                _log.warning("the engine cannot inspect a container", container=container.id, why=str(error))
            self._untold.add(container.id)
            self._details[container.id] = ("", containers.Details(unknown=True))
            return str(error)
        self._untold.discard(container.id)
        if found is None:
            self._details.pop(container.id, None)
        else:
            self._details[container.id] = (state, found)
        return ""

    async def _judge(self, replica: str, container: Listed) -> tuple[str, Sighting]:
        """The state of a replica. Kills its container if its health check failed too often, or it was given up."""
        details = self._details[container.id][1]
        if container.state not in containers.OVER:
            if why := self._given_up.get(container.id):
                await self._give_up(container.id, why)
            elif details.health == "unhealthy" and replica not in self._finishing:
                await self._give_up(container.id, "its health check failed too often")
        return replica, containers.sighting(container.state, details, self._given_up.get(container.id, ""))

    async def _give_up(self, container: str, why: str) -> None:
        """Kill a container that must not go on; it may hang, so it is not asked to finish first."""
        if container not in self._given_up:
            _log.warning("container given up", container=container, why=why)
        self._given_up[container] = why
        try:
            await self._api.kill(container, "SIGKILL")
        except (containers.EngineRefusedError, EngineUnavailableError) as error:
            _log.info("container not killed", container=container, why=str(error))

    async def _create(self, order: ReplicaOrder, request: Mapping[str, containers.Json]) -> str | None:
        """The id of its container, never started so far; None if it was, or must be created again."""
        name = containers.container_name(self._adapter, order.replica)
        try:
            return await self._api.create(name, request)
        except containers.EngineRefusedError:
            # The status alone does not show that a name is taken: Podman returns 500 where Docker returns 409.
            existing = await self._api.inspect(name)
            if (
                existing is None
                or containers.owned(self._adapter, [existing.name], existing.labels) != order.replica
            ):
                raise
        if existing.state not in containers.NOT_STARTED:
            return None
        # The remains of an interrupted start are usable if they have the same GPUs and fence.
        if containers.labels(self._adapter, order).items() <= existing.labels.items():
            return existing.id
        await self._discard(existing.id)
        return None

    async def _run(self, order: ReplicaOrder, container: str) -> None:
        if order.gpu_uuids:
            created = await self._api.inspect(container)
            if created is None or set(created.gpu_uuids) != set(order.gpu_uuids):
                raise LaunchRefusedError(NO_GPUS)
        if refusal := await self._admission.refusal(order):
            raise LaunchRefusedError(refusal)
        try:
            await self._api.start(container)
        except containers.EngineRefusedError as error:
            why = f"its container cannot be started: {error}"
            if NO_RUNTIME in str(error):
                why = f"the engine cannot give it GPUs: the NVIDIA container runtime is not set up there ({error})"
            raise LaunchRefusedError(why) from error
        _log.info("container started", replica=order.replica, container=container)
        if order.gpu_uuids:
            started = await self._api.inspect(container)
            pid = started.pid if started else 0
            if pid and (refusal := await self._admission.refusal(order, pid)):
                await self._give_up(container, refusal)

    async def _discard(self, container: str) -> None:
        """Remove a container; harmless if it does not exist."""
        try:
            await self._api.remove(container)
        except containers.EngineRefusedError as error:
            raise EngineUnavailableError(f"a container cannot be removed: {error}") from error

    async def _signal(self, replica: str, signal: str) -> None:
        container = self._found.get(replica)
        if container is None:
            return
        try:
            await self._api.kill(container.id, signal)
        except containers.EngineRefusedError as error:
            details = await self._api.inspect(container.id)
            if details is not None and details.state not in containers.OVER:
                raise EngineUnavailableError(str(error)) from error

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Make calls, `AT_ONCE` at a time; if one fails, the others finish first."""

        async def limited(call: Awaitable[T]) -> T:
            async with self._calls:
                return await call

        done = await asyncio.gather(*(limited(call) for call in calls), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in done if not isinstance(outcome, BaseException)]


@asynccontextmanager
async def open_container_engine(
    settings: ContainerSettings, admission: Admission, docker: DockerApi, finishing: Iterable[str] = ()
) -> AsyncGenerator[ContainerEngine]:
    """Open the engine; until the block ends, its events are followed, and images pulled, in the background."""
    changed = asyncio.Event()
    async with TaskScope() as tasks:
        tasks.spawn("events of the container engine", _follow(docker, changed))
        pulls = Pulls(docker.pull, changed.set, tasks)
        yield ContainerEngine(settings, admission, docker, pulls, changed, finishing)


async def _follow(docker: DockerApi, changed: asyncio.Event) -> None:
    """Set `changed` on every event, forever; without events, `POLL` applies."""
    backoff = Backoff(initial=1.0, cap=30.0)

    def happened() -> None:
        backoff.reset()
        changed.set()

    while True:
        try:
            await docker.follow(happened)
        except EngineUnavailableError as error:
            _log.debug("no events of the container engine", why=str(error))
        await asyncio.sleep(backoff.next())

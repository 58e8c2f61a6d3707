"""The start of one container: created, inspected, admitted by the node's agent, and only then started.

Inspecting it finds what the engine left out of the request before that does harm. A start may be interrupted anywhere and
repeated: the container is found by its name, and one that has run is never started again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    LaunchRefusedError,
    ReplicaOrder,
    Sighting,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container.containers import (
    NOT_STARTED,
    EngineRefusedError,
    container_name,
    labels,
    owned,
)
from gpuscale.autoscaler.adapters.engines.container.template import (
    Json,
    Logs,
    container_request,
)
from gpuscale.autoscaler.adapters.templates import template_named
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope, hit_async

if TYPE_CHECKING:
    from gpuscale.autoscaler.adapters.engines.container.docker_api import DockerApi
    from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings

NO_RUNTIME = "could not select device driver"
"""What Docker says if the NVIDIA runtime is not set up."""
NO_GPUS = (
    "the engine took the request for GPUs and did not keep it, so it would run without; Podman does that"
)

_log = get_logger(__name__)


@dataclass(slots=True)
class _Wait:
    """A replica that waits for an image; `outcome` is None during the pull, then empty, or why it failed."""

    image: str
    outcome: str | None = None


class Pulls:
    """Pulls images in the background.

    Args:
        pull: pulls one image, and returns when it is there.
        changed: called whenever a pull has ended.
        tasks: where pulls run.
    """

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
        """Pull an image once, which the engine says is missing.

        Raises:
            LaunchRefusedError: it cannot be pulled, or was pulled and is still missing.
        """
        wait = self._waits.get(replica)
        if wait is None:
            self._waits[replica] = _Wait(image)
            if image not in self._under_way:
                self._under_way.add(image)
                self._tasks.start(f"pull of {image}", self._pull(image))
        elif wait.outcome is not None:
            del self._waits[replica]
            raise LaunchRefusedError(
                wait.outcome or f"its image {image} was pulled, and still the engine says: {why}"
            )

    def drop(self, replica: str) -> None:
        """This replica does not wait any more; a pull that is under way goes on, for the next one."""
        self._waits.pop(replica, None)

    async def _pull(self, image: str) -> None:
        _log.info("pulling an image", image=image)
        outcome = ""
        try:
            await self._pull_image(image)
            _log.info("image pulled", image=image)
        except (EngineRefusedError, EngineUnavailableError) as error:
            outcome = f"its image {image} cannot be pulled: {error}"
            _log.warning("image not pulled", image=image, why=str(error))
        self._under_way.discard(image)
        for wait in self._waits.values():
            if wait.image == image:
                wait.outcome = outcome
        self._changed()


class Starter:
    """Starts containers.

    Args:
        settings: of the adapter.
        environment: the adapter's own.
        admission: asked before anything is started on GPUs.
        api: the connection to the engine.
        pulls: images that are being pulled.
        give_up: kills a container that runs and must not, for the reason given.
    """

    def __init__(
        self,
        settings: ContainerSettings,
        environment: Mapping[str, str],
        admission: Admission,
        api: DockerApi,
        pulls: Pulls,
        give_up: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._adapter = settings.adapter
        self._templates = settings.container_templates
        self._logs = Logs(settings.log_driver, settings.replica_log_max_bytes)
        self._environment = environment
        self._admission = admission
        self._api = api
        self._pulls = pulls
        self._give_up = give_up

    async def start(self, order: ReplicaOrder, name: str) -> None:
        """Create a replica's container by the template of that name, unless it exists, and start it.

        It does not run yet if its image is being pulled: the start is then asked for again.

        Raises:
            LaunchRefusedError: it will never run.
            EngineUnavailableError: nobody knows how far it came.
        """
        template = template_named(self._templates, name)
        request = container_request(self._adapter, name, template, order, self._environment, self._logs)
        try:
            container = await self._create(order, request)
        except EngineRefusedError as error:
            if not error.not_found:
                raise LaunchRefusedError(f"its container cannot be made: {error}") from error
            if template.pull == "never":
                raise LaunchRefusedError(
                    f"its image is not there, and is not to be pulled: {error}"
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
            await self.discard(container)
            raise

    async def discard(self, container: str) -> None:
        """Remove a container; harmless if it does not exist.

        Raises:
            EngineUnavailableError: it perhaps still exists.
        """
        try:
            await self._api.remove(container)
        except EngineRefusedError as error:
            raise EngineUnavailableError(f"a container cannot be removed: {error}") from error

    async def _create(self, order: ReplicaOrder, request: Mapping[str, Json]) -> str | None:
        """The id of its container, which was never started; None if it was, or is to be created again.

        Raises:
            EngineRefusedError: it cannot be created.
        """
        name = container_name(self._adapter, order.replica)
        try:
            return await self._api.create(name, request)
        except EngineRefusedError:
            # The status alone does not tell that a name is taken: Podman says 500 where Docker says 409.
            existing = await self._api.inspect(name)
            if existing is None or owned(self._adapter, [existing.name], existing.labels) != order.replica:
                raise
        if existing.state not in NOT_STARTED:
            return None
        # What an interrupted start has left is of use if it is for the same GPUs under the same fence.
        if labels(self._adapter, order).items() <= existing.labels.items():
            return existing.id
        await self.discard(existing.id)
        return None

    async def _run(self, order: ReplicaOrder, container: str) -> None:
        """Start a container that was created.

        Raises:
            LaunchRefusedError: it must not run, or cannot.
        """
        if order.gpu_uuids:
            created = await self._api.inspect(container)
            if created is None or set(created.gpu_uuids) != set(order.gpu_uuids):
                raise LaunchRefusedError(NO_GPUS)
        if refusal := await self._admission.refusal(order):
            raise LaunchRefusedError(refusal)
        try:
            await self._api.start(container)
        except EngineRefusedError as error:
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

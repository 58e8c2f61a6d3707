"""The start of one container: made, looked at, admitted by the node's agent, and only then started.

What the engine left out of the request is so found before it does harm. A start may be cut short anywhere and come again:
the container's name finds what is there, and what has run once is never started again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import EngineUnavailableError, ReplicaOrder
from gpuscale.autoscaler.adapters.engines.container.containers import (
    EngineRefusedError,
    container_name,
    is_not_started,
    labels,
    owned,
)
from gpuscale.autoscaler.adapters.engines.container.template import (
    ContainerTemplate,
    Json,
    Logs,
    container_request,
)
from gpuscale.autoscaler.adapters.templates import LaunchRefusedError, template_named
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import TaskScope, hit_async

if TYPE_CHECKING:
    from gpuscale.autoscaler.adapters.engines.container.docker_api import DockerApi, Inspected
    from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings

NO_RUNTIME = "could not select device driver"
"""What Docker says where the NVIDIA runtime is not set up."""
NO_GPUS = (
    "the engine took the request for GPUs and did not keep it, so it would run without; Podman does that"
)

_log = get_logger(__name__)


@dataclass(slots=True)
class _Wait:
    """A replica that waits for an image; `outcome` is None while it is fetched, empty once it is there, else why not."""

    image: str
    outcome: str | None = None


class Pulls:
    """Fetches in the background.

    Args:
        fetch: brings one image, and ends when it is there.
        changed: called whenever a fetch has ended.
        tasks: where fetches run.
    """

    def __init__(
        self, fetch: Callable[[str], Awaitable[None]], changed: Callable[[], None], tasks: TaskScope
    ) -> None:
        self._fetch = fetch
        self._changed = changed
        self._tasks = tasks
        self._under_way: set[str] = set()
        self._waits: dict[str, _Wait] = {}

    def waiting(self) -> Mapping[str, str]:
        """What each replica waits for, for a person, by name."""
        return {replica: f"its image {wait.image} is being pulled" for replica, wait in self._waits.items()}

    def missing(self, replica: str, image: str, why: str) -> str:
        """The engine says that it has no such image: fetch it, once. Returns why the replica never starts, or nothing."""
        wait = self._waits.get(replica)
        if wait is None:
            self._waits[replica] = _Wait(image)
            self._begin(image)
            return ""
        if wait.outcome is None:
            return ""
        del self._waits[replica]
        return wait.outcome or f"its image {image} was pulled, and still the engine says: {why}"

    def drop(self, replica: str) -> None:
        """This replica waits no more; a fetch that is under way goes on, for the next one."""
        self._waits.pop(replica, None)

    def _begin(self, image: str) -> None:
        if image not in self._under_way:
            self._under_way.add(image)
            self._tasks.start(f"pull of {image}", self._pull(image))

    async def _pull(self, image: str) -> None:
        _log.info("pulling an image", image=image)
        outcome = ""
        try:
            await self._fetch(image)
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
        pulls: images that are being fetched.
        give_up: ends a container that runs and must not, for the reason given.
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

    async def start(self, order: ReplicaOrder, name: str) -> str:
        """Make a replica's container of the template of that name where there is none, and start it.

        Returns:
            Why that will never be, for a person; empty where it runs now, or is to be asked for again.

        Raises:
            EngineUnavailableError: nobody knows how far it came.
        """
        try:
            template = template_named(self._templates, name)
            request = container_request(self._adapter, name, template, order, self._environment, self._logs)
        except LaunchRefusedError as error:
            return str(error)
        try:
            container = await self._made(order, request)
        except EngineRefusedError as error:
            return self._not_made(order, template, error)
        self._pulls.drop(order.replica)
        if container is None:
            return ""
        await hit_async("adapter.container.after_create")
        if refusal := await self._begin(order, container):
            await self.discard(container)
        return refusal

    async def discard(self, container: str) -> None:
        """Remove what is left of a container; harmless where nothing is.

        Raises:
            EngineUnavailableError: it is perhaps still there.
        """
        try:
            await self._api.remove(container)
        except EngineRefusedError as error:
            raise EngineUnavailableError(f"a container cannot be removed: {error}") from error

    async def _made(self, order: ReplicaOrder, request: Mapping[str, Json]) -> str | None:
        """The id of its container, which is there and was never started; None where it was, or is to be made again.

        Raises:
            EngineRefusedError: it cannot be made.
        """
        name = container_name(self._adapter, order.replica)
        try:
            return await self._api.create(name, request)
        except EngineRefusedError:
            # By its status alone a name that is taken cannot be told: Podman says 500 where Docker says 409.
            there = await self._api.inspect(name)
            if there is None or owned(self._adapter, [there.name], there.labels or {}) != order.replica:
                raise
        return await self._left(order, there)

    async def _left(self, order: ReplicaOrder, there: Inspected) -> str | None:
        """What a start that was cut short has left, if it is for the same GPUs under the same fence."""
        if not is_not_started(there.state):
            return None
        if labels(self._adapter, order).items() <= (there.labels or {}).items():
            return there.id
        await self.discard(there.id)
        return None

    def _not_made(self, order: ReplicaOrder, template: ContainerTemplate, error: EngineRefusedError) -> str:
        if not error.not_found:
            return f"its container cannot be made: {error}"
        if template.pull == "never":
            return f"its image is not there, and is not to be pulled: {error}"
        return self._pulls.missing(order.replica, template.image, str(error))

    async def _begin(self, order: ReplicaOrder, container: str) -> str:
        """Start a container that is made; why it must not run, or cannot, or nothing."""
        admission, gpu_uuids = self._admission, order.gpu_uuids
        if gpu_uuids and not await self._has_gpus(order, container):
            return NO_GPUS
        if refusal := await admission.refusal(order):
            return refusal
        try:
            await self._api.start(container)
        except EngineRefusedError as error:
            return _cannot_start(str(error))
        _log.info("container started", replica=order.replica, container=container)
        if gpu_uuids:
            there = await self._api.inspect(container)
            pid = there.pid if there else 0
            if pid and (refusal := await admission.refusal(order, pid)):
                await self._give_up(container, refusal)
        return ""

    async def _has_gpus(self, order: ReplicaOrder, container: str) -> bool:
        there = await self._api.inspect(container)
        return there is not None and set(there.gpu_uuids) == set(order.gpu_uuids)


def _cannot_start(why: str) -> str:
    if NO_RUNTIME in why:
        return f"the engine cannot give it GPUs: the NVIDIA container runtime is not set up there ({why})"
    return f"its container cannot be started: {why}"

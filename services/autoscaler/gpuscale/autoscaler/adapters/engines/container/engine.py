"""A Docker-compatible engine as the adapter drives it.

A container is made under one name for each replica, and belongs to us by its name and its labels; nothing else is touched.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    EngineUnavailableError,
    Finish,
    Kill,
    Remove,
    Sighting,
    Start,
    Step,
    StepOutcomes,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container.containers import (
    Details,
    EngineRefusedError,
    is_over,
    listed_health,
    owned,
    sighting,
)
from gpuscale.autoscaler.adapters.engines.container.starting import Pulls, Starter
from gpuscale.autoscaler.adapters.engines.container.template import ContainerTemplate, Word, is_allowed
from gpuscale.autoscaler.adapters.settings import Host, NodeEngineSettings, OpenEngine
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.runtime.tasks import Backoff, TaskScope
from gpuscale.common.secrets import environment

if TYPE_CHECKING:
    from gpuscale.autoscaler.adapters.engines.container.docker_api import DockerApi, Listed

POLL = 3.0
"""Seconds between two looks at the engine where no event comes."""
AT_ONCE = 8
"""Calls that are made of the engine at a time."""

T = TypeVar("T")
_log = get_logger(__name__)


class ContainerSettings(NodeEngineSettings):
    """What the container adapter is told before it starts."""

    section: ClassVar[str] = "container_adapter"
    kind: ClassVar[str] = "container"
    description: ClassVar[str] = "Starts and stops replicas as containers of a Docker-compatible engine."
    library: ClassVar[str] = "aiodocker"
    templates_field: ClassVar[str] = "container_templates"

    engine: str = Field(
        "unix:///run/docker.sock",
        description="address of the engine: unix:///PATH, or tcp://HOST:PORT, which needs TLS on another host",
    )
    engine_ca_file: Path | None = Field(None, description="authority of the engine's certificate, PEM")
    engine_cert_file: Path | None = Field(None, description="client certificate to show the engine, PEM")
    engine_key_file: Path | None = Field(None, description="key of that certificate, PEM")
    allowed_images: tuple[str, ...] = Field(
        (),
        description="pattern of images that may be run, with * for any text without a slash; none when empty",
    )
    log_driver: Word = Field("json-file", description="how the engine keeps output; as by default when empty")
    container_templates: dict[str, ContainerTemplate] = Field(
        default_factory=dict[str, ContainerTemplate], description="container templates by name"
    )

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        where = urlsplit(self.engine)
        if where.scheme == "unix" and not where.netloc and where.path.startswith("/"):
            return self
        if where.scheme != "tcp" or not where.hostname or not where.port or where.path:
            raise ValueError("engine must be unix:///PATH or tcp://HOST:PORT")
        if (self.engine_cert_file is None) != (self.engine_key_file is None):
            raise ValueError("engine_cert_file and engine_key_file go together")
        if self.engine_ca_file is None and not _is_loopback(where.hostname):
            raise ValueError("engine on another host needs engine_ca_file: whoever reaches it owns that host")
        return self

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        for name, table in self.container_templates.items():
            if not is_allowed(table.image, self.allowed_images):
                raise ValueError(f"container_templates.{name}: its image is not among allowed_images")
        return self

    @asynccontextmanager
    async def open_engine(self, host: Host, /) -> AsyncGenerator[OpenEngine]:
        """The containers of this adapter, which go on when it ends.

        Raises:
            FailedPreconditionError: a file of certificates cannot be used.
        """
        from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api

        admission = Admission(host.agent, required=self.require_admission)
        finishing = {one.replica for one in host.records if one.asked_to_stop_at is not None}
        checks = [one.health_check for one in self.container_templates.values()]
        capabilities = api.AdapterCapabilities(
            picks_victims=True, drains=True, probes=any(check and check.command for check in checks)
        )
        async with (
            open_docker_api(
                self.engine,
                self.adapter,
                ca_file=self.engine_ca_file,
                cert_file=self.engine_cert_file,
                key_file=self.engine_key_file,
            ) as docker,
            open_container_engine(self, admission, docker, finishing) as engine,
        ):
            yield OpenEngine(engine, capabilities, self.node)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ContainerEngine:
    """The containers of one adapter; an `Engine`.

    Args:
        settings: of the adapter.
        admission: asked before anything is started on GPUs.
        docker: the connection to the engine.
        pulls: images that are being fetched.
        changed: set by whoever knows that something may have changed.
        finishing: names of the replicas that an earlier run asked to finish.
    """

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
        self._adapter = settings.adapter
        self._pulls = pulls
        self._starter = Starter(settings, environment(), admission, docker, pulls, self._give_up)
        self._changed = changed
        self._calls = asyncio.Semaphore(AT_ONCE)
        self._found: dict[str, Listed] = {}
        self._details: dict[str, tuple[str, Details]] = {}
        self._finishing = set(finishing)
        self._given_up: dict[str, str] = {}
        self._untold: set[str] = set()

    async def observe(self) -> Mapping[str, Sighting]:
        """As `Engine.observe`: one listing, and a look at each container that changed since the last.

        One that its health check gave up is killed, unless it is finishing its work. One that the engine lists and does not
        tell more of, such as since it hangs, is nobody else's trouble.
        """
        found = await self._list()
        changed = [one for one in found.values() if not self._is_known(one)]
        untold = [why for why in await self._all(self._look(one) for one in changed) if why]
        if untold and len(untold) == len(found):
            raise EngineUnavailableError(untold[0])
        self._found = {replica: one for replica, one in found.items() if one.id in self._details}
        self._drop_what_is_gone()
        await self._all(self._end_unwell(replica, one) for replica, one in self._found.items())
        waiting = {
            name: Sighting(WorkerLife.WAITING, reason=why) for name, why in self._pulls.waiting().items()
        }
        return waiting | {
            replica: sighting(one.state, self._details[one.id][1], self._given_up.get(one.id, ""))
            for replica, one in self._found.items()
        }

    async def _list(self) -> dict[str, Listed]:
        """The containers that are ours, by replica."""
        found: dict[str, Listed] = {}
        for one in await self._api.containers():
            if replica := owned(self._adapter, one.names, one.labels or {}):
                found[replica] = one
        return found

    def _drop_what_is_gone(self) -> None:
        living = {one.id for one in self._found.values()}
        self._details = {container: kept for container, kept in self._details.items() if container in living}
        self._given_up = {container: why for container, why in self._given_up.items() if container in living}
        self._untold &= living
        self._finishing &= self._found.keys()

    async def apply(self, steps: Sequence[Step]) -> Mapping[str, str]:
        """As `Engine.apply`."""
        outcomes = StepOutcomes()
        await self._all(outcomes.note(step, self._take(step)) for step in steps)
        return outcomes.result()

    async def watch(self) -> None:
        """As `Engine.watch`: until an event comes, or for `POLL` seconds."""
        try:
            async with asyncio.timeout(POLL):
                await self._changed.wait()
        except TimeoutError:
            pass
        self._changed.clear()

    def _is_known(self, one: Listed) -> bool:
        """Whether what a listing does not tell is known for this state."""
        kept = self._details.get(one.id)
        # Some engines leave the health out of their listings.
        return (
            kept is not None
            and kept[0] == _state(one)
            and (not kept[1].health or bool(listed_health(one.status)))
        )

    async def _look(self, one: Listed) -> str:
        """Learn the rest of one; where the engine does not tell it, and why is returned, it stands as far as it is listed."""
        try:
            found = await self._api.inspect(one.id)
        except EngineUnavailableError as error:
            if one.id not in self._untold:
                _log.warning("the engine does not tell of a container", container=one.id, why=str(error))
            self._untold.add(one.id)
            self._details[one.id] = ("", Details(unknown=True))
            return str(error)
        self._untold.discard(one.id)
        if found is None:
            self._details.pop(one.id, None)
        else:
            self._details[one.id] = (_state(one), found)
        return ""

    async def _end_unwell(self, replica: str, one: Listed) -> None:
        """Kill one that was given up, until it has ended."""
        if is_over(one.state):
            return
        if why := self._given_up.get(one.id):
            await self._give_up(one.id, why)
        elif self._details[one.id][1].health == "unhealthy" and replica not in self._finishing:
            await self._give_up(one.id, "its health check failed too often")

    async def _give_up(self, container: str, why: str) -> None:
        """End one that must not go on; it may hang, so it is not asked first, and killed again with every look."""
        if container not in self._given_up:
            _log.warning("container given up", container=container, why=why)
        self._given_up[container] = why
        try:
            await self._api.kill(container, "SIGKILL")
        except (EngineRefusedError, EngineUnavailableError) as error:
            _log.info("container not killed", container=container, why=str(error))

    async def _take(self, step: Step) -> str:
        """Take one step; of a start, why it will never be."""
        match step:
            case Start(order, template):
                return await self._starter.start(order, template)
            case Finish(replica):
                await self._finish(replica)
            case Kill(replica):
                await self._signal(replica, "SIGKILL")
            case Remove(replica):
                self._pulls.drop(replica)
                if (one := self._found.get(replica)) is not None:
                    await self._starter.discard(one.id)
        return ""

    async def _finish(self, replica: str) -> None:
        """Ask it to finish its work; the engine's own `stop` would kill it after a time that is not ours."""
        one = self._found.get(replica)
        if one is None:
            return
        self._finishing.add(replica)
        there = await self._api.inspect(one.id)
        if there is not None:
            await self._signal(replica, there.stop_signal or "SIGTERM")

    async def _signal(self, replica: str, signal: str) -> None:
        one = self._found.get(replica)
        if one is None:
            return
        try:
            await self._api.kill(one.id, signal)
        except EngineRefusedError as error:
            there = await self._api.inspect(one.id)
            if there is not None and not is_over(there.state):
                raise EngineUnavailableError(str(error)) from error

    async def _all(self, calls: Iterable[Awaitable[T]]) -> list[T]:
        """Some at a time; where one fails the others are taken to their end first."""

        async def one(call: Awaitable[T]) -> T:
            async with self._calls:
                return await call

        done = await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
        for outcome in done:
            if isinstance(outcome, BaseException):
                raise outcome
        return [outcome for outcome in done if not isinstance(outcome, BaseException)]


def _state(one: Listed) -> str:
    return f"{one.state} {listed_health(one.status)}"


@asynccontextmanager
async def open_container_engine(
    settings: ContainerSettings, admission: Admission, docker: DockerApi, finishing: Iterable[str] = ()
) -> AsyncGenerator[ContainerEngine]:
    """The engine, with its events and fetches of images in the background until the block ends."""
    changed = asyncio.Event()
    async with TaskScope() as tasks:
        tasks.spawn("events of the container engine", _follow(docker, changed))
        pulls = Pulls(docker.pull, changed.set, tasks)
        yield ContainerEngine(settings, admission, docker, pulls, changed, finishing)


async def _follow(docker: DockerApi, changed: asyncio.Event) -> None:
    """Take every event for a reason to look, for ever; while there are none `POLL` has to do."""
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

"""The calls of Docker's API that the adapter uses; the only file that imports the client library.

Docker and Podman's service implement this API. Answers are validated.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager

import aiodocker
import aiohttp
from pydantic import BaseModel, Field

from gpuscale.autoscaler.adapters.engine import EngineUnavailableError
from gpuscale.autoscaler.adapters.engines.container.containers import (
    ADAPTER,
    Details,
    EngineRefusedError,
    Json,
    Labels,
)

UNIX = "unix://"
CALL_TIMEOUT = 30.0
"""Seconds to wait for an answer; a start with GPUs is slow."""
LIST_TIMEOUT = 8.0
ONE_TIMEOUT = 5.0
"""Seconds to inspect or signal a container: one that hangs must not delay the others for long."""
CONNECT_TIMEOUT = 5.0
PULL_TIMEOUT = 3600.0

_NOT_FOUND = 404
_UNAVAILABLE = frozenset({502, 503, 504, 900})  # 900: the library's own, if there is no answer
_MAX_TEXT = 500
_KEYS = ("Id", "Names", "State", "Status", "Labels")


class Listed(BaseModel):
    """One container of a listing."""

    id: str = Field(alias="Id")
    names: tuple[str, ...] = Field(alias="Names")
    state: str = Field(alias="State")
    status: str = Field("", alias="Status")
    labels: Labels = Field({}, alias="Labels")


class Inspected(Details):
    """One container, inspected."""

    id: str = Field(validation_alias="Id")
    name: str = Field(validation_alias="Name")


class DockerApi:
    """A connection to an engine.

    Every call raises EngineUnavailableError if the engine does not answer or its answer is invalid. If the engine refuses,
    calls that change something raise EngineRefusedError, and calls that read raise EngineUnavailableError.
    """

    def __init__(self, docker: aiodocker.Docker, adapter: str) -> None:
        self._docker = docker
        self._label = f"{ADAPTER}={adapter}"

    async def containers(self) -> list[Listed]:
        """Every container with this adapter's label, including ended ones."""
        async with _answers(LIST_TIMEOUT, reading=True):
            found = await self._docker.containers.list(all=True, filters=json.dumps({"label": [self._label]}))
            return [Listed.model_validate({key: item[key] for key in _KEYS if key in item}) for item in found]

    async def inspect(self, container: str) -> Inspected | None:
        """One container by its id or name; None if it does not exist."""
        try:
            async with _answers(ONE_TIMEOUT):
                return Inspected.model_validate(await self._docker.containers.container(container).show())
        except EngineRefusedError as error:
            if error.not_found:
                return None
            raise EngineUnavailableError(str(error)) from error

    async def create(self, name: str, request: Mapping[str, Json]) -> str:
        """Create a container and return its id; the error has `not_found` if its image is missing."""
        async with _answers():
            return (await self._docker.containers.create(request, name=name)).id

    async def start(self, container: str) -> None:
        """Start it; harmless if it runs."""
        async with _answers():
            await self._docker.containers.container(container).start()

    async def kill(self, container: str, signal: str) -> None:
        """Send its first process a signal; refused if it does not run."""
        async with _answers(ONE_TIMEOUT):
            await self._docker.containers.container(container).kill(signal=signal)

    async def remove(self, container: str) -> None:
        """Remove it with its anonymous volumes; harmless if it does not exist."""
        try:
            async with _answers():
                await self._docker.containers.container(container).delete(v=True)
        except EngineRefusedError as error:
            if not error.not_found:
                raise

    async def pull(self, image: str) -> None:
        """Pull an image; may take up to `PULL_TIMEOUT`."""
        async with _answers(PULL_TIMEOUT):
            await self._docker.images.pull(image)

    async def follow(self, happened: Callable[[], None]) -> None:
        """Call `happened` for every event of the adapter's containers, until the engine closes the stream."""
        filters = json.dumps({"type": ["container"], "label": [self._label]})
        events = self._docker.events.subscribe(create_task=False)
        async with _answers(None, reading=True):
            reading = asyncio.ensure_future(self._docker.events.run(filters=filters))
            try:
                while await events.get() is not None:
                    happened()
                await reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def open_docker_api(address: str, adapter: str) -> AsyncGenerator[DockerApi]:
    """A connection to the engine at `address`: unix:///PATH."""
    connector = aiohttp.UnixConnector(address.removeprefix(UNIX))
    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    # Created here, so that the library does not read Docker's variables and files.
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limit) as session,
        aiodocker.Docker(f"{UNIX}localhost", connector, session, limit) as docker,
    ):
        yield DockerApi(docker, adapter)


@asynccontextmanager
async def _answers(seconds: float | None = CALL_TIMEOUT, *, reading: bool = False) -> AsyncGenerator[None]:
    """Distinguish an engine that refuses from one that does not answer; when `reading`, a refusal counts as no answer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except aiodocker.DockerError as error:
        if reading or error.status in _UNAVAILABLE:
            raise EngineUnavailableError(error.message) from error
        raise EngineRefusedError(
            error.message.strip()[:_MAX_TEXT], not_found=error.status == _NOT_FOUND
        ) from error
    except TimeoutError as error:
        raise EngineUnavailableError("the engine did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnavailableError(str(error) or type(error).__name__) from error
    except (ValueError, TypeError, KeyError) as error:
        raise EngineUnavailableError("the server that answers is not a Docker-compatible engine") from error

"""The few calls of Docker's API that the adapter makes; the only file that imports the client library.

Every engine that speaks this API will do: Docker, and Podman's service. Answers are checked before they are believed.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiodocker
import aiohttp
from pydantic import AliasPath, BaseModel, Field

from gpuscale.autoscaler.adapters.engine import EngineUnavailableError
from gpuscale.autoscaler.adapters.engines.container.containers import ADAPTER, Details, EngineRefusedError
from gpuscale.autoscaler.adapters.engines.container.template import Json
from gpuscale.common.errors import FailedPreconditionError

UNIX = "unix://"
CALL_TIMEOUT = 30.0
"""Seconds for an answer; a start with GPUs may take some."""
LIST_TIMEOUT = 8.0
ONE_TIMEOUT = 5.0
"""Seconds for a look at one container, or a signal to it: one that hangs must not hold up the others for long."""
CONNECT_TIMEOUT = 5.0
PULL_TIMEOUT = 3600.0

_NOT_FOUND = 404
_UNAVAILABLE = frozenset({502, 503, 504, 900})  # 900: the library's own, where nobody answers
_MAX_TEXT = 500
_KEYS = ("Id", "Names", "State", "Status", "Labels")


class Listed(BaseModel):
    """One container of a listing."""

    id: str = Field(alias="Id")
    names: tuple[str, ...] = Field(alias="Names")
    state: str = Field(alias="State")
    status: str = Field("", alias="Status")
    labels: dict[str, str] | None = Field(None, alias="Labels")


class Inspected(Details):
    """One container, looked at."""

    id: str = Field(validation_alias="Id")
    name: str = Field(validation_alias="Name")
    labels: dict[str, str] | None = Field(None, validation_alias=AliasPath("Config", "Labels"))


class DockerApi:
    """A connection to an engine.

    Every call raises EngineUnavailableError where there is no answer that makes sense. Those that change something raise
    EngineRefusedError where the answer is no; for those that ask, a no is no answer.
    """

    def __init__(self, docker: aiodocker.Docker, adapter: str) -> None:
        self._docker = docker
        self._label = f"{ADAPTER}={adapter}"

    async def containers(self) -> list[Listed]:
        """Every container that has this adapter's label, those that ended too."""
        filters = json.dumps({"label": [self._label]})
        async with _asked(), _answers(LIST_TIMEOUT):
            found = await self._docker.containers.list(all=True, filters=filters)
            return [Listed.model_validate({key: one[key] for key in _KEYS if key in one}) for one in found]

    async def inspect(self, container: str) -> Inspected | None:
        """One container by its id or name; None where it is not there."""
        async with _asked():
            try:
                async with _answers(ONE_TIMEOUT):
                    return Inspected.model_validate(await self._docker.containers.container(container).show())
            except EngineRefusedError as error:
                if error.not_found:
                    return None
                raise

    async def create(self, name: str, request: Mapping[str, Json]) -> str:
        """Make a container of this name and return its id; `not_found` of the error: its image is missing."""
        async with _answers():
            return (await self._docker.containers.create(request, name=name)).id

    async def start(self, container: str) -> None:
        """Start it; harmless where it runs."""
        async with _answers():
            await self._docker.containers.container(container).start()

    async def kill(self, container: str, signal: str) -> None:
        """Send its first process a signal; refused where nothing of it runs."""
        async with _answers(ONE_TIMEOUT):
            await self._docker.containers.container(container).kill(signal=signal)

    async def remove(self, container: str) -> None:
        """Remove what is left of it, with the volumes that have no name; harmless where nothing is."""
        try:
            async with _answers():
                await self._docker.containers.container(container).delete(v=True)
        except EngineRefusedError as error:
            if not error.not_found:
                raise

    async def pull(self, image: str) -> None:
        """Fetch an image; takes as long as that takes."""
        async with _answers(PULL_TIMEOUT):
            await self._docker.images.pull(image)

    async def follow(self, happened: Callable[[], None]) -> None:
        """Call `happened` for every event of the adapter's containers, until the engine hangs up."""
        filters = json.dumps({"type": ["container"], "label": [self._label]})
        events = self._docker.events.subscribe(create_task=False)
        async with _asked(), _answers(None):
            reading = asyncio.ensure_future(self._docker.events.run(filters=filters))
            try:
                while await events.get() is not None:
                    happened()
                await reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def open_docker_api(
    address: str, adapter: str, *, ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> AsyncGenerator[DockerApi]:
    """A connection to the engine at `address`: unix:///PATH, or tcp://HOST:PORT, with TLS where there is a `ca_file`.

    Raises:
        FailedPreconditionError: a certificate or key cannot be read, or they do not fit.
    """
    connector: aiohttp.BaseConnector
    if address.startswith(UNIX):
        url, connector = f"{UNIX}localhost", aiohttp.UnixConnector(address.removeprefix(UNIX))
    else:
        context = _tls(ca_file, cert_file, key_file) if ca_file else None
        url = address.replace("tcp", "https" if context else "http", 1)
        connector = aiohttp.TCPConnector(ssl=context or True)
    limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    # Made here, so that the library reads none of Docker's variables and files.
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limit) as session,
        aiodocker.Docker(url, connector, session, limit) as docker,
    ):
        yield DockerApi(docker, adapter)


@asynccontextmanager
async def _answers(seconds: float | None = CALL_TIMEOUT) -> AsyncGenerator[None]:
    """Tell an engine that says no from one that says nothing, or nothing that makes sense."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except aiodocker.DockerError as error:
        if error.status in _UNAVAILABLE:
            raise EngineUnavailableError(error.message) from error
        raise EngineRefusedError(
            error.message.strip()[:_MAX_TEXT], not_found=error.status == _NOT_FOUND
        ) from error
    except TimeoutError as error:
        raise EngineUnavailableError("the engine did not answer in time") from error
    except (aiohttp.ClientError, OSError) as error:
        raise EngineUnavailableError(str(error) or type(error).__name__) from error
    except (ValueError, TypeError, KeyError) as error:
        raise EngineUnavailableError("what answers is no Docker-compatible engine") from error


@asynccontextmanager
async def _asked() -> AsyncGenerator[None]:
    """Of an engine that was asked what is there, a no tells nothing."""
    try:
        yield
    except EngineRefusedError as error:
        raise EngineUnavailableError(str(error)) from error


def _tls(ca_file: Path, cert_file: Path | None, key_file: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ssl.SSLError) as error:
        raise FailedPreconditionError(
            f"the certificates for the container engine cannot be used: {error.strerror or error}",
            reason="TLS_FILES",
        ) from error
    return context

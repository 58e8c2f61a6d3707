"""`gpuscale-container-adapter`: starts and stops replicas as containers of one node."""

import asyncio
import sys
from contextlib import AsyncExitStack

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api
from gpuscale.autoscaler.adapters.engines.container.engine import open_container_engine
from gpuscale.autoscaler.adapters.engines.container.settings import ContainerAdapterSettings
from gpuscale.autoscaler.adapters.engines.container.starting import Shop
from gpuscale.autoscaler.adapters.program import asked_to_finish, open_engine_adapter
from gpuscale.common.config.program import run_program
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import environment

PROGRAM = "gpuscale-container-adapter"
DESCRIPTION = "Starts and stops replicas as containers of a Docker-compatible engine."
KIND = "container"

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(ContainerAdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: ContainerAdapterSettings, stop: asyncio.Event) -> None:
    """Drive the engine until `stop` is set; what runs goes on.

    Raises:
        GpuscaleError: the data directory, what stands in it, or a file of certificates cannot be used.
    """
    templates = settings.templates()
    with DirectoryLock(settings.data_dir):
        async with AsyncExitStack() as stack:
            autoscaler = await stack.enter_async_context(settings.open_channel(settings.autoscaler_address))
            agent = None
            if settings.agent_address:
                agent = await stack.enter_async_context(settings.open_channel(settings.agent_address))
            docker = await stack.enter_async_context(
                open_docker_api(
                    settings.engine,
                    settings.adapter,
                    ca_file=settings.engine_ca_file,
                    cert_file=settings.engine_cert_file,
                    key_file=settings.engine_key_file,
                )
            )
            shop = Shop(
                adapter=settings.adapter,
                templates=templates,
                environment=environment(),
                logs=settings.logs(),
                admission=Admission(agent, required=settings.require_admission),
            )
            finishing = await asked_to_finish(settings)
            engine = await stack.enter_async_context(open_container_engine(docker, shop, finishing))
            probes = any(one.health_check and one.health_check.command for one in templates.values())
            await stack.enter_async_context(
                open_engine_adapter(
                    settings,
                    engine,
                    kind=KIND,
                    templates=templates,
                    capabilities=api.AdapterCapabilities(picks_victims=True, drains=True, probes=probes),
                    autoscaler=autoscaler,
                    clock=SystemClock(),
                    node=settings.node,
                )
            )
            _log.info("running", adapter=settings.adapter, engine=settings.engine)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(main())

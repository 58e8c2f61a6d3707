"""`gpuscale-ecs-adapter`: replicas as tasks of Amazon ECS."""

import asyncio
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.ecs.settings import EcsAdapterSettings
from gpuscale.autoscaler.adapters.engines.ecs.tasks import TaskTemplate
from gpuscale.autoscaler.adapters.program import open_engine_adapter
from gpuscale.common.config.program import run_program
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger

PROGRAM = "gpuscale-ecs-adapter"
DESCRIPTION = "Starts and stops replicas as tasks of Amazon ECS."
KIND = "ecs"

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(EcsAdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: EcsAdapterSettings, stop: asyncio.Event) -> None:
    """Keep replicas until `stop` is set; their tasks go on after that.

    Raises:
        GpuscaleError: the data directory, or what stands in it, cannot be used, or boto3 is not installed or finds no region.
    """
    if find_spec("boto3") is None:
        raise FailedPreconditionError(
            "the library that calls ECS is missing: pip install 'gpuscale[ecs]'", reason="BOTO3_NOT_INSTALLED"
        )
    from gpuscale.autoscaler.adapters.engines.ecs.client import EcsCalls, open_client
    from gpuscale.autoscaler.adapters.engines.ecs.engine import EcsEngine

    client = await asyncio.to_thread(open_client, settings.region, settings.endpoint_url)
    templates = {name: table.template(name) for name, table in settings.ecs_templates.items()}
    calls = EcsCalls(client, settings.cluster)
    engine = EcsEngine(calls, settings.adapter, settings.cluster, templates, poll=settings.poll_seconds)
    with DirectoryLock(settings.data_dir):
        async with (
            settings.open_channel(settings.autoscaler_address) as autoscaler,
            open_engine_adapter(
                settings,
                engine,
                kind=KIND,
                templates=templates,
                capabilities=capabilities(templates.values()),
                autoscaler=autoscaler,
                clock=SystemClock(),
            ),
        ):
            _log.info("running", adapter=settings.adapter, autoscaler=settings.autoscaler_address)
            await stop.wait()


def capabilities(templates: Iterable[TaskTemplate]) -> api.AdapterCapabilities:
    """What holds for every template. A task has the time of its definition to end, and not its drain timeout."""
    checked = [template.has_health_check for template in templates]
    return api.AdapterCapabilities(
        gives_gpus=True, picks_victims=True, drains=False, probes=bool(checked) and all(checked)
    )


if __name__ == "__main__":
    sys.exit(main())

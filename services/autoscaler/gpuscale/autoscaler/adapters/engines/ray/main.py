"""`gpuscale-ray-adapter`: keeps replicas in a Ray cluster."""

import asyncio
import sys
from importlib.util import find_spec

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.ray.engine import RayDriver, RayEngine
from gpuscale.autoscaler.adapters.engines.ray.settings import RayAdapterSettings
from gpuscale.autoscaler.adapters.program import open_engine_adapter
from gpuscale.common.config.program import run_program
from gpuscale.common.errors import FailedPreconditionError
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import environment

PROGRAM = "gpuscale-ray-adapter"
DESCRIPTION = "Keeps replicas as actors in the placement groups of a Ray cluster."
KIND = "ray"
CAPABILITIES = api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True)

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(RayAdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: RayAdapterSettings, stop: asyncio.Event) -> None:
    """Keep replicas in Ray until `stop` is set; they go on.

    Raises:
        GpuscaleError: the data directory, or what stands in it, cannot be used, or Ray's library is not installed.
    """
    if find_spec("ray") is None:
        raise FailedPreconditionError(
            "Ray's library is not installed; install gpuscale[ray], in the cluster's version of Ray and Python",
            reason="RAY_MISSING",
        )
    driver = RayDriver(settings.address, settings.namespace, settings.adapter)
    engine = RayEngine(driver, settings.ray_templates, environment())
    with DirectoryLock(settings.data_dir):
        try:
            async with (
                settings.open_channel(settings.autoscaler_address) as autoscaler,
                open_engine_adapter(
                    settings,
                    engine,
                    kind=KIND,
                    templates=settings.ray_templates,
                    capabilities=CAPABILITIES,
                    autoscaler=autoscaler,
                    clock=SystemClock(),
                ),
            ):
                _log.info("running", adapter=settings.adapter, autoscaler=settings.autoscaler_address)
                await stop.wait()
        finally:
            await driver.close()


if __name__ == "__main__":
    sys.exit(main())

"""`gpuscale-slurm-adapter`: replicas as batch jobs of Slurm."""

import asyncio
import os
import sys

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.slurm.engine import HANDED_ON, Commands, SlurmEngine
from gpuscale.autoscaler.adapters.engines.slurm.settings import SlurmAdapterSettings
from gpuscale.autoscaler.adapters.program import open_engine_adapter
from gpuscale.common.config.program import run_program
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger
from gpuscale.common.secrets import environment

PROGRAM = "gpuscale-slurm-adapter"
DESCRIPTION = "Submits and cancels replicas as batch jobs of Slurm."
KIND = "slurm"

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(SlurmAdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: SlurmAdapterSettings, stop: asyncio.Event) -> None:
    """Keep replicas until `stop` is set; their jobs go on after that.

    Raises:
        GpuscaleError: the data directory, or what stands in it, cannot be used.
    """
    with DirectoryLock(settings.data_dir):
        async with (
            settings.open_channel(settings.autoscaler_address) as autoscaler,
            open_engine_adapter(
                settings,
                slurm_engine(settings),
                kind=KIND,
                templates=settings.slurm_templates,
                capabilities=api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True),
                autoscaler=autoscaler,
                clock=SystemClock(),
            ),
        ):
            _log.info("running", adapter=settings.adapter, autoscaler=settings.autoscaler_address)
            await stop.wait()


def slurm_engine(settings: SlurmAdapterSettings) -> SlurmEngine:
    """The engine that these settings describe, with the environment and the user of this process."""
    variables = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    if settings.slurm_conf:
        variables["SLURM_CONF"] = str(settings.slurm_conf)
    return SlurmEngine(
        Commands(settings.commands_dir, variables),
        settings.adapter,
        settings.templates(),
        user=os.geteuid(),
        python=settings.python or sys.executable,
        environment=environment(),
        poll=settings.poll_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())

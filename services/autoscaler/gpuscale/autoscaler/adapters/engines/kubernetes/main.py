"""`gpuscale-kubernetes-adapter`: replicas as pods of a Kubernetes cluster."""

import asyncio
import sys
from contextlib import AsyncExitStack

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.kubernetes.bare import AllocatorRanking, BarePods
from gpuscale.autoscaler.adapters.engines.kubernetes.cluster import open_cluster
from gpuscale.autoscaler.adapters.engines.kubernetes.engine import KubernetesEngine, check_templates
from gpuscale.autoscaler.adapters.engines.kubernetes.pods import Kind
from gpuscale.autoscaler.adapters.engines.kubernetes.settings import KubernetesAdapterSettings
from gpuscale.autoscaler.adapters.program import open_engine_adapter
from gpuscale.common.config.program import run_program
from gpuscale.common.runtime.clock import SystemClock
from gpuscale.common.runtime.lifecycle import DirectoryLock
from gpuscale.common.runtime.logs import get_logger

PROGRAM = "gpuscale-kubernetes-adapter"
DESCRIPTION = "Runs replicas as pods of a Kubernetes cluster."
KIND = "kubernetes"

_log = get_logger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit code."""
    return run_program(KubernetesAdapterSettings, serve, argv, program=PROGRAM, description=DESCRIPTION)


async def serve(settings: KubernetesAdapterSettings, stop: asyncio.Event) -> None:
    """Keep replicas until `stop` is set; their pods go on after that.

    Raises:
        GpuscaleError: the data directory, the cluster's credentials or a template cannot be used.
    """
    templates = settings.templates()
    with DirectoryLock(settings.data_dir):
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                open_cluster(
                    settings.kubeconfig,
                    settings.context,
                    settings.namespace,
                    adapter=settings.adapter,
                    gpu_resource=settings.gpu_resource,
                )
            )
            autoscaler = await stack.enter_async_context(settings.open_channel(settings.autoscaler_address))
            ranking = None
            if settings.allocator_address:
                allocator = await stack.enter_async_context(settings.open_channel(settings.allocator_address))
                ranking = AllocatorRanking(allocator)
            bare = BarePods(cluster, settings.adapter, settings.gpu_resource, ranking)
            workloads = await check_templates(cluster, templates, bare)
            clock = SystemClock()
            await stack.enter_async_context(
                open_engine_adapter(
                    settings,
                    KubernetesEngine(cluster, templates, bare, clock),
                    kind=KIND,
                    templates=templates,
                    capabilities=api.AdapterCapabilities(
                        gives_gpus=True,
                        picks_victims=all(one.kind is not Kind.STATEFUL_SET for one in templates.values()),
                        drains=True,
                        probes=bool(workloads) and all(one.probed for one in workloads.values()),
                    ),
                    autoscaler=autoscaler,
                    clock=clock,
                )
            )
            _log.info("running", adapter=settings.adapter, autoscaler=settings.autoscaler_address)
            await stop.wait()


if __name__ == "__main__":
    sys.exit(main())

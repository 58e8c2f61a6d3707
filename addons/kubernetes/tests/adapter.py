"""The Kubernetes adapter's crew at work on a cluster, real or not."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from gpuscale.autoscaler.adapters.crew import EngineCrew
from gpuscale.autoscaler.adapters.engine import Desired, ReplicaOrder
from gpuscale.autoscaler.adapters.journal import Journal
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaReport, ReplicaState
from gpuscale.common.runtime.tasks import Clock, SystemClock, TaskScope
from gpuscale_kubernetes.cluster import Cluster, open_cluster
from gpuscale_kubernetes.engine import KubernetesEngine, RankNodes
from gpuscale_kubernetes.pods import KubernetesTemplate
from tests.support.waiting import eventually

GPUS = "nvidia.com/gpu"
TEMPLATES = {
    "worker": KubernetesTemplate(deployment="worker", parameters={"queue": "tasks"}),
    "pod": KubernetesTemplate(pods_of="worker", args=("--queue", "{queue}")),
}


def name(replica: str) -> str:
    """Name of a replica of the one endpoint."""
    return f"endpoints/e/replicas/{replica}"


def desired(
    replica: str,
    goal: Goal = Goal.RUN,
    *,
    template: str = "worker",
    drain: float | None = None,
    **order: int,
) -> Desired:
    """What is wanted of it."""
    parameters = {"queue": "tasks"}
    asked = ReplicaOrder(name(replica), "endpoints/e", parameters, gpu_count=order.get("gpu_count", 1))
    return Desired(asked, goal, template, drain)


class Site:
    """A crew on a cluster."""

    def __init__(self, crew: EngineCrew, engine: KubernetesEngine, cluster: Cluster) -> None:
        self.crew = crew
        self.engine = engine
        self.cluster = cluster

    def want(self, replicas: Iterable[Desired]) -> None:
        """Tell it what should run."""
        self.crew.apply(replicas)

    def report(self, replica: str) -> ReplicaReport:
        """What it says of a replica."""
        return (self.crew.reports() or {}).get(name(replica), ReplicaReport(ReplicaState.UNKNOWN))

    async def state(self, replica: str, expected: ReplicaState) -> ReplicaReport:
        """Wait until it stands like this."""
        await eventually(lambda: self.report(replica).state is expected, timeout=60.0)
        return self.report(replica)


@asynccontextmanager
async def running(
    kubeconfig: Path,
    data: Path,
    *,
    adapter: str = "k1",
    clock: Clock | None = None,
    rank: RankNodes | None = None,
    namespace: str = "",
    templates: Mapping[str, KubernetesTemplate] = TEMPLATES,
) -> AsyncGenerator[Site]:
    """A crew at work, until the block ends as if it had been killed: what is in the cluster goes on."""
    clock = clock or SystemClock()
    async with open_cluster(kubeconfig, "", namespace, adapter=adapter, gpu_resource=GPUS) as cluster:
        engine = KubernetesEngine(cluster, templates, clock, rank)
        journal = Journal(data)
        crew = EngineCrew(engine, journal, journal.load(), clock, asyncio.Event())
        async with TaskScope() as tasks:
            tasks.spawn("crew", crew.run())
            yield Site(crew, engine, cluster)

"""Pods that the adapter makes itself, one for each replica, after the pod template of a Deployment.

Each pod can then prefer nodes of its own, and gets the time to finish that its endpoint allows. Pods are not restarted: the
autoscaler, which knows how often that happened, replaces a replica that ended.
"""

# lightkube writes `dict` where it means dict[str, str].
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import grpc
from lightkube.models.core_v1 import (
    Affinity,
    Container,
    EnvVar,
    NodeAffinity,
    NodeSelectorRequirement,
    NodeSelectorTerm,
    PodSpec,
    PreferredSchedulingTerm,
    ResourceRequirements,
)
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod as ClusterPod

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale.autoscaler.adapters.templates import PYTHON, check_after, fill_arguments
from gpuscale.common.errors import GpuscaleError
from gpuscale.common.rpc.status import rpc_errors
from gpuscale.common.runtime.logs import Attempts, get_logger
from gpuscale_kubernetes.pods import ADAPTER, ENDPOINT, REPLICA, KubernetesTemplate

MOST_NODES = 10
"""Nodes that a pod prefers, the best by far."""
HOW_LONG = 40
"""Characters of the Deployment's name in that of a pod."""


def make_pod(
    like: Deployment,
    name: str,
    template: KubernetesTemplate,
    order: ReplicaOrder,
    adapter: str,
    gpu_resource: str,
    nodes: tuple[str, ...],
) -> ClusterPod:
    """The pod of a replica: as the Deployment would make it, apart from what the replica needs.

    Raises:
        LaunchRefusedError: the Deployment has no container, a value is unusable, or it would be run as a script.
    """
    spec, meta = like.spec.template.spec, like.spec.template.metadata or ObjectMeta()
    if spec is None or not spec.containers:
        raise LaunchRefusedError(f"Deployment {template.workload} has no container")
    _, endpoint, _, _ = order.replica.split("/")
    _fit(spec.containers[0], name, template, order, gpu_resource)
    spec.restartPolicy = "Never"
    _prefer(spec, nodes)
    return ClusterPod(
        metadata=ObjectMeta(
            name=pod_name(template.workload, adapter, order.replica),
            labels={**(meta.labels or {}), ADAPTER: adapter, ENDPOINT: endpoint},
            annotations={**(meta.annotations or {}), REPLICA: order.replica},
        ),
        spec=spec,
    )


def pod_name(deployment: str, adapter: str, replica: str) -> str:
    """The name of a replica's pod: always the same, so that it is made once."""
    digest = hashlib.sha256(f"{adapter}\n{replica}".encode()).hexdigest()
    return f"{deployment[:HOW_LONG].rstrip('-.')}-{digest[:16]}"


def _fit(
    container: Container, name: str, template: KubernetesTemplate, order: ReplicaOrder, gpu_resource: str
) -> None:
    """Give the container of a pod the arguments, variables and GPUs of a replica."""
    if template.args or order.parameters:
        try:
            check_after(container.command or (), template.args)
        except ValueError as error:
            why = f"args of template {name}: after the Deployment's command, {error}"
            raise LaunchRefusedError(why) from error
        container.args = list(fill_arguments(name, template.args, order, PYTHON))
    own = [EnvVar(variable, value=value) for variable, value in order.variables().items()]
    kept = [variable for variable in container.env or () if not variable.name.startswith("GPUSCALE_")]
    container.env = [*kept, *own]
    resources = container.resources or ResourceRequirements()
    resources.limits = _with_gpus(resources.limits, gpu_resource, order.gpu_count)
    resources.requests = _with_gpus(resources.requests, gpu_resource, order.gpu_count)
    container.resources = resources


def _with_gpus(amounts: Mapping[str, str] | None, resource: str, count: int) -> dict[str, str]:
    others = {name: amount for name, amount in (amounts or {}).items() if name != resource}
    return {**others, resource: str(count)} if count else others


def _prefer(spec: PodSpec, nodes: tuple[str, ...]) -> None:
    """Prefer these nodes, the first most; if none has room, the cluster's scheduler takes another."""
    wishes = [
        PreferredSchedulingTerm(
            preference=NodeSelectorTerm(
                matchFields=[NodeSelectorRequirement("metadata.name", "In", values=[node])]
            ),
            weight=100 - 10 * place,
        )
        for place, node in enumerate(nodes[:MOST_NODES])
    ]
    if not wishes:
        return
    affinity = spec.affinity = spec.affinity or Affinity()
    by_node = affinity.nodeAffinity = affinity.nodeAffinity or NodeAffinity()
    wishes += by_node.preferredDuringSchedulingIgnoredDuringExecution or ()
    by_node.preferredDuringSchedulingIgnoredDuringExecution = wishes


TIMEOUT = 3.0
"""Seconds that the ranking may take; without it, the cluster's scheduler places the pod alone."""
SILENCE = 15.0
"""Seconds before an allocator that did not answer is asked again, so that many pods do not wait for it one by one."""

_log = get_logger(__name__)


class AllocatorRanking:
    """Ranks nodes by what the fleet measures. Ids of nodes are the names of the cluster's nodes."""

    def __init__(self, allocator: grpc.aio.Channel) -> None:
        self._stub = allocator_api.CapacityServiceStub(allocator)
        self._asking = Attempts(_log, "no ranking of nodes; the cluster's scheduler decides", GpuscaleError)
        self._again = 0.0

    async def best(self, gpu_count: int) -> tuple[str, ...]:
        """Names of nodes with so many idle GPUs, best first; none without telemetry."""
        now = asyncio.get_running_loop().time()
        if now < self._again:
            return ()
        request = allocator_api.RankNodesRequest(gpu_count=gpu_count)
        with self._asking, rpc_errors():
            found = (await self._stub.RankNodes(request, timeout=TIMEOUT)).nodes
            wide = [node for node in found if node.sufficient and not node.fallback]
            return tuple(node.name.removeprefix("nodes/") for node in wide)
        self._again = now + SILENCE
        return ()

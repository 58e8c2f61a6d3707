"""What a template of the Kubernetes adapter says of its replicas, and why an order may be of no use. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpuscale.autoscaler.adapters.engines.kubernetes.pods import Kind, Workload
from gpuscale.autoscaler.adapters.templates import Placeholder, ReplicaOrder


@dataclass(frozen=True, slots=True)
class KubernetesTemplate:
    """A template.

    Attributes:
        name: what endpoints know it by.
        kind: what makes its pods.
        workload: name of the Deployment or StatefulSet.
        parameters: what the workload's pods were made for.
        arguments: of the first container of pods that the adapter makes; empty for those of the Deployment.
        rank_nodes: whether such pods should prefer the nodes that the allocator ranks best.
    """

    name: str
    kind: Kind
    workload: str
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    arguments: tuple[tuple[str | Placeholder, ...], ...] = ()
    rank_nodes: bool = False


def why_not(template: KubernetesTemplate, workload: Workload, order: ReplicaOrder) -> str:
    """Why this order can never be filled; empty where it can.

    The pods of a Deployment are as the operator made them: an endpoint that asks for something else must not get them.
    """
    if workload.problem:
        return workload.problem
    if template.kind is Kind.PODS:
        return ""
    for name in sorted({*template.parameters, *order.parameters}):
        made_for, asked = template.parameters.get(name), order.parameters.get(name)
        if made_for != asked:
            return (
                f"{template.kind.value} {workload.name} is made for {_said(name, made_for)},"
                f" and the endpoint asks for {_said(name, asked)}"
            )
    if order.gpu_count != workload.gpu_count:
        return (
            f"a pod of {template.kind.value} {workload.name} has {workload.gpu_count} GPUs,"
            f" and the endpoint asks for {order.gpu_count}"
        )
    return ""


def _said(name: str, value: str | None) -> str:
    return f"no {name}" if value is None else f"{name} {value!r}"

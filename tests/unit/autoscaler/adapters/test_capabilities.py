"""Every engine tells the workers of a capability set what they are to have."""

from collections.abc import Callable, Mapping

import pytest
from lightkube.models.apps_v1 import DeploymentSpec
from lightkube.models.core_v1 import Container, PodSpec, PodTemplateSpec
from lightkube.models.meta_v1 import LabelSelector
from lightkube.resources.apps_v1 import Deployment

from gpuscale.autoscaler.adapters.engine import ReplicaOrder
from gpuscale.autoscaler.adapters.engines.container.containers import ContainerTemplate, container_request
from gpuscale.autoscaler.adapters.templates import CommandTemplate, launch
from gpuscale_ecs.tasks import TaskTemplate, run_request
from gpuscale_kubernetes.bare import make_pod
from gpuscale_kubernetes.pods import KubernetesTemplate
from gpuscale_ray.engine import RayTemplate, ray_launch
from gpuscale_slurm.jobs import JobTemplate, submission

COMMAND = ("/bin/worker",)


def process(order: ReplicaOrder) -> Mapping[str, str]:
    return launch("w", CommandTemplate(command=COMMAND), order, "python", {}).env


def container(order: ReplicaOrder) -> Mapping[str, str]:
    found = container_request("a", "w", ContainerTemplate(image="w:1"), order, {}, 4096)["Env"]
    assert isinstance(found, list)
    return dict(str(one).split("=", 1) for one in found)


def slurm(order: ReplicaOrder) -> Mapping[str, str]:
    return submission("w", JobTemplate(command=COMMAND), order, "a", "python", {}).environment


def ray(order: ReplicaOrder) -> Mapping[str, str]:
    return ray_launch("w", {"w": RayTemplate(command=COMMAND)}, order, {}).env


def ecs(order: ReplicaOrder) -> Mapping[str, str]:
    request = run_request("w", TaskTemplate(task_definition="w", container="main"), order, "a", "c")
    [override] = request["overrides"]["containerOverrides"]
    return {one["name"]: one["value"] for one in override["environment"]}


def kubernetes(order: ReplicaOrder) -> Mapping[str, str]:
    template = PodTemplateSpec(spec=PodSpec(containers=[Container("worker")]))
    like = Deployment(spec=DeploymentSpec(selector=LabelSelector(), template=template))
    pod = make_pod(like, "w", KubernetesTemplate(pods_of="w"), order, "a", "nvidia.com/gpu", ())
    assert pod.spec
    return {one.name: one.value or "" for one in pod.spec.containers[0].env or ()}


@pytest.mark.parametrize("engine", [process, container, slurm, ray, ecs, kubernetes])
def test_workers_are_told_the_capabilities_of_their_set(
    engine: Callable[[ReplicaOrder], Mapping[str, str]],
) -> None:
    plain = ReplicaOrder("endpoints/e/replicas/r", "endpoints/e", {})
    able = ReplicaOrder(
        "endpoints/e/replicas/r", "endpoints/e", {}, capabilities={"high_memory": -1, "gpu": 2}
    )
    assert engine(able)["GPUSCALE_CAPABILITIES"] == "gpu=2,high_memory"
    assert "GPUSCALE_CAPABILITIES" not in engine(plain)
    assert engine(plain)["GPUSCALE_REPLICA"] == plain.replica

"""Templates of the Kubernetes adapter: what a file may say, and what of the cluster's answers is made of it."""

import pytest
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.apps_v1 import Deployment
from pydantic import ValidationError

from gpuscale.autoscaler.adapters.engine import LaunchRefusedError, ReplicaOrder
from gpuscale_kubernetes.bare import make_pod, pod_name
from gpuscale_kubernetes.cluster import owner_of
from gpuscale_kubernetes.engine import KubernetesSettings
from gpuscale_kubernetes.pods import (
    KubernetesTemplate,
    PodWorkload,
    check_order,
)

DEPLOYMENT = KubernetesTemplate(deployment="worker", parameters={"queue": "tasks"})
WORKLOAD = PodWorkload("worker", gpu_count=2)


def order(gpu_count: int = 2, **parameters: str) -> ReplicaOrder:
    return ReplicaOrder("endpoints/e/replicas/r", "endpoints/e", parameters, gpu_count=gpu_count)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({}, "set one of"),
        ({"deployment": "a", "pods_of": "a"}, "set one of"),
        ({"deployment": "a", "args": ["{queue}"]}, "args needs pods_of"),
        ({"pods_of": "a", "parameters": {"queue": "q"}}, "fill the placeholders"),
        ({"pods_of": "a", "args": ["{"]}, "unmatched brace"),
        ({"deployment": "a", "image": "evil"}, "Extra inputs"),
    ],
)
def test_a_template_that_makes_no_sense_is_refused(table: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        KubernetesSettings.model_validate({"data_dir": "/d", "kubernetes_templates": {"t": table}})


def test_a_deployment_has_one_template() -> None:
    two = {"a": {"deployment": "worker"}, "b": {"deployment": "worker"}}
    with pytest.raises(ValidationError, match="Deployment worker is already that of a"):
        KubernetesSettings.model_validate({"data_dir": "/d", "kubernetes_templates": two})
    shared = {"a": {"pods_of": "worker"}, "b": {"pods_of": "worker"}}
    KubernetesSettings.model_validate({"data_dir": "/d", "kubernetes_templates": shared})


def test_a_value_never_becomes_a_part_of_the_deployments_own_script() -> None:
    """The command is the Deployment's, and only `args` the template's: a shell may wait for them."""
    template = KubernetesTemplate(pods_of="worker", args=("{queue}",))

    def args_after(*command: str) -> list[str]:
        like = Deployment.from_dict(
            {
                "spec": {
                    "selector": {},
                    "template": {"spec": {"containers": [{"name": "w", "command": list(command)}]}},
                }
            }
        )
        pod = make_pod(like, "t", template, order(0, queue="a;b"), "adapter", "nvidia.com/gpu", ())
        assert pod.spec is not None
        return pod.spec.containers[0].args or []

    assert args_after("/bin/work") == args_after("/bin/sh", "-c", "work ${1}", "sh") == ["a;b"]
    with pytest.raises(LaunchRefusedError, match=r"args of template t: .*\{queue\} within a script"):
        args_after("/bin/sh", "-ec")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (order(queue="other"), "made for queue 'tasks', and the endpoint asks for queue 'other'"),
        (order(), "made for queue 'tasks', and the endpoint asks for no queue"),
        (order(queue="tasks", model="m"), "made for no model, and the endpoint asks for model 'm'"),
        (order(1, queue="tasks"), "has 2 GPUs, and the endpoint asks for 1"),
    ],
)
def test_an_order_that_the_deployment_is_not_made_for_says_so(asked: ReplicaOrder, expected: str) -> None:
    check_order(DEPLOYMENT, WORKLOAD, order(queue="tasks"))
    with pytest.raises(LaunchRefusedError, match=f"{expected}$"):
        check_order(DEPLOYMENT, WORKLOAD, asked)


@pytest.mark.parametrize(
    ("kind", "owner", "labels", "expected"),
    [
        ("ReplicaSet", "worker-abc", {"pod-template-hash": "abc"}, "worker"),
        ("ReplicaSet", "worker-abc", {"pod-template-hash": "def"}, None),
        ("ReplicaSet", "worker-abc", {}, None),
        ("Job", "worker", {}, None),
    ],
)
def test_whose_a_pod_is(kind: str, owner: str, labels: dict[str, str], expected: str | None) -> None:
    meta = ObjectMeta(
        labels=labels, ownerReferences=[OwnerReference("apps/v1", kind, owner, uid="u", controller=True)]
    )
    assert owner_of(meta) == expected
    assert owner_of(ObjectMeta(labels=labels)) == ""


def test_a_pod_has_one_name_that_no_other_adapter_gives_it() -> None:
    replica = "endpoints/e/replicas/r"
    assert pod_name("worker", "k1", replica) == pod_name("worker", "k1", replica)
    assert len({pod_name("worker", one, f"{replica}{two}") for one in ("k1", "k2") for two in "ab"}) == 4
    assert len(pod_name("d" * 200, "k1", replica)) <= 63

"""What the cluster denies is said with its own words, and holds up nothing else."""

from pathlib import Path

import pytest

from addons.kubernetes.tests import adapter as pods
from addons.kubernetes.tests.fake_cluster import deployment
from addons.kubernetes.tests.fake_cluster import serving as cluster_double
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale_kubernetes.pods import KubernetesTemplate
from tests.support.waiting import eventually


async def test_a_deployment_that_may_not_be_scaled_says_so_and_the_other_one_is(tmp_path: Path) -> None:
    templates = {
        name: KubernetesTemplate(deployment=name, parameters={"queue": "tasks"})
        for name in ("denied", "worker")
    }
    async with cluster_double() as fake:
        for name in templates:
            fake.add(deployment(name))
        why = 'admission webhook "policy" denied the request'
        fake.fail = lambda method, path: (400, why) if path == "/deployments/denied/scale" else None
        config = fake.kubeconfig(tmp_path)
        async with pods.running(config, tmp_path / "data", templates=templates) as site:
            site.want([pods.desired("a", template="denied"), pods.desired("b")])
            await eventually(lambda: fake.deployments["worker"]["spec"]["replicas"] == 1)
            fake.run(next(iter(fake.pods)))
            await site.state("b", ReplicaState.READY)
            await eventually(lambda: why in site.report("a").reason, timeout=60)
            assert site.report("a").state is ReplicaState.STARTING
            fake.fail = lambda method, path: None
            await eventually(lambda: fake.deployments["denied"]["spec"]["replicas"] == 1, timeout=60)


@pytest.mark.parametrize("status", [400, 403, 422])
async def test_a_pod_that_the_cluster_denies_is_a_failure_with_the_reason(
    tmp_path: Path, status: int
) -> None:
    why = 'admission webhook "policy" denied the request'
    async with cluster_double() as fake:
        fake.add(deployment())
        fake.fail = lambda method, path: (status, why) if (method, path) == ("POST", "/pods") else None
        async with pods.running(fake.kubeconfig(tmp_path), tmp_path / "data") as site:
            site.want([pods.desired("a", template="pod")])
            report = await site.state("a", ReplicaState.FAILED)
            assert report.reason == f"the cluster refuses its pod: {why}"

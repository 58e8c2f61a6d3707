"""The same endpoint on one engine and then on another: one field of its file says where."""

import asyncio

import pytest

from addons.kubernetes.tests.fake_cluster import FakeKubernetes, deployment
from addons.kubernetes.tests.fake_cluster import serving as cluster_double
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings
from gpuscale.autoscaler.adapters.engines.process.engine import ProcessSettings
from gpuscale.autoscaler.adapters.settings import EngineSettings
from gpuscale.autoscaler.domain.validate import violations as contradictions
from gpuscale.autoscaler.wire.specs import spec_from_wire
from gpuscale.cli.manifests import parse
from gpuscale.common.config.sources import load_table, read_config
from gpuscale.common.rpc.validation import violations
from gpuscale_ecs.engine import EcsSettings
from gpuscale_kubernetes.engine import KubernetesSettings
from gpuscale_ray.engine import RaySettings
from gpuscale_slurm.engine import SlurmSettings
from tests.support.moving import CONFIG, ROOT, containers, journey, pods

ENGINES: list[type[EngineSettings]] = [
    ProcessSettings,
    ContainerSettings,
    EcsSettings,
    KubernetesSettings,
    RaySettings,
    SlurmSettings,
]


@pytest.fixture
def wanted() -> api.Endpoint:
    """The endpoint of the example."""
    watcher, endpoint = parse((ROOT / "examples" / "anywhere.yaml").read_text(), "anywhere.yaml")
    assert isinstance(watcher, api.QueueWatcher)
    assert isinstance(endpoint, api.Endpoint)
    assert violations(watcher) == []
    return endpoint


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.section)
def test_each_engine_of_the_example_has_its_template_and_is_a_place_for_it(
    engine: type[EngineSettings], wanted: api.Endpoint
) -> None:
    settings = load_table(engine, read_config(CONFIG), environ={})
    assert settings.template_names == [wanted.spec.template.template]
    wanted.spec.template.adapter = f"adapters/{settings.adapter_id}"
    assert violations(wanted) == []
    assert contradictions(spec_from_wire(wanted.spec)) == []


class Kubelet:
    """Runs the pods of the double in memory, and ends those that are to be deleted."""

    def __init__(self, cluster: FakeKubernetes) -> None:
        self._cluster = cluster

    async def run(self) -> None:
        while True:
            for name, pod in list(self._cluster.pods.items()):
                if name in self._cluster.going():
                    self._cluster.end(name)
                elif pod["status"]["phase"] == "Pending":
                    self._cluster.run(name)
            await asyncio.sleep(0.05)


async def test_it_moves_by_one_field(tmp_path_factory: pytest.TempPathFactory) -> None:
    """From processes to containers, to pods of a cluster and back: never fewer READY than wanted."""
    folder = tmp_path_factory.mktemp("m")  # a short name, since sockets are below it
    labels = {"app": "worker", "gpuscale.adapter": "kubernetes"}
    async with (
        journey(folder) as one,
        containers(one, folder) as engine,
        cluster_double() as cluster,
        asyncio.TaskGroup() as group,
    ):
        cluster.add(deployment("worker", 0, **labels))
        kubelet = group.create_task(Kubelet(cluster).run())
        async with pods(one, folder, cluster.kubeconfig(folder)):
            await one.move("adapters/containers")
            await one.holds(1)
            await one.move("adapters/kubernetes")
            await one.holds(0)  # the cluster gives out its GPUs itself
            assert [pod["metadata"]["annotations"]["gpuscale.replica"] for pod in cluster.pods.values()] == [
                found.name for found in await one.replicas()
            ]
            assert engine.count("/kill") == 1
            assert engine.containers == {}
            await one.move("adapters/host")
            assert cluster.deployments["worker"]["spec"]["replicas"] == 0
            await one.holds(1)
            assert one.fewest == 1
        kubelet.cancel()

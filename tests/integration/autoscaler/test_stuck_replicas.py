"""A replica whose steps fail, again and again, holds up no other on its engine; nor in their crew (adapters/test_crew.py)."""

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from addons.kubernetes.tests import adapter as pods
from addons.kubernetes.tests.fake_cluster import deployment
from addons.kubernetes.tests.fake_cluster import serving as cluster_double
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import (
    Finish,
    Kill,
    ReplicaOrder,
    Sighting,
    Start,
    StepsFailedError,
    WorkerLife,
)
from gpuscale.autoscaler.adapters.engines.container import docker_api
from gpuscale.autoscaler.adapters.engines.container.containers import STARTING, UNTOLD, container_name
from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api
from gpuscale.autoscaler.adapters.engines.container.engine import (
    ContainerEngine,
    ContainerSettings,
    open_container_engine,
)
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale_kubernetes.pods import KubernetesTemplate
from tests.support.docker_double import DockerDouble
from tests.support.waiting import eventually

ONE, TWO, THREE = (f"endpoints/e/replicas/{name}" for name in ("one", "two", "three"))
ORDER = ReplicaOrder(ONE, "endpoints/e", {})


@pytest.fixture
async def docker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[DockerDouble, ContainerEngine]]:
    """Two containers that run, on an engine that is waited for a moment only."""
    double = DockerDouble()
    socket = tmp_path / "docker.sock"
    told = {"allowed_images": ["*"], "container_templates": {"worker": {"image": "worker:1"}}}
    settings = ContainerSettings.model_validate({"adapter": "here", "data_dir": "d", **told})
    address = f"unix://{socket}"
    async with (
        double.served(socket),
        open_docker_api(address, "here", ca_file=None, cert_file=None, key_file=None) as api,
        open_container_engine(settings, Admission(None, required=False), api) as engine,
    ):
        await engine.apply([Start(ORDER, "worker"), Start(replace(ORDER, replica=TWO), "worker")])
        assert set((await engine.observe()).values()) == {Sighting(WorkerLife.READY, pid=4711)}
        monkeypatch.setattr(docker_api, "ONE_TIMEOUT", 3.0)
        yield double, engine


async def test_a_container_that_cannot_be_killed(docker: tuple[DockerDouble, ContainerEngine]) -> None:
    double, engine = docker
    double.stuck.add(container_name("here", ONE))
    with pytest.raises(StepsFailedError, match="exit event") as caught:
        await engine.apply([Kill(ONE), Kill(TWO), Start(replace(ORDER, replica=THREE), "none")])
    assert set(caught.value.failed) == {ONE}
    assert caught.value.refused == {THREE: "this adapter has no template none"}
    seen = await engine.observe()
    assert seen[ONE].life is WorkerLife.READY
    assert seen[TWO].life is WorkerLife.ENDED


async def test_a_container_that_hangs_is_alone_with_that(
    docker: tuple[DockerDouble, ContainerEngine],
) -> None:
    """Neither a look at it nor a signal to it is answered; the rest is known, and is ended when it should be."""
    double, engine = docker
    hung = container_name("here", ONE)
    double.hung.add(hung)
    for name in (hung, container_name("here", TWO)):
        own = double.named(name)
        assert own is not None
        double.change(own, "running", health="starting")
    for _ in range(2):
        seen = await engine.observe()
        assert (seen[ONE].life, seen[ONE].reason) == (WorkerLife.STARTING, UNTOLD)
        assert seen[TWO].life is WorkerLife.STARTING
    with pytest.raises(StepsFailedError) as caught:
        await engine.apply([Finish(ONE), Kill(TWO)])
    assert set(caught.value.failed) == {ONE}
    double.hung.clear()
    seen = await engine.observe()
    assert (seen[ONE].reason, seen[TWO].life) == (STARTING, WorkerLife.ENDED)


async def test_a_container_that_was_given_up_is_killed_until_it_has_ended(
    docker: tuple[DockerDouble, ContainerEngine],
) -> None:
    double, engine = docker
    name = container_name("here", ONE)
    own = double.named(name)
    assert own is not None
    double.stuck.add(name)
    double.change(own, "running", health="unhealthy")
    for _ in range(2):
        assert (await engine.observe())[TWO].life is WorkerLife.READY
    double.hung.add(name)  # it does not even say no
    assert (await engine.observe())[TWO].life is WorkerLife.READY
    double.hung.clear()
    double.stuck.clear()
    own.health = ""
    await engine.observe()
    assert own.signals == ["SIGKILL"]
    assert (await engine.observe())[ONE].reason == "its health check failed too often"


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

"""The Kubernetes adapter against an API server in memory: scale, conflicts, silence, adoption, other people's changes."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from addons.kubernetes.tests.adapter import TEMPLATES, Site, desired, name, running
from addons.kubernetes.tests.fake_cluster import ADAPTER, FakeKubernetes, deployment, serving
from gpuscale.autoscaler.adapters.engine import EngineUnavailableError
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaState
from gpuscale.common.errors import FailedPreconditionError
from gpuscale_kubernetes.bare import pod_name
from gpuscale_kubernetes.engine import check_templates
from gpuscale_kubernetes.pods import CORRECT_AFTER
from tests.support.clock import ManualClock
from tests.support.waiting import eventually

READY, STARTING, DRAINING = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.DRAINING
STOPPED, FAILED = ReplicaState.STOPPED, ReplicaState.FAILED


@pytest.fixture
async def fake() -> AsyncGenerator[FakeKubernetes]:
    async with serving() as one:
        yield one


@pytest.fixture
def config(fake: FakeKubernetes, tmp_path: Path) -> Path:
    return fake.kubeconfig(tmp_path)


@pytest.fixture
async def site(fake: FakeKubernetes, config: Path, tmp_path: Path) -> AsyncGenerator[Site]:
    """The adapter at work on a cluster with one Deployment."""
    fake.add(deployment())
    async with running(config, tmp_path / "data") as one:
        yield one


def wanted(fake: FakeKubernetes) -> int:
    """How many pods the Deployment is asked for."""
    replicas = fake.deployments["worker"]["spec"]["replicas"]
    assert isinstance(replicas, int)
    return replicas


async def looked_again(fake: FakeKubernetes) -> None:
    """Wait until the adapter has read the Deployment twice more: once after whatever was under way."""
    before = fake.calls["GET /deployments/worker"]

    def seen() -> bool:
        fake.stir()
        return fake.calls["GET /deployments/worker"] >= before + 5  # two templates are of that Deployment

    await eventually(seen, timeout=60.0)


async def test_up_from_one_to_three_and_down_to_the_one_that_was_asked_to_stay(
    fake: FakeKubernetes, site: Site
) -> None:
    site.want([desired("a")])
    await site.state("a", STARTING)
    await eventually(lambda: len(fake.pods) == 1)
    fake.run(next(iter(fake.pods)))
    await site.state("a", READY)
    site.want([desired(one) for one in "abc"])
    await eventually(lambda: len(fake.pods) == 3)
    for pod in list(fake.pods):
        fake.run(pod)
    for one in "abc":
        await site.state(one, READY)
    kept = fake.pod_of(name("a"))
    site.want([desired("a"), desired("b", Goal.STOP, drain=20), desired("c", Goal.STOP, drain=20)])
    await eventually(lambda: len(fake.going()) == 2)
    assert kept not in fake.going(), "of two that are alike this cluster ends the older one, but for the cost"
    await site.state("b", DRAINING)
    for pod in fake.going():
        fake.end(pod)
    for one in "bc":
        assert (await site.state(one, STOPPED)).reason == ""
    assert site.report("a").state is READY
    site.want([desired("a"), desired("b", Goal.FORGET), desired("c", Goal.FORGET)])
    await eventually(lambda: set(site.crew.reports() or {}) == {name("a")})
    assert wanted(fake) == 1
    assert {fake.pods[one]["metadata"]["labels"]["gpuscale.endpoint"] for one in fake.pods} == {"e"}
    assert all("resourceVersion" in body["metadata"] for kind, body in fake.bodies if kind == "scale")


async def test_a_change_by_somebody_else_in_between_is_looked_at_again_and_not_forced(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    """The HPA raised it to 2 right before: its pods are used, and nothing is written over it."""
    fake.add(deployment())
    fake.before_scale = lambda: fake.rescale("worker", 2)
    async with running(config, tmp_path / "data") as site:
        site.want([desired(one) for one in "abc"])
        await eventually(lambda: len(fake.pods) == 3)
        await site.state("c", STARTING)
    assert wanted(fake) == 3
    assert [body["spec"]["replicas"] for kind, body in fake.bodies if kind == "scale"] == [3, 3]


async def test_a_start_that_was_cut_short_between_the_scale_and_the_mark_is_not_made_twice(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    """The adapter died right after it had asked for the pod; the pod is nobody's when the next run begins."""
    fake.add(deployment())
    fake.frozen = True
    async with running(config, tmp_path / "data") as site:
        site.want([desired("a")])
        await eventually(lambda: wanted(fake) == 1)
    fake.frozen = False
    fake.control()
    async with running(config, tmp_path / "data") as site:
        site.want([desired("a")])
        await eventually(lambda: [fake.replica(one) for one in fake.pods] == [name("a")])
    assert wanted(fake) == 1


async def test_a_cluster_that_is_silent_is_not_one_without_pods(fake: FakeKubernetes, site: Site) -> None:
    fake.fail = lambda method, path: (500, "etcd has no leader") if path == "/pods" else None
    with pytest.raises(EngineUnavailableError, match="refuses to list pods: etcd has no leader"):
        await site.engine.observe()
    fake.fail = lambda method, path: (503, "apiserver is shutting down")
    assert await check_templates(site.cluster, TEMPLATES) == {}, "they are checked later"


async def test_why_a_pod_is_not_ready_is_told(fake: FakeKubernetes, site: Site) -> None:
    site.want([desired(one) for one in "abc"])
    await eventually(lambda: len([one for one in fake.pods if fake.replica(one)]) == 3)
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "no GPU",
    }
    fake.status(fake.pod_of(name("a")), {"phase": "Pending", "conditions": [unscheduled]})
    crash = {
        "name": "worker",
        "image": "i",
        "imageID": "",
        "ready": False,
        "restartCount": 4,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
    }
    fake.status(fake.pod_of(name("b")), {"phase": "Running", "containerStatuses": [crash]})
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "the node was low on memory"}
    fake.status(fake.pod_of(name("c")), evicted)
    fake.control()
    await eventually(lambda: site.report("a").reason == "Unschedulable: no GPU", timeout=30.0)
    why = "container worker: CrashLoopBackOff: back-off 40s"
    await eventually(lambda: site.report("b").reason == why, timeout=30.0)
    assert (await site.state("c", FAILED)).reason == "Evicted: the node was low on memory"
    assert site.report("a").state is STARTING
    # Its Deployment made another pod already; the replacement that the autoscaler asks for takes it.
    site.want([desired("a"), desired("b"), desired("c", Goal.FORGET), desired("d")])
    await site.state("d", STARTING)
    await eventually(lambda: name("d") in map(fake.replica, fake.pods))
    assert wanted(fake) == 3


async def test_another_pod_than_the_one_asked_to_finish_is_ended_and_the_right_replica_stops(
    fake: FakeKubernetes, site: Site
) -> None:
    """A ReplicaSet ends pods that are not ready first, whatever their cost: that replica goes on in the pod that was left."""
    site.want([desired(one) for one in "ab"])
    await eventually(lambda: len([one for one in fake.pods if fake.replica(one)]) == 2)
    kept = fake.pod_of(name("a"))
    fake.run(kept)
    await site.state("a", READY)
    site.want([desired("a", Goal.STOP, drain=20), desired("b")])
    await eventually(lambda: len(fake.going()) == 1)
    (struck,) = fake.going()
    assert struck != kept
    await site.state("b", READY)
    fake.end(struck)
    await site.state("a", STOPPED)
    assert fake.replica(kept) == name("b")
    assert "gpuscale.stopping" not in fake.pods[kept]["metadata"]["annotations"]


async def test_a_pod_without_a_node_that_is_ended_instead_is_gone_at_once_and_its_replica_goes_on(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    fake.add(deployment())
    fake.instant = True
    async with running(config, tmp_path / "data") as site:
        site.want([desired(one) for one in "ab"])
        await eventually(lambda: len([one for one in fake.pods if fake.replica(one)]) == 2)
        kept = fake.pod_of(name("a"))
        fake.run(kept)
        await site.state("a", READY)
        site.want([desired("a", Goal.STOP, drain=20), desired("b")])
        await site.state("a", STOPPED)
        await site.state("b", READY)
    assert list(fake.pods) == [kept]
    assert (fake.replica(kept), wanted(fake)) == (name("b"), 1)


async def test_pods_that_somebody_else_asked_for_are_told_of_and_put_right_after_a_while(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    clock = ManualClock()
    fake.add(deployment())
    async with running(config, tmp_path / "data", clock=clock) as site:
        site.want([desired("a")])
        await eventually(lambda: len(fake.pods) == 1)
        fake.run(next(iter(fake.pods)))
        await site.state("a", READY)
        before = fake.calls["PATCH /deployments/worker/scale"]
        fake.rescale("worker", 3)
        await looked_again(fake)
        await eventually(lambda: "scaled by somebody else: 2" in site.report("a").reason, timeout=30.0)
        assert fake.calls["PATCH /deployments/worker/scale"] == before
        clock.advance(CORRECT_AFTER + 1)
        for pod in fake.pods:
            fake.run(pod)
        await eventually(lambda: wanted(fake) == 1, timeout=30.0)
        assert fake.pod_of(name("a")) not in fake.going()
    assert fake.calls["PATCH /deployments/worker/scale"] == before + 1


async def test_what_the_deployment_is_not_made_for_is_refused(fake: FakeKubernetes, site: Site) -> None:
    site.want([desired("a", gpu_count=2)])
    assert "has 1 GPU, and the endpoint asks for 2" in (await site.state("a", FAILED)).reason
    del fake.deployments["worker"]
    await looked_again(fake)
    site.want([desired("c")])
    assert (await site.state("c", FAILED)).reason == "there is no Deployment worker in namespace work"
    fake.add(deployment(app="worker"))
    await looked_again(fake)
    site.want([desired("d")])
    assert "lacks the label gpuscale.adapter=k1" in (await site.state("d", FAILED)).reason
    assert not [kind for kind, _ in fake.bodies if kind == "scale"]


async def test_pods_of_others_are_never_touched(fake: FakeKubernetes, config: Path, tmp_path: Path) -> None:
    """A pod with our label that another Deployment made, and one without it, go on as they are."""
    fake.add(deployment("other", 1))
    next(iter(fake.pods.values()))["metadata"]["annotations"] = {"gpuscale.replica": "what ever"}
    fake.add(deployment("plain", 1, app="plain"))
    fake.add(deployment())
    async with running(config, tmp_path / "data") as site:
        site.want([desired("a")])
        await eventually(lambda: len([one for one in fake.pods if fake.replica(one)]) == 1)
        await site.state("a", STARTING)
        assert set(site.crew.reports() or {}) == {name("a")}
    assert fake.replica(next(one for one in fake.pods if one.startswith("other"))) == "what ever"
    assert not [call for call in fake.calls if call.startswith("PATCH") and "worker" not in call]


async def test_a_pod_of_its_own_prefers_the_best_nodes_and_gets_its_values(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    class Ranking:
        async def best(self, gpu_count: int) -> tuple[str, ...]:
            return ("n2", "n1")

    fake.add(deployment())
    async with running(config, tmp_path / "data", rank=Ranking().best) as site:
        site.want([desired("a", template="pod", gpu_count=2)])
        own = pod_name("worker", ADAPTER, name("a"))
        await eventually(lambda: own in fake.pods)
        fake.run(own)
        await site.state("a", READY)
        site.want([desired("a", Goal.STOP, template="pod", drain=300)])
        await eventually(lambda: own in fake.going())
        assert fake.pods[own]["metadata"]["deletionGracePeriodSeconds"] == 300
        await site.state("a", DRAINING)
        fake.end(own)
        assert (await site.state("a", STOPPED)).reason == ""
    (_, body) = fake.bodies[0]
    container = body["spec"]["containers"][0]
    assert container["args"] == ["--queue", "tasks"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert {"name": "GPUSCALE_REPLICA", "value": name("a")} in container["env"]
    assert body["spec"]["restartPolicy"] == "Never"
    wishes = body["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [(one["weight"], one["preference"]["matchFields"][0]["values"]) for one in wishes] == [
        (100, ["n2"]),
        (90, ["n1"]),
    ]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in body["spec"]["affinity"]["nodeAffinity"]


async def test_a_pod_of_its_own_that_ends_is_a_failure_with_its_exit_code_and_is_removed(
    fake: FakeKubernetes, site: Site
) -> None:
    site.want([desired("a", template="pod")])
    own = pod_name("worker", ADAPTER, name("a"))
    await eventually(lambda: own in fake.pods)
    ended = {"exitCode": 3}
    status = {"name": "worker", "image": "", "imageID": "", "ready": False, "restartCount": 0}
    fake.status(own, {"phase": "Failed", "containerStatuses": [{**status, "state": {"terminated": ended}}]})
    assert (await site.state("a", FAILED)).exit_code == 3
    assert own not in fake.going()
    site.want([desired("a", Goal.FORGET, template="pod")])
    await eventually(lambda: own in fake.going())
    assert fake.calls["POST /pods"] == 1


async def test_templates_are_checked_by_a_dry_run_that_changes_nothing(
    fake: FakeKubernetes, config: Path, tmp_path: Path
) -> None:
    fake.add(deployment(replicas=2))
    pods = dict(fake.pods)
    async with running(config, tmp_path / "data") as site:
        found = await check_templates(site.cluster, TEMPLATES)
        assert set(found) == {"pod", "worker"}
        assert (wanted(fake), fake.pods) == (2, pods)
        fake.deployments.clear()
        for template in TEMPLATES:
            expected = f"template {template}: there is no Deployment worker in namespace work"
            with pytest.raises(FailedPreconditionError, match=expected):
                await check_templates(site.cluster, {template: TEMPLATES[template]})


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        pytest.param(
            "PATCH", "/deployments/worker/scale", "template worker: the cluster refuses to scale", id="scale"
        ),
        pytest.param("GET", "/deployments/worker", "template pod: the cluster refuses to read", id="read"),
        pytest.param("GET", "/pods", "the cluster refuses to list pods", id="list"),
        pytest.param("patch", "/pods", "the right to patch pods in namespace work", id="mark"),
        pytest.param("POST", "/pods", "template pod: the cluster refuses its pod", id="create"),
    ],
)
async def test_a_right_that_is_missing_is_named(
    fake: FakeKubernetes, config: Path, tmp_path: Path, method: str, path: str, expected: str
) -> None:
    fake.add(deployment())
    async with running(config, tmp_path / "data") as site:
        fake.fail = lambda m, p: (403, "forbidden: User k1") if (m, p) == (method, path) else None
        with pytest.raises(FailedPreconditionError, match=expected) as caught:
            await check_templates(site.cluster, TEMPLATES)
    assert caught.value.reason == "TEMPLATE_UNUSABLE"

"""The Kubernetes adapter against a real API server and controller manager, where KUBEBUILDER_ASSETS has them.

$ apt-get source kubernetes && cd kubernetes-1.20*
$ sudo apt-get install golang-go rsync etcd-server
$ CGO_ENABLED=0 make WHAT="cmd/kube-apiserver cmd/kube-controller-manager"
$ cp /usr/bin/etcd _output/bin/ && KUBEBUILDER_ASSETS=$PWD/_output/bin pytest addons/kubernetes/tests/test_cluster.py
"""

import gc
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from addons.kubernetes.tests.adapter import TEMPLATES, desired, name, running
from addons.kubernetes.tests.control_plane import ADAPTER, NOBODY, ControlPlane, Kubelet, why_unavailable
from addons.kubernetes.tests.site import (
    WORKERS,
    applied,
    by_replica,
    deployments,
    made,
    manifests,
    pods_asked_for,
    site,
)
from gpuscale.autoscaler.domain.replicas import Goal, ReplicaState
from gpuscale.common.errors import FailedPreconditionError
from gpuscale_kubernetes.engine import check_templates
from tests.support.waiting import eventually

READY, STARTING, STOPPED = ReplicaState.READY, ReplicaState.STARTING, ReplicaState.STOPPED
NOT_BEFORE_1_21 = "policy/v1"
SERVED_BY_OTHERS = "monitoring.coreos.com/v1"
COST_COUNTS_FROM = 22
SLOW = 90.0


# anyio 4 leaves a socket to the collector where a task is cancelled in the middle of a TLS handshake.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What is left to the collector is collected here, and not in somebody else's test."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    if (why := why_unavailable()) is not None:
        pytest.skip(why)
    with ControlPlane() as one:
        yield one


@pytest.fixture
async def admin(plane: ControlPlane) -> AsyncGenerator[httpx.AsyncClient]:
    async with plane.client() as client:
        yield client


async def test_up_to_three_and_down_to_the_one_that_should_stay(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    """With the rights of deploy/kubernetes/base/rbac.yaml and no others."""
    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with site(admin) as kubelet, running(config, tmp_path, adapter="kubernetes") as one:
        for count in (1, 3):
            one.want([desired(replica) for replica in "abc"[:count]])
            for replica in "abc"[:count]:
                await one.state(replica, READY)
        assert await pods_asked_for(admin) == 3
        before = by_replica(await kubelet.pods())
        assert set(before) == {name(replica) for replica in "abc"}
        kubelet.lingering = True
        one.want([desired("a", Goal.STOP, drain=120), desired("b", Goal.STOP, drain=120), desired("c")])
        await eventually(lambda: pods_going(kubelet, 2), timeout=SLOW)
        left = by_replica(await kubelet.pods())
        await one.state("a", ReplicaState.DRAINING)
        kubelet.lingering = False
        for replica in "ab":
            await one.state(replica, STOPPED)
        assert one.report("c").state is READY
        assert await pods_asked_for(admin) == 1
        await eventually(lambda: only_replica(kubelet, name("c")), timeout=SLOW)
        version = (await admin.get("/version")).json()
        if int(version["minor"].rstrip("+")) >= COST_COUNTS_FROM:
            assert left[name("c")] == before[name("c")]


async def pods_going(kubelet: Kubelet, number: int) -> bool:
    pods = (await kubelet.pods()).values()
    return sum("deletionTimestamp" in pod["metadata"] for pod in pods) == number


async def only_replica(kubelet: Kubelet, replica: str) -> bool:
    return set(by_replica(await kubelet.pods())) == {replica}


async def test_a_stale_version_is_refused_by_the_server_and_not_forced(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with site(admin), running(config, tmp_path, adapter="kubernetes") as one:
        template = TEMPLATES["worker"]
        read = await one.cluster.workload(template.workload)
        merge = {"Content-Type": "application/merge-patch+json"}
        await admin.patch(f"{deployments()}/worker/scale", json={"spec": {"replicas": 2}}, headers=merge)
        assert await one.cluster.scale(read, 1) is False
        assert await pods_asked_for(admin) == 2
        seen = await one.cluster.workload(template.workload)
        assert seen.replicas == 2
        await eventually(lambda: scaled_as_seen(one.cluster, template.workload), timeout=SLOW)
        assert await pods_asked_for(admin) == 1


async def scaled_as_seen(cluster: Any, workload: str) -> bool:
    """The controller writes the Deployment's status meanwhile, which is a new version too."""
    seen = await cluster.workload(workload)
    done: bool = await cluster.scale(seen, 1)
    return done


async def test_a_dry_run_changes_nothing_and_names_the_right_that_is_missing(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with site(admin) as kubelet:
        async with running(plane.kubeconfig(ADAPTER, WORKERS), tmp_path / "a", adapter="kubernetes") as one:
            found = await check_templates(one.cluster, TEMPLATES)
            assert found["worker"].probed
            assert await kubelet.pods() == {}
            assert await pods_asked_for(admin) == 0
            await admin.delete(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{WORKERS}/rolebindings/pods")
            with pytest.raises(
                FailedPreconditionError, match=r"template pod: .* right to delete pods"
            ) as caught:
                await eventually(lambda: still_allowed(one), timeout=SLOW, retry_on=(AssertionError,))
            assert caught.value.reason == "TEMPLATE_UNUSABLE"
        async with running(plane.kubeconfig(NOBODY, WORKERS), tmp_path / "b", adapter="kubernetes") as one:
            with pytest.raises(FailedPreconditionError, match='User "nobody" cannot list resource "pods"'):
                await check_templates(one.cluster, TEMPLATES)


async def still_allowed(one: Any) -> None:
    """The server's view of the rights lags a little behind."""
    await check_templates(one.cluster, TEMPLATES)
    raise AssertionError


async def test_every_manifest_is_taken_by_the_server(plane: ControlPlane, admin: httpx.AsyncClient) -> None:
    """First as a dry run, as `kubectl apply --dry-run=server`, and then for good."""
    groups = (await admin.get("/apis")).json()["groups"]
    served = {version["groupVersion"] for group in groups for version in group["versions"]} | {"v1"}
    found = manifests()
    for one in found:
        if one["kind"] == "Namespace":
            await made(admin, one)
    left_out = {one["apiVersion"] for one in found} - served
    assert left_out <= {SERVED_BY_OTHERS, NOT_BEFORE_1_21}
    for dry_run in (True, False):
        for one in found:
            if one["apiVersion"] in served:
                answer = await applied(admin, one, dry_run=dry_run)
                assert answer.is_success, f"{one['kind']} {one['metadata']['name']}: {answer.text}"
                # What the server does not know it drops without a word: nothing of what was said may be missing.
                assert lost(one, answer.json()) == []


def lost(said: Any, kept: Any, where: str = "") -> list[str]:
    """What was said and is not in what the server keeps."""
    if isinstance(said, dict):
        return [text for key in said for text in lost(said[key], (kept or {}).get(key), f"{where}.{key}")]
    if isinstance(said, list):
        pairs = zip(said, kept or [None] * len(said), strict=False)
        return [
            text
            for number, (one, other) in enumerate(pairs)
            for text in lost(one, other, f"{where}[{number}]")
        ]
    return [] if str(said) == str(kept) or kept is not None else [where]

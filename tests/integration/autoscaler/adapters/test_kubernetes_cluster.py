"""The Kubernetes adapter against a real API server and controller manager, where KUBEBUILDER_ASSETS has them."""

import asyncio
import gc
import os
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from gpuscale.autoscaler.adapters.engine import WorkerGoal
from gpuscale.autoscaler.adapters.engines.kubernetes.engine import check_templates
from gpuscale.autoscaler.adapters.engines.kubernetes.pods import COST, KubernetesTemplate
from gpuscale.autoscaler.domain.replicas import ReplicaState
from gpuscale.common.errors import FailedPreconditionError
from tests.support.clock import ManualClock
from tests.support.kubernetes import ADAPTER, NOBODY, ControlPlane, Kubelet, why_unavailable
from tests.support.kubernetes_adapter import TEMPLATES, desired, name, running
from tests.support.kubernetes_site import (
    WORKERS,
    applied,
    by_replica,
    deployments,
    made,
    manifests,
    place,
    pods_asked_for,
    site,
)
from tests.support.moving import containers, journey, pods
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
    """With the rights of deploy/kubernetes/rbac.yaml and no others."""
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
        one.want(
            [desired("a", WorkerGoal.STOP, drain=120), desired("b", WorkerGoal.STOP, drain=120), desired("c")]
        )
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
        read = await one.cluster.workload(template.kind, template.workload)
        merge = {"Content-Type": "application/merge-patch+json"}
        await admin.patch(f"{deployments()}/worker/scale", json={"spec": {"replicas": 2}}, headers=merge)
        assert await one.cluster.scale(read, 1) is False
        assert await pods_asked_for(admin) == 2
        seen = await one.cluster.workload(template.kind, template.workload)
        assert seen.replicas == 2
        await eventually(lambda: scaled_as_seen(one.cluster, template.workload), timeout=SLOW)
        assert await pods_asked_for(admin) == 1


async def scaled_as_seen(cluster: Any, workload: str) -> bool:
    """The controller writes the Deployment's status meanwhile, which is a new version too."""
    seen = await cluster.workload(TEMPLATES["worker"].kind, workload)
    done: bool = await cluster.scale(seen, 1)
    return done


async def test_a_dry_run_changes_nothing_and_names_the_right_that_is_missing(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    async with site(admin) as kubelet:
        async with running(plane.kubeconfig(ADAPTER, WORKERS), tmp_path / "a", adapter="kubernetes") as one:
            found = await check_templates(one.cluster, TEMPLATES, one.engine._bare)
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
                await check_templates(one.cluster, TEMPLATES, one.engine._bare)


async def still_allowed(one: Any) -> None:
    """The server's view of the rights lags a little behind."""
    await check_templates(one.cluster, TEMPLATES, one.engine._bare)
    raise AssertionError


async def test_a_pod_that_is_not_ready_goes_first_and_the_right_replica_stops_all_the_same(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with site(admin) as kubelet, running(config, tmp_path, adapter="kubernetes") as one:
        one.want([desired("a")])
        await one.state("a", READY)
        kept = by_replica(await kubelet.pods())[name("a")]
        kubelet.stuck = Everything(kept)
        one.want([desired("a"), desired("b")])
        await eventually(lambda: is_marked(kubelet, name("b")), timeout=SLOW)
        one.want([desired("a", WorkerGoal.STOP, drain=120), desired("b")])
        await one.state("a", STOPPED)
        await one.state("b", READY)
        assert by_replica(await kubelet.pods()) == {name("b"): kept}
        marks = (await kubelet.pods())[kept]["metadata"]["annotations"]
        assert COST not in marks


class Everything(set[str]):
    """All names but one."""

    def __init__(self, but: str) -> None:
        super().__init__()
        self._but = but

    def __contains__(self, name: object) -> bool:
        return name != self._but


async def is_marked(kubelet: Kubelet, replica: str) -> bool:
    return replica in by_replica(await kubelet.pods())


async def test_nothing_happens_while_the_api_server_is_away(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    """The way to it is cut, and comes back."""
    clock = ManualClock()
    async with site(admin) as kubelet, Way(plane.port) as way:
        config = tmp_path / "kubeconfig"
        text = plane.kubeconfig(ADAPTER, WORKERS).read_text()
        config.write_text(text.replace(f":{plane.port}", f":{way.port}"))
        async with running(config, tmp_path / "data", adapter="kubernetes", clock=clock) as one:
            one.want([desired("a")])
            await one.state("a", READY)
            pods = by_replica(await kubelet.pods())
            await way.cut()
            asked = way.refused
            await eventually(lambda: way.refused > asked + 1, timeout=SLOW)
            one.want([desired("a", WorkerGoal.STOP), desired("b")])
            clock.advance(60.0)
            await eventually(lambda: way.refused > asked + 3, timeout=SLOW)
            assert one.crew.reports() is None
            assert by_replica(await kubelet.pods()) == pods
            assert await pods_asked_for(admin) == 1
            one.want([desired("a"), desired("b")])
            way.open = True
            for replica in "ab":
                await one.state(replica, READY)
            assert by_replica(await kubelet.pods()).items() > pods.items()


class Way:
    """A way to a port, which can be cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0
        self.open = True
        self.refused = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()
        self._server.close()
        await self._server.wait_closed()

    async def cut(self) -> None:
        """Nothing passes any more."""
        self.open = False
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.open:
            self.refused += 1
            writer.close()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, back]
        await asyncio.gather(_pump(reader, back), _pump(there, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


async def test_the_program_is_killed_and_its_next_run_adopts_the_pods(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    """Killed right after it changed the number of pods, before any pod was marked."""
    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with site(admin) as kubelet:
        killed = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.kubernetes_killed",
            str(config),
            str(tmp_path),
            env={**os.environ, "GPUSCALE_FAILPOINTS": "kubernetes.apply.after_scale=kill"},
            cwd=Path(__file__).resolve().parents[3],
        )
        assert await asyncio.wait_for(killed.wait(), SLOW) == -signal.SIGKILL
        assert await pods_asked_for(admin) == 2
        async with running(config, tmp_path, adapter="kubernetes") as one:
            one.want([desired(replica) for replica in "ab"])
            for replica in "ab":
                await one.state(replica, READY)
        assert await pods_asked_for(admin) == 2
        pods = by_replica(await kubelet.pods())
        assert set(pods) == {name("a"), name("b")}
        async with running(config, tmp_path, adapter="kubernetes") as one:
            for replica in "ab":
                await one.state(replica, READY)
        assert by_replica(await kubelet.pods()) == pods


async def test_a_pod_of_its_own_lives_and_stops_within_its_drain_timeout(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    class Ranking:
        async def best(self, gpu_count: int) -> tuple[str, ...]:
            return ("n7",)

    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with (
        site(admin) as kubelet,
        running(config, tmp_path, adapter="kubernetes", rank=Ranking().best) as one,
    ):
        one.want([desired("a", template="pod", gpu_count=2)])
        await one.state("a", READY)
        ((_, own),) = (await kubelet.pods()).items()
        assert own["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
        (wish,) = own["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["preference"]["matchFields"][0]["values"] == ["n7"]
        kubelet.lingering = True
        one.want([desired("a", WorkerGoal.STOP, template="pod", drain=77)])
        await eventually(lambda: pods_going(kubelet, 1), timeout=SLOW)
        ((_, own),) = (await kubelet.pods()).items()
        assert own["metadata"]["deletionGracePeriodSeconds"] == 77
        kubelet.lingering = False
        assert (await one.state("a", STOPPED)).reason == ""
        assert await pods_asked_for(admin) == 0


async def test_a_stateful_set_ends_its_newest_pod_and_the_right_replica_stops(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path: Path
) -> None:
    templates = {"worker": KubernetesTemplate(stateful_set="worker", parameters={"queue": "tasks"})}
    [like] = [one for one in manifests() if one["metadata"].get("name") == "worker"]
    found = {**like, "kind": "StatefulSet", "spec": {**like["spec"], "serviceName": "worker"}}
    config = plane.kubeconfig(ADAPTER, WORKERS)
    async with site(admin) as kubelet:
        await made(admin, found)
        async with running(config, tmp_path, adapter="kubernetes", templates=templates) as one:
            one.want([desired(replica) for replica in "ab"])
            for replica in "ab":
                await one.state(replica, READY)
            assert set(by_replica(await kubelet.pods()).values()) == {"worker-0", "worker-1"}
            oldest = {pod: replica for replica, pod in by_replica(await kubelet.pods()).items()}["worker-0"]
            ends, stays = ("a", "b") if oldest == name("a") else ("b", "a")
            one.want([desired(ends, WorkerGoal.STOP, drain=120), desired(stays)])
            await one.state(ends, STOPPED)
            await one.state(stays, READY)
            await eventually(lambda: only_replica(kubelet, name(stays)), timeout=SLOW)
            assert set(await kubelet.pods()) == {"worker-0"}
        await admin.delete(f"{place(found)}/worker", params={"propagationPolicy": "Background"})


async def test_an_endpoint_moves_there_and_back_by_one_field(
    plane: ControlPlane, admin: httpx.AsyncClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As test_moving.py has it, with the rights that deploy/kubernetes gives."""
    folder = tmp_path_factory.mktemp("m")
    async with (
        site(admin) as kubelet,
        journey(folder) as one,
        containers(one, folder) as engine,
        pods(one, folder, plane.kubeconfig(ADAPTER, WORKERS)),
    ):
        await one.move("adapters/containers")
        await one.move("adapters/kubernetes")
        await one.holds(0)
        assert set(by_replica(await kubelet.pods())) == {found.name for found in await one.replicas()}
        assert await pods_asked_for(admin) == 1
        await one.move("adapters/host")
        await one.holds(1)
        assert await pods_asked_for(admin) == 0
        assert (engine.containers, one.fewest) == ({}, 1)


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

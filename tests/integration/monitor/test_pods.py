"""Pods that have GPUs, as a kubelet tells over a real socket; its messages are written here as the wire has them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.agent import host as host_module
from gpuscale.monitor.agent.host import KEPT_SECONDS, Pods
from gpuscale.monitor.agent.sources import simulated_uuid
from gpuscale.monitor.model.readings import GpuProcess, GpuReading, GpuSample, GpuState
from tests.support.clock import ManualClock
from tests.support.monitor import FakeGpus, collected, running_agent, running_fleet
from tests.support.monitor_values import identity
from tests.support.ports import free_port
from tests.support.promtool import named
from tests.support.waiting import eventually

FIRST, SECOND, THIRD = (simulated_uuid("alpha", index) for index in range(3))


def part(number: int, *content: bytes) -> bytes:
    """A field with a length, by the encoding of protocol buffers."""
    body = b"".join(content)
    return bytes([number << 3 | 2, len(body) & 0x7F | 0x80, len(body) >> 7]) + body


def pod(namespace: str, name: str, *devices: str) -> bytes:
    """A pod with a container that was given devices, and what the kubelet tells besides: names, CPUs, NUMA nodes."""
    ids = [part(2, device.encode()) for device in devices]
    given = part(2, part(1, b"nvidia.com/gpu"), *ids, part(3, part(1, b"\x08\x01")))
    container = part(3, part(1, b"main"), given, part(3, b"\x00\x01"))
    return part(1, part(1, name.encode()), part(2, namespace.encode()), container)


class Kubelet:
    """What `v1.PodResourcesLister` answers; `hangs` while it answers nothing."""

    def __init__(self) -> None:
        self.pods: tuple[bytes, ...] = ()
        self.hangs = False
        self.asked = 0

    async def List(self, request: bytes, context: Any) -> bytes:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        return b"".join(self.pods)


@asynccontextmanager
async def serving(kubelet: Kubelet, place: Path) -> AsyncGenerator[None]:
    server = grpc.aio.server()
    methods = {"List": grpc.unary_unary_rpc_method_handler(kubelet.List)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods)])
    server.add_insecure_port(f"unix:{place}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@pytest.fixture
def kubelet(monkeypatch: pytest.MonkeyPatch) -> Kubelet:
    monkeypatch.setattr(host_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(host_module, "PATIENCE_SECONDS", 0.2)
    return Kubelet()


async def test_the_fleet_and_metrics_tell_which_pods_have_which_gpus(
    kubelet: Kubelet, tmp_path: Path
) -> None:
    place, pages = tmp_path / "kubelet.sock", [f"127.0.0.1:{free_port()}" for _ in range(2)]
    kubelet.pods = pod("ml", "train", FIRST), pod("ml", "a", f"{SECOND}::0"), pod("web", "b", f"{SECOND}::1")
    async with (
        serving(kubelet, place),
        running_fleet(metrics_listen=pages[0]) as fleet,
        running_agent(fleet.address, pod_resources_socket=place, metrics_listen=pages[1]),
        httpx.AsyncClient() as client,
    ):

        async def told() -> list[list[str]]:
            node = await fleet.until("alpha", monitor_api.NodeState.NODE_STATE_ONLINE)
            return [[*gpu.pods] for gpu in node.snapshot.gpus[:3]]

        async def tells(wanted: list[list[str]]) -> bool:
            return await told() == wanted

        await eventually(partial(tells, [["ml/train"], ["ml/a", "web/b"], []]))
        for page in pages:
            text = (await client.get(f"http://{page}/metrics", timeout=30)).text
            found = {
                tuple(map(one.labels.get, ("uuid", "namespace", "pod")))
                for one in named(text, "gpuscale_gpu_pod_info")
            }
            assert found == {(FIRST, "ml", "train"), (SECOND, "ml", "a"), (SECOND, "web", "b")}
        kubelet.pods = (pod("ml", "train", THIRD),)
        await eventually(partial(tells, [[], [], ["ml/train"]]))


async def test_a_kubelet_that_is_silent_or_away_is_believed_for_a_minute(
    kubelet: Kubelet, tmp_path: Path
) -> None:
    place, clock = tmp_path / "kubelet.sock", ManualClock()
    pods = Pods(place, clock)
    known = {FIRST: ("ml/train",)}
    task = asyncio.create_task(pods.run())
    try:
        kubelet.pods = (pod("ml", "train", FIRST),)
        async with serving(kubelet, place):
            await eventually(lambda: pods.by_gpu == known)
            kubelet.hangs = True
            asked = kubelet.asked
            await eventually(lambda: kubelet.asked > asked + 1)
            assert pods.by_gpu == known
            clock.advance(KEPT_SECONDS + 1)
            await eventually(lambda: pods.by_gpu == {})
            kubelet.hangs = False
            await eventually(lambda: pods.by_gpu == known)
        clock.advance(KEPT_SECONDS + 1)
        await eventually(lambda: pods.by_gpu == {})
        async with serving(kubelet, place):
            await eventually(lambda: pods.by_gpu == known)
    finally:
        task.cancel()


async def test_a_question_that_is_out_holds_up_no_snapshot(
    kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "PATIENCE_SECONDS", 600.0)
    kubelet.hangs = True
    place = tmp_path / "kubelet.sock"
    async with serving(kubelet, place), running_agent(pod_resources_socket=place) as agent:
        await eventually(lambda: kubelet.asked == 1)
        fresh = monitor_api.GetSnapshotRequest(max_age=to_duration(0))
        taken = [(await agent.GetSnapshot(fresh, timeout=30)).snapshot.seq for _ in range(3)]
    assert taken[0] < taken[1] < taken[2]
    assert kubelet.asked == 1


async def test_a_process_is_of_the_pod_that_has_its_gpu_alone() -> None:
    """With two pods on a GPU the cgroup's UID says whose; what runs in none is nobody's."""
    source = FakeGpus()
    processes = GpuProcess(11, pod="0f8a6c52-1111-2222-3333-444455556666"), GpuProcess(12)
    for index in range(2):
        source.samples[identity(index).uuid] = GpuSample(GpuState.OK, GpuReading(processes=processes))
    pods = {identity(0).uuid: ("ml/train",), identity(1).uuid: ("ml/a", "web/b")}
    first, second = (await collected(source, pods=lambda: pods)).gpus
    shown = [[one.pod for one in view.reading.processes or ()] for view in (first, second)]
    assert shown == [["ml/train", ""], [processes[0].pod, ""]]
    assert (first.pods, second.pods) == (("ml/train",), ("ml/a", "web/b"))

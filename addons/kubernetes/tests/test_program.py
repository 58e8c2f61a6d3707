"""`gpuscale-kubernetes-adapter` as a program: what it tells the autoscaler of itself, kill -9, and a template that is no good."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from addons.kubernetes.tests.fake_cluster import FakeKubernetes, deployment, serving
from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters import main
from gpuscale.common.rpc.channel import open_channel
from gpuscale_kubernetes import bare as ranking
from gpuscale_kubernetes.bare import AllocatorRanking
from tests.support.forked import Forked
from tests.support.program import engine_program
from tests.support.scripted_autoscaler import State, replica, scripted_autoscaler
from tests.support.up import ctl_environment
from tests.support.waiting import eventually

SLOW = 60.0


@pytest.fixture
async def fake() -> AsyncGenerator[FakeKubernetes]:
    async with serving() as one:
        yield one


def config(fake: FakeKubernetes, folder: Path, address: str) -> Path:
    """A file of settings as an operator writes it."""
    path = folder / "adapter.toml"
    path.write_text(
        f"""
        [kubernetes_adapter]
        adapter = "k1"
        autoscaler_address = "{address}"
        data_dir = {json.dumps(str(folder / "data"))}
        kubeconfig = {json.dumps(str(fake.kubeconfig(folder)))}
        [kubernetes_templates.worker]
        deployment = "worker"
        parameters = {{ queue = "tasks" }}
        """
    )
    return path


async def test_it_says_what_it_can_do_and_its_next_run_goes_on_with_the_pods(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    fake.add(deployment())
    order = {"parameters": {"queue": "tasks"}, "gpu_count": 1}
    async with (
        scripted_autoscaler() as (autoscaler, address),
        engine_program("kubernetes", config(fake, tmp_path, address), {}) as adapter,
    ):
        await adapter.start()
        await autoscaler.run(replica(1), "worker", **order)
        await eventually(lambda: len(fake.pods) == 1, timeout=SLOW)
        fake.run(next(iter(fake.pods)))
        await autoscaler.shows(replica(1), State.STATE_READY, timeout=SLOW)
        await adapter.kill()
        await adapter.start()
        await eventually(lambda: len(autoscaler.registered) == 2, timeout=SLOW)
        await autoscaler.run(replica(2), "worker", **order)
        both = {replica(1), replica(2)}
        await eventually(lambda: {fake.replica(one) for one in fake.pods} == both, timeout=SLOW)
        await autoscaler.shows(replica(1), State.STATE_READY, timeout=SLOW)
    register = autoscaler.registered[0]
    assert (register.adapter, register.kind, register.node) == ("k1", "kubernetes", "")
    assert list(register.templates) == ["worker"]
    # The Deployment has no readiness probe, so READY means no more than that the pod runs.
    assert register.capabilities == api.AdapterCapabilities(gives_gpus=True, picks_victims=True, drains=True)


async def test_a_template_without_its_deployment_is_one_line_and_an_exit_code(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    log, words = tmp_path / "log", ["kubernetes", "--config", str(config(fake, tmp_path, "127.0.0.1:1"))]
    process = await asyncio.to_thread(Forked, main.__name__, words, ctl_environment(), log)
    assert await asyncio.to_thread(process.wait, SLOW) == 1
    error = json.loads(log.read_text().splitlines()[-1])["error"]
    assert error == "template worker: there is no Deployment worker in namespace work"


class Capacity(allocator_api.CapacityServiceServicer):
    """Ranks one node, or does not answer in time."""

    calls = 0
    away = True

    async def RankNodes(
        self, request: allocator_api.RankNodesRequest, context: Any
    ) -> allocator_api.RankNodesResponse:
        self.calls += 1
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "later")
        node = allocator_api.RankedNode(name="nodes/n7", sufficient=True)
        return allocator_api.RankNodesResponse(nodes=[node])


async def test_without_an_allocator_the_cluster_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ranking that nobody gives is no reason not to start a pod, nor to start many of them late."""
    capacity = Capacity()
    server = grpc.aio.server()
    allocator_api.add_CapacityServiceServicer_to_server(capacity, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            asked = AllocatorRanking(channel)
            for _ in range(3):
                assert await asked.best(1) == ()
            assert capacity.calls == 1
            monkeypatch.setattr(ranking, "SILENCE", 0.0)
            asked = AllocatorRanking(channel)
            assert await asked.best(1) == ()
            capacity.away = False
            assert await asked.best(1) == ("n7",)
    finally:
        await server.stop(None)

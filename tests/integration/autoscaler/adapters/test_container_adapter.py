"""The container adapter as a whole, from an endpoint that asks for GPUs to the request for its containers."""

import asyncio
from pathlib import Path

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings
from gpuscale.autoscaler.adapters.main import serve
from tests.support.autoscaler_app import endpoint, running
from tests.support.docker_double import DockerDouble
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually


def asked_for(double: DockerDouble) -> list[str]:
    """The GPUs that the engine was asked for, by all containers together."""
    found: list[str] = []
    for one in double.containers.values():
        host = one.config["HostConfig"]
        assert isinstance(host, dict)
        found += [uuid for request in host["DeviceRequests"] for uuid in request["DeviceIDs"]]
    return sorted(found)


async def test_replicas_get_the_gpus_that_are_reserved_for_them_and_no_others(tmp_path: Path) -> None:
    """And give them back when their containers have ended, not before."""
    double, allocator = DockerDouble(), FakeAllocator({"n": ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]})
    stop = asyncio.Event()
    async with (
        double.served(tmp_path / "docker.sock"),
        serving(allocator) as allocator_address,
        running(tmp_path / "state", allocator_address) as autoscaler,
        asyncio.TaskGroup() as group,
    ):
        settings = ContainerSettings.model_validate(
            {
                "autoscaler_address": autoscaler.address,
                "adapter": "here",
                "node": "n",
                "data_dir": tmp_path / "adapter",
                "engine": f"unix://{tmp_path / 'docker.sock'}",
                "allowed_images": ["worker:*"],
                "container_templates": {"worker": {"image": "worker:1"}},
            }
        )
        group.create_task(serve(settings, stop))
        await autoscaler.create(endpoint(low=2, high=2, gpus=2, adapter="adapters/here"))

        async def ready() -> bool:
            states = [one.state for one in await autoscaler.replicas()]
            return states == [api.Replica.STATE_READY] * 2

        await eventually(ready, timeout=60.0)
        assert asked_for(double) == sorted(allocator.held) == ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]
        [listed] = (await autoscaler.adapters.ListAdapters(api.ListAdaptersRequest(), timeout=10)).adapters
        assert (listed.kind, listed.node) == ("container", "n")
        assert not listed.capabilities.gives_gpus
        assert listed.capabilities.picks_victims
        assert listed.capabilities.drains

        await autoscaler.delete()
        await eventually(lambda: all(one.signals for one in double.containers.values()), timeout=60.0)
        assert len(allocator.held) == 4, "what finishes its work keeps its GPUs"
        for one in list(double.containers.values()):
            double.change(one, "exited")
        await eventually(lambda: not allocator.held and not double.containers, timeout=60.0)
        stop.set()

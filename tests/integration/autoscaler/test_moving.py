"""The same endpoint on one engine and then on another: one field of its file says where."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.app import open_process_adapter
from gpuscale.autoscaler.adapters.engines.container import main as container
from gpuscale.autoscaler.adapters.engines.container.settings import ContainerAdapterSettings
from gpuscale.autoscaler.adapters.engines.ecs.settings import EcsAdapterSettings
from gpuscale.autoscaler.adapters.engines.kubernetes.settings import KubernetesAdapterSettings
from gpuscale.autoscaler.adapters.engines.ray.settings import RayAdapterSettings
from gpuscale.autoscaler.adapters.engines.slurm.settings import SlurmAdapterSettings
from gpuscale.autoscaler.adapters.settings import AdapterSettings
from gpuscale.autoscaler.translate import spec_from_wire
from gpuscale.autoscaler.validate import violations as contradictions
from gpuscale.cli.manifests import parse
from gpuscale.common.channel import open_channel
from gpuscale.common.clock import SystemClock
from gpuscale.common.settings import Settings, load_table, read_config
from gpuscale.common.validation import violations
from tests.support.autoscaler_app import running
from tests.support.docker_double import DockerDouble
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
CONFIG = ROOT / "examples" / "anywhere.toml"
ENGINES: list[type[Settings]] = [
    AdapterSettings,
    ContainerAdapterSettings,
    EcsAdapterSettings,
    KubernetesAdapterSettings,
    RayAdapterSettings,
    SlurmAdapterSettings,
]
READY = api.Replica.STATE_READY
LONG = 90.0


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
    engine: type[Settings], wanted: api.Endpoint
) -> None:
    settings = load_table(engine, read_config(CONFIG), environ={})
    tables = "templates" if engine is AdapterSettings else engine.section.replace("_adapter", "_templates")
    assert set(getattr(settings, tables)) == {wanted.spec.template.template}
    wanted.spec.template.adapter = f"adapters/{vars(settings)['adapter']}"
    assert violations(wanted) == []
    assert contradictions(spec_from_wire(wanted.spec)) == []


@asynccontextmanager
async def containers(autoscaler: str, folder: Path) -> AsyncGenerator[DockerDouble]:
    """The container adapter on an engine in memory."""
    double = DockerDouble()
    stop = asyncio.Event()
    overrides = {
        "data_dir": folder / "containers",
        "autoscaler_address": autoscaler,
        "engine": f"unix://{folder / 'docker.sock'}",
        "node": "n",
    }
    settings = load_table(ContainerAdapterSettings, read_config(CONFIG), overrides, environ={})
    async with double.served(folder / "docker.sock"), asyncio.TaskGroup() as group:
        group.create_task(container.serve(settings, stop))
        yield double
        stop.set()


@asynccontextmanager
async def processes(autoscaler: str, folder: Path) -> AsyncGenerator[None]:
    """The process adapter."""
    overrides = {"data_dir": folder / "processes", "node": "n"}
    settings = load_table(AdapterSettings, read_config(CONFIG), overrides, environ={})
    async with (
        open_channel(autoscaler) as channel,
        open_process_adapter(settings, autoscaler=channel, clock=SystemClock()),
    ):
        yield


async def test_it_moves_by_one_field(
    wanted: api.Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From processes to containers and back: never fewer than wanted, GPUs reserved in both, and the last one stays."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("GPUSCALE_EXAMPLE_AMQP_URL", "amqp://nobody:none@127.0.0.1:1/")
    allocator = FakeAllocator({"n": ["GPU-0", "GPU-1"]})
    async with (
        serving(allocator) as address,
        running(tmp_path / "state", address) as autoscaler,
        processes(autoscaler.address, tmp_path),
        containers(autoscaler.address, tmp_path) as double,
    ):

        async def on(*adapters: str) -> None:
            async def so() -> bool:
                for one in double.containers.values():
                    if one.signals and one.state == "running":
                        double.change(one, "exited")  # it was asked to finish, and did
                found = await autoscaler.replicas(parent="endpoints/jobs")
                return sorted(one.adapter for one in found if one.state == READY) == sorted(adapters) and len(
                    found
                ) == len(adapters)

            await eventually(so, timeout=LONG)

        async def set_replicas(count: int) -> None:
            request = api.SetReplicasRequest(name="endpoints/jobs", replicas=count)
            await autoscaler.endpoints.SetReplicas(request, timeout=10)

        autoscaler.watchers.queues["jobs"] = (5, 0)  # neither of the rules has anything to say
        await autoscaler.create(wanted)
        await on("adapters/host")
        for adapter, others in (
            ("adapters/containers", "adapters/host"),
            ("adapters/host", "adapters/containers"),
        ):
            now = await autoscaler.get("endpoints/jobs")
            now.spec.template.adapter = adapter
            await autoscaler.update(now, "spec.template.adapter")
            await set_replicas(2)
            await on(adapter, others)
            assert len(allocator.held) == 2
            await set_replicas(1)
            await on(adapter)
        assert double.count("/kill") >= 1
        await autoscaler.delete("endpoints/jobs")

"""An endpoint that moves from engine to engine: all of gpuscale in this process, and gpuscalectl too."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.engines.container.engine import ContainerSettings
from gpuscale.autoscaler.adapters.main import serve
from gpuscale.common.config.sources import load_table, read_config
from gpuscale.common.rpc.channel import open_channel
from gpuscale.up.app import open_all
from gpuscale.up.settings import load_all
from gpuscale_kubernetes.engine import KubernetesSettings
from tests.support.cli import run_cli
from tests.support.docker_double import DockerDouble
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "examples" / "anywhere.toml"
ENDPOINT = "endpoints/jobs"
READY = api.Replica.STATE_READY
LONG = 90.0


class Journey:
    """The endpoint of examples/anywhere.yaml on its way; `fewest`: least replicas that were READY at a time since the first one was."""

    def __init__(self, address: str, channel: grpc.aio.Channel, folder: Path) -> None:
        self.address = address
        self.fewest = 1_000_000
        self._endpoints = api.EndpointServiceStub(channel)
        self._decisions = api.DecisionServiceStub(channel)
        self._reservations = allocator_api.AllocatorServiceStub(channel)
        self._file = folder / "endpoint.yaml"

    async def apply(self, adapter: str) -> str:
        """`gpuscalectl apply` of the example with this one field changed; returns what it says."""
        example = (ROOT / "examples" / "anywhere.yaml").read_text()
        assert example.count("adapter: adapters/host") == 1
        self._file.write_text(example.replace("adapter: adapters/host", f"adapter: {adapter}"))
        command = ("--address", self.address, "apply", "-f", str(self._file))
        ran = await asyncio.to_thread(run_cli, *command)
        assert ran.code == 0, ran.err
        return ran.out

    async def move(self, to: str) -> None:
        """Change the field, then twice as many and back, as docs/adapters.md says."""
        [there] = {one.adapter for one in await self.replicas()}
        assert await self.apply(to) == f"watchers/jobs unchanged\n{ENDPOINT} configured\n"
        await self._set_replicas(2)
        await self.on(there, to)
        [leaving] = [one for one in await self.replicas() if one.adapter == there]
        await self._set_replicas(1)
        await self.on(to)
        assert f"{leaving.name.rpartition('/')[2]} on {there}" in await self._stops()

    async def on(self, *adapters: str) -> None:
        """Wait until there is one replica on each of these adapters, all of them are READY, and none else is left."""
        await eventually(
            self.replicas,
            lambda found: (
                sorted(one.adapter for one in found if one.state == READY) == sorted(adapters)
                and len(found) == len(adapters)
            ),
            timeout=LONG,
        )

    async def replicas(self) -> Sequence[api.Replica]:
        request = api.ListReplicasRequest(parent=ENDPOINT, page_size=1000)
        return (await self._endpoints.ListReplicas(request, timeout=LONG)).replicas

    async def holds(self, gpus: int) -> None:
        """Wait until the allocator has given out so many GPUs; what ended is released a moment later."""
        request = allocator_api.ListReservationsRequest(page_size=1000)
        await eventually(
            lambda: self._reservations.ListReservations(request, timeout=LONG),
            lambda found: sum(len(one.gpus) for one in found.reservations) == gpus,
            timeout=LONG,
        )

    async def watch(self) -> None:
        while True:
            ready = sum(one.state == READY for one in await self.replicas())
            if ready or self.fewest < 1_000_000:
                self.fewest = min(self.fewest, ready)
            await asyncio.sleep(0.05)

    async def leave(self) -> None:
        """Delete it, and wait until nothing is left."""
        await self._endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=ENDPOINT), timeout=LONG)
        await eventually(
            lambda: self._endpoints.ListEndpoints(api.ListEndpointsRequest(), timeout=LONG),
            lambda found: not found.endpoints,
            timeout=LONG,
        )

    async def _set_replicas(self, count: int) -> None:
        request = api.SetReplicasRequest(name=ENDPOINT, replicas=count)
        await self._endpoints.SetReplicas(request, timeout=LONG)

    async def _stops(self) -> str:
        """What the decisions say of replicas that were asked to stop."""
        request = api.ListDecisionsRequest(parent=ENDPOINT, page_size=1000)
        found = (await self._decisions.ListDecisions(request, timeout=LONG)).decisions
        return "\n".join(step.text for one in found for step in one.steps if "stop" in step.text)


@asynccontextmanager
async def journey(folder: Path) -> AsyncGenerator[Journey]:
    """All of gpuscale with four simulated GPUs, and no broker that answers: the rules have nothing to say."""
    own = 'data_dir = "/var/lib/gpuscale/adapter"\n'  # for the adapter's own program; up brings its own
    example = CONFIG.read_text(encoding="utf-8")
    assert example.count(own) == 1
    config = folder / "up.toml"
    config.write_text(example.replace(own, ""), encoding="utf-8")
    argv = ["--config", str(config), "--listen", "127.0.0.1:0", "--data-dir", str(folder / "up")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the example's command is relative to it
        patch.setenv("GPUSCALE_EXAMPLE_AMQP_URL", "amqp://nobody:none@127.0.0.1:1/")
        patch.setenv("GPUSCALE_BROKER_DEFAULT_AMQP_URL", "amqp://nobody:none@127.0.0.1:1/")
        settings = load_all([*argv, "--simulate", "4"])
        async with open_all(settings) as everything, open_channel(everything.address) as channel:
            found = Journey(everything.address, channel, folder)
            async with _until_left(found.watch()):
                await found.apply("adapters/host")
                await found.on("adapters/host")
                yield found
                await found.leave()


@asynccontextmanager
async def containers(on: Journey, folder: Path) -> AsyncGenerator[DockerDouble]:
    """The container adapter on an engine in memory, whose programs end when they are asked to."""
    double = DockerDouble()
    engine = f"unix://{folder / 'docker.sock'}"
    overrides = {"data_dir": folder / "containers", "autoscaler_address": on.address, "engine": engine}
    settings = load_table(ContainerSettings, read_config(CONFIG), overrides, environ={})

    async def obey() -> None:
        while True:
            for one in double.containers.values():
                if one.signals and one.state == "running":
                    double.change(one, "exited")
            await asyncio.sleep(0.05)

    async with (
        double.served(folder / "docker.sock"),
        _serving(lambda stop: serve(settings, stop)),
        _until_left(obey()),
    ):
        yield double


@asynccontextmanager
async def pods(on: Journey, folder: Path, kubeconfig: Path) -> AsyncGenerator[None]:
    """The Kubernetes adapter in the namespace of a kubeconfig."""
    own = {"data_dir": folder / "kubernetes", "autoscaler_address": on.address}
    overrides = own | {"kubeconfig": kubeconfig}
    settings = load_table(KubernetesSettings, read_config(CONFIG), overrides, environ={})
    async with _serving(lambda stop: serve(settings, stop)):
        yield


@asynccontextmanager
async def _serving(serve: Callable[[asyncio.Event], Coroutine[object, object, None]]) -> AsyncGenerator[None]:
    """A program's body while the block lasts; it is told to stop after that."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve(stop))
        try:
            yield
        finally:
            stop.set()


@asynccontextmanager
async def _until_left(work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Something that goes on while the block lasts."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        yield
        task.cancel()

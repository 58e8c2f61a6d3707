"""The container adapter on a real Docker-compatible engine: scaled with drain, adopted after kill -9, nothing foreign touched."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.adapters.admission import Admission
from gpuscale.autoscaler.adapters.engine import Remove, ReplicaOrder, Sighting, Start, WorkerLife
from gpuscale.autoscaler.adapters.engines.container.containers import container_name
from gpuscale.autoscaler.adapters.engines.container.docker_api import open_docker_api
from gpuscale.autoscaler.adapters.engines.container.engine import (
    NO_GPUS,
    ContainerEngine,
    ContainerSettings,
    open_container_engine,
)
from gpuscale.common.config.sources import load_table
from tests.support.autoscaler_app import Autoscaler, endpoint
from tests.support.fake_allocator import FakeAllocator, serving
from tests.support.podman import IMAGE, Podman
from tests.support.program import AutoscalerProcess, engine_program
from tests.support.waiting import eventually

State = api.Replica.State
PATIENCE = 60.0
# Says that it began, and finishes what it does when it is asked to end; gone by itself should a test never end it.
WORKER = (
    "trap 'sleep 0.3; echo drained; exit 0' TERM; echo $GPUSCALE_REPLICA >> /out/starts; "
    "n=0; while [ $n -lt 3000 ]; do n=$((n+1)); sleep 0.2; done"
)


def tables(podman: Podman, folder: Path, address: str) -> dict[str, dict[str, object]]:
    """The adapter's file."""
    shared = {"image": IMAGE, "pull": "never", "network": "host", "pids": 256}
    return {
        "container_adapter": {
            "autoscaler_address": address,
            "adapter": "here",
            "node": "n",
            "data_dir": str(folder / "adapter"),
            "engine": podman.address,
            "allowed_images": ["localhost/*"],
            "log_level": "error",
        },
        "container_templates": {
            "worker": {
                **shared,
                "command": ["/bin/sh", "-c", WORKER],
                "memory": "64MiB",
                "mounts": [{"source": str(folder / "out"), "target": "/out", "read_only": False}],
            },
            "exits": {**shared, "command": ["/bin/sh", "-c", "echo last words; exit {code:int}"]},
            "missing": {**shared, "command": ["/no/such/program"]},
            "absent": {**shared, "image": "localhost/absent:1"},
        },
    }


def written(config: Mapping[str, Mapping[str, object]], path: Path) -> Path:
    """A file of these tables; JSON's values are TOML's, but for tables in them."""
    lines: list[str] = []
    for section, table in config.items():
        plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in plain.items())]
        for name, inner in table.items():
            if isinstance(inner, dict):
                mounts = inner.pop("mounts", [])
                lines += [f"[{section}.{name}]"]
                lines += [f"{key} = {json.dumps(value)}" for key, value in inner.items()]
                for mount in mounts:
                    lines += [f"[[{section}.{name}.mounts]]"]
                    lines += [f"{key} = {json.dumps(value)}" for key, value in mount.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def starts(folder: Path) -> Counter[str]:
    """How often each replica's program began."""
    path = folder / "out" / "starts"
    return Counter(path.read_text().split() if path.exists() else [])


async def settle(autoscaler: Autoscaler, **states: int) -> list[api.Replica]:
    """Wait until so many replicas that have not ended are in each state, and none in another."""

    async def as_said() -> list[api.Replica]:
        found = await autoscaler.replicas()
        assert Counter(State.Name(one.state).removeprefix("STATE_") for one in found) == states, found
        return found or [api.Replica()]

    return await eventually(as_said, timeout=PATIENCE, interval=0.1)


async def names(podman: Podman, *options: str) -> list[str]:
    """Names of the containers that run; with --all of those that ended too."""
    return (await asyncio.to_thread(podman.run, "ps", *options, "--format", "{{.Names}}")).split()


@pytest.fixture(autouse=True)
def empty(podman: Podman) -> None:
    """No container is left of the test before, however that ended."""
    podman.run("rm", "--all", "--force", "--time", "0")


def foreign(podman: Podman, name: str) -> None:
    """A container of somebody else, with our labels on it as an image that was committed may have."""
    podman.run("run", "--detach", "--name", name, "--label=gpuscale.adapter=here",
               "--label=gpuscale.replica=endpoints/e/replicas/stray", IMAGE, "/bin/sleep", "600")  # fmt: skip


async def test_one_to_three_to_one_with_drain_through_the_death_of_the_adapter(
    podman: Podman, tmp_path: Path
) -> None:
    """Autoscaler and adapter are the programs that users run."""
    (tmp_path / "out").mkdir()
    await asyncio.to_thread(foreign, podman, "not-ours")
    async with (
        serving(FakeAllocator({})) as allocator,
        AutoscalerProcess(tmp_path / "state", allocator) as process,
    ):
        config = written(tables(podman, tmp_path, process.address), tmp_path / "config.toml")
        await process.start()
        async with process.called() as autoscaler, engine_program("container", config, {}) as adapter:
            await adapter.start("adapter.container.after_create=kill")
            await autoscaler.create(endpoint(low=1, high=3, drain_timeout=None))
            assert await adapter.ended() == -9, "killed between making the container and starting it"
            await adapter.start()
            [first] = await settle(autoscaler, READY=1)
            await autoscaler.set_replicas(3)
            before = {one.name: one.pid for one in await settle(autoscaler, READY=3)}
            assert all(before.values())
            await adapter.kill()
            await adapter.start()
            await settle(autoscaler, READY=3)
            assert {one.name: one.pid for one in await autoscaler.replicas()} == before
            await autoscaler.set_replicas(1)
            [left] = await settle(autoscaler, READY=1)
            await autoscaler.delete()
            await settle(autoscaler)

            async def drained() -> bool:
                ended = await autoscaler.replicas(ended=True)
                return {(one.state, one.exit_code) for one in ended} <= {(State.STATE_STOPPED, 0)}

            assert await drained()
            assert starts(tmp_path) == dict.fromkeys(before, 1), "none is started twice"
            assert left.name in before
            assert first.name in before

            async def only_the_foreign_one_is_left() -> bool:
                assert await names(podman, "--all") == await names(podman) == ["not-ours"]
                return True

            await eventually(only_the_foreign_one_is_left, timeout=PATIENCE, interval=0.2)


@asynccontextmanager
async def opened(podman: Podman, folder: Path) -> AsyncGenerator[ContainerEngine]:
    """The engine as the adapter drives it."""
    settings = load_table(ContainerSettings, tables(podman, folder, "x:1"), environ={})
    admission = Admission(None, required=False)
    async with (
        open_docker_api(settings.engine, "here") as api,
        open_container_engine(settings, admission, api) as engine,
    ):
        yield engine


def order(replica: str, *gpu_uuids: str, **parameters: str) -> ReplicaOrder:
    name = f"endpoints/real/replicas/{replica}"
    return ReplicaOrder(name, "endpoints/real", parameters, gpu_uuids, len(gpu_uuids))


async def test_what_a_real_engine_says_of_ends_and_refusals(podman: Podman, tmp_path: Path) -> None:
    async with opened(podman, tmp_path) as engine:
        ends = order("ends", code="3")
        refused = await engine.apply(
            [
                Start(ends, "exits"),
                Start(order("missing"), "missing"),
                Start(order("absent"), "absent"),
                Start(order("gpus", "GPU-1"), "exits"),
                Start(order("gpus-2", "GPU-1", code="0"), "exits"),
            ]
        )
        assert "no such file" in refused[order("missing").replica]
        assert "image is missing" in refused[order("absent").replica]
        assert "needs the parameter code" in refused[order("gpus").replica]
        assert refused[order("gpus-2").replica] == NO_GPUS

        async def ended() -> Sighting | None:
            seen = await engine.observe()
            assert seen.keys() == {ends.replica}, "of what was refused nothing is left"
            return seen[ends.replica] if seen[ends.replica].life is WorkerLife.ENDED else None

        assert await eventually(ended, timeout=PATIENCE) == Sighting(
            WorkerLife.ENDED, 3, "it ended with exit code 3"
        )
        name = container_name("here", ends.replica)
        assert await asyncio.to_thread(podman.run, "logs", name) == "last words"
        await engine.apply([Remove(ends.replica)])
        assert await engine.observe() == {}

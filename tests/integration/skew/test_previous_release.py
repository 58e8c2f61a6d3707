"""The skew policy of docs/api.md: agents, adapters, clients and databases of the previous release, and services of this one; and back.

`PREVIOUS` is the newest commit that this tree must get along with: the one of the last release's tag. Until there is one, it is the
last commit that broke the contract. To set it anew, change that one line: `git rev-parse HEAD`, on main.
"""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuscale.common.programs import PROGRAMS
from tests.support.forked import Forked
from tests.support.ports import free_port, listens
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(600)  # some thirty programs start one after the other

PREVIOUS = "95cff97"
ROOT = Path(__file__).resolve().parents[3]
CALLS = Path(__file__).with_name("calls.py")
ROOMS = (
    "protos",
    *(f"services/{room}" for room in ("common", "monitor", "allocator", "autoscaler", "gateway")),
)
SERVICES = ("fleet", "allocator", "autoscaler", "gateway")
HOST = ("agent", "adapter")
START = (
    "import sys; from gpuscale.common.programs import main; sys.argv[0] = sys.argv.pop(1); sys.exit(main())"
)


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the previous release."""
    archive = ["git", "-C", str(ROOT), "archive", PREVIOUS, "protos", "services"]
    try:
        found = subprocess.run(archive, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if found.returncode:
        pytest.skip(
            f"commit {PREVIOUS} is not in this clone, which may be shallow: {found.stderr.decode().strip()}"
        )
    folder = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as tree:
        tree.extractall(folder, filter="data")
    return folder


def environment(source: Path, config: Path) -> Mapping[str, str]:
    """Variables with which Python finds the programs of that source, and none of another one."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("GPUSCALE", "PYTHON"))}
    path = os.pathsep.join(str(source / room) for room in ROOMS)
    return {**own, "PYTHONPATH": path, "GPUSCALE_CONFIG": str(config)}


class Site:
    """Programs on one host, each of one of the two sources (`clients`); what they keep on disk stays from life to life."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clients: dict[Path, subprocess.Popen[str]] = {}
        self.at = {name: f"127.0.0.1:{free_port()}" for name in (*SERVICES, "agent")}
        self.config = folder / "gpuscale.toml"
        at = self.at
        upstreams = "".join(f'{name}_address = "{at[name]}"\n' for name in SERVICES[:3])
        tables = {
            "fleet": f'data_dir = "{folder / "fleet"}"\n',
            "allocator": f'fleet_address = "{at["fleet"]}"\ndata_dir = "{folder / "allocator"}"\n',
            "autoscaler": f'fleet_address = "{at["fleet"]}"\nallocator_address = "{at["allocator"]}"\n'
            f'data_dir = "{folder / "autoscaler"}"\n',
            "gateway": upstreams,
            "agent": f'node = "n1"\nsource = "simulated"\nsimulated_gpu_count = 4\nfleet_address = "{at["fleet"]}"\n',
            "adapter": f'node = "n1"\nautoscaler_address = "{at["autoscaler"]}"\ndata_dir = "{folder / "adapter"}"\n'
            "end_replicas = true\n",
        }
        listening = {
            name: f'[{name}]\nlisten = "{at[name]}"\n' if name in at else f"[{name}]\n" for name in tables
        }
        text = "".join(listening[name] + lines for name, lines in tables.items())
        self.config.write_text(text + '[templates.worker]\ncommand = ["/bin/sleep", "1000"]\n')

    @contextmanager
    def running(self, source: Path, *names: str) -> Iterator[list[subprocess.Popen[bytes] | Forked]]:
        """Programs of a source, until the block ends; those of this tree are forked."""
        processes: list[subprocess.Popen[bytes] | Forked] = []
        variables = environment(source, self.config)
        try:
            for name in names:
                program, file = f"gpuscale-{name}", self.folder / f"{name}.log"
                if source == ROOT:
                    processes.append(Forked(PROGRAMS[program][0], (), variables, file))
                    continue
                with file.open("ab") as log:
                    command = [sys.executable, "-c", START, program]
                    processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            yield processes
        finally:
            for one in reversed(processes):
                one.send_signal(signal.SIGTERM)
            for one in processes:
                one.wait(30)

    @contextmanager
    def client(self, source: Path) -> Iterator[None]:
        """One of a source, until the block ends."""
        command, variables = [sys.executable, CALLS, self.at["gateway"]], environment(source, self.config)
        with (self.folder / "client.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.clients[source] = process
        try:
            yield
        finally:
            process.kill()
            process.communicate()

    @asynccontextmanager
    async def services(self, source: Path) -> AsyncGenerator[None]:
        """The services of a source, once they serve."""
        with self.running(source, *SERVICES):
            for name in SERVICES:
                port = int(self.at[name].rpartition(":")[2])
                await eventually(lambda port=port: listens(port), timeout=120)  # type: ignore[misc]
            yield

    def logs(self) -> str:
        """The ends of what the programs wrote."""
        return "\n".join(f"{one.name}: {one.read_text()[-1500:]}" for one in self.folder.glob("*.log"))

    async def call(self, source: Path, step: str) -> dict[str, Any]:
        """What a client of a source comes to with a step of `calls`."""
        client = self.clients[source]
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{step}\n")
        client.stdin.flush()
        found = await asyncio.wait_for(asyncio.to_thread(client.stdout.readline), 60)
        answer: dict[str, Any] = json.loads(found or '{"failed": "it has ended"}')
        assert "failed" not in answer, f"{step}: {answer}\n{self.logs()}"
        return answer

    async def reserve(self, source: Path) -> dict[str, Any]:
        """What `reserve` comes to, once the allocator follows the fleet."""
        return await eventually(lambda: self.call(source, "reserve"), timeout=120, interval=0.5)

    async def comes_to(self, source: Path, step: str, wanted: Mapping[str, object]) -> None:
        """Wait until a step comes to this."""

        async def check() -> bool:
            found = await self.call(source, step)
            assert found == wanted, f"{found}\n{self.logs()}"
            return True

        await eventually(check, timeout=120, interval=0.5)


async def used(site: Site, services: Path, others: Path) -> int:
    """Run services of one source, hosts and clients of the other; so many decisions are left on disk, and other things."""
    async with site.services(services):
        with site.running(others, *HOST), site.client(others):
            await site.comes_to(others, "nodes", {"nodes": [["nodes/n1", "NODE_STATE_ONLINE", 4]]})
            granted = await site.reserve(others)
            assert {*granted} == {"brief", "lasting"}
            assert all(name.startswith("reservations/") for name in granted.values())
            assert await site.call(others, "held") == {"holders": ["lasting"], "gpus": [1]}
            assert await site.call(others, "unknown") == {"error": "NotFoundError"}
            assert await site.call(others, "backtest") == {"policies": ["hpa", "keda"]}
            await site.call(others, "scale")
            await site.comes_to(others, "replicas", {"states": ["STATE_READY"]})
            equal = (await site.call(others, "decisions"))["equal"]
    assert equal
    assert all(equal)
    return len(equal)


async def go_on(site: Site, decisions: int) -> None:
    """Run all of this release on what is on disk, all of which is there and works."""
    async with site.services(ROOT):
        with site.client(ROOT):
            assert await site.call(ROOT, "held") == {"holders": ["lasting"], "gpus": [1]}
            equal = (await site.call(ROOT, "decisions"))["equal"]
            assert len(equal) >= decisions
            assert all(equal)
            with site.running(ROOT, *HOST):
                await site.comes_to(ROOT, "replicas", {"states": ["STATE_READY"]})


async def test_services_of_the_previous_release_serve_ours_and_their_databases_are_migrated(
    previous: Path, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    await go_on(site, await used(site, previous, ROOT))


async def test_our_services_serve_the_previous_release_which_serves_our_databases_or_leaves_them_as_they_are(
    previous: Path, tmp_path: Path
) -> None:
    """It refuses one of a newer version; this one then goes on as if nothing had been tried."""
    site = Site(tmp_path)
    decisions = await used(site, ROOT, previous)
    with site.running(previous, "allocator", "autoscaler") as processes:
        for name, process in zip(("allocator", "autoscaler"), processes, strict=True):
            port = int(site.at[name].rpartition(":")[2])
            await eventually(
                lambda port=port, one=process: listens(port) or one.poll() is not None, timeout=120
            )  # type: ignore[misc]
            if process.poll() is not None:
                assert process.poll() == 1
                assert "version" in (tmp_path / f"{name}.log").read_text().splitlines()[-1]
    await go_on(site, decisions)

"""gpuscale on three hosts: the services on one, an agent and a process adapter on each of two, mutual TLS between all.

The hosts are network namespaces (`tests.fault.hosts.lan`). Certificates are made by `gpuscalectl certs`, tokens by
`gpuscalectl token`; the two GPUs of each host are those of the NVML double.
"""

import json
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
from pydantic import SecretStr

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.rpc.channel import ClientTls, open_channel
from tests.fault.hosts.lan import Lan, lan
from tests.support.allocator import Client
from tests.support.cli import run_cli
from tests.support.nvml_double import NvmlDouble, env_with_double
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from subprocess import Popen

SERVICES, LEFT, RIGHT = "services", "left", "right"
FLEET, ALLOCATOR, AUTOSCALER, AGENT = 7072, 7073, 7074, 7071
UTILIZATION = 80.0
_HURRIED = (sys.executable, "-m", "tests.fault.hosts.hurried")


class Hosts:
    """The three hosts and what runs there."""

    def __init__(self, hosts: Lan, folder: Path) -> None:
        self.lan = hosts
        self.folder = folder
        self.pki = folder / "pki"
        self.doubles = {name: self._double(name) for name in (LEFT, RIGHT)}
        self._allocator: Popen[bytes] | None = None

    def issue(self) -> None:
        """Certificates of all, and the token of the one who tests."""
        names = (SERVICES, LEFT, RIGHT)
        hosts = ["127.0.0.1", *(self.lan.address(name) for name in names)]
        self._ctl("certs", "init", "--dir", self.pki, *(word for host in hosts for word in ("--host", host)))
        roles = {
            "service": "operator",
            LEFT: "agent",
            RIGHT: "agent",
            "adapter": "operator",
            "tester": "viewer",
        }
        for name, role in roles.items():
            self._ctl("certs", "issue", name, "--dir", self.pki, "--role", role)
        tokens = ("--tokens-file", self.folder / "tokens.toml", "--write", self.folder / "admin.token")
        self._ctl("token", "create", "root", "--role", "admin", *tokens)
        limited = ("--certificate", "--tenant", "*", *tokens[:2])
        self._ctl("token", "limit", "service", *limited)

    def start(self) -> None:
        """Everything, in any order: who comes first waits."""
        self.start_allocator()
        self._run(SERVICES, "gpuscale.monitor.app.fleet", {"fleet": self._server(SERVICES, FLEET)})
        here = self.lan.address(SERVICES)
        autoscaler = self._server(SERVICES, AUTOSCALER) | self._caller("service")
        autoscaler |= {"data_dir": self.folder / "autoscaler", "fleet_address": f"{here}:{FLEET}"}
        autoscaler |= {"allocator_address": f"{here}:{ALLOCATOR}"}
        self._run(SERVICES, "gpuscale.autoscaler.app", {"autoscaler": autoscaler})
        for name in (LEFT, RIGHT):
            agent = self._server(name, AGENT) | self._caller(name) | {"node": name, "period_seconds": 2.0}
            agent |= {"work_socket": self.folder / f"{name}.sock"}
            agent |= {"fleet_address": f"{here}:{FLEET}", "allocator_address": f"{here}:{ALLOCATOR}"}
            self._run(name, "gpuscale.monitor.app.agent", {"agent": agent})
            adapter = self._caller("adapter") | {"node": name, "data_dir": self.folder / f"adapter-{name}"}
            adapter |= {"autoscaler_address": f"{here}:{AUTOSCALER}"}
            adapter |= {
                "agent_address": f"unix:{self.folder / name}.sock"
            }  # in plain text, whatever TLS the others want
            templates = {"templates.worker": {"command": ["/bin/sleep", "1000"]}}
            self._run(name, "gpuscale.autoscaler.adapters.main", {"adapter": adapter} | templates)

    def start_allocator(self) -> None:
        """Start it, for the first time or again."""
        settings = self._server(SERVICES, ALLOCATOR) | self._caller("service")
        settings |= {"data_dir": self.folder / "allocator"}
        settings |= {"fleet_address": f"{self.lan.address(SERVICES)}:{FLEET}"}
        self._allocator = self._run(SERVICES, "gpuscale.allocator.app", {"allocator": settings})

    def kill_allocator(self) -> None:
        """kill -9."""
        assert self._allocator is not None
        self._allocator.kill()
        self._allocator.wait()

    def logs(self) -> str:
        """What the programs wrote, for when a test fails."""
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self.folder.glob("*.log")))

    def channel(self, address: str) -> grpc.aio.Channel:
        """A channel as admin."""
        tls = ClientTls(self.pki / "ca.crt", self.pki / "tester.crt", self.pki / "tester.key")
        return open_channel(
            address, tls=tls, token=SecretStr((self.folder / "admin.token").read_text().strip())
        )

    def _run(self, name: str, module: str, tables: dict[str, dict[str, Any]]) -> "Popen[bytes]":
        file = self.folder / f"{name}-{module}.toml"
        lines = [
            line
            for table, values in tables.items()
            for line in (f"[{table}]", *(f"{key} = {_toml(value)}" for key, value in values.items()))
        ]
        file.write_text("\n".join(lines))
        environment = env_with_double(self.doubles[name]) if name in self.doubles else None
        command = (*_HURRIED, module, "--config", str(file))
        return self.lan.start(name, *command, log=file.with_suffix(".log"), environment=environment)

    def _server(self, name: str, port: int) -> dict[str, Any]:
        return {
            "listen": f"{self.lan.address(name)}:{port}",
            "tls_cert_file": self.pki / "server.crt",
            "tls_key_file": self.pki / "server.key",
            "tls_client_ca_file": self.pki / "ca.crt",
            "tokens_file": self.folder / "tokens.toml",
        }

    def _caller(self, name: str) -> dict[str, Any]:
        return {
            "ca_file": self.pki / "ca.crt",
            "cert_file": self.pki / f"{name}.crt",
            "key_file": self.pki / f"{name}.key",
        }

    def _double(self, name: str) -> NvmlDouble:
        (self.folder / name).mkdir(parents=True)
        double = NvmlDouble(self.folder / name)
        for index, gpu in enumerate(double.gpus):
            gpu.uuid = f"GPU-{name}-{index}"
            gpu.utilization_percent = round(UTILIZATION)
        double.write()
        return double

    @staticmethod
    def _ctl(*words: object) -> None:
        ran = run_cli(*map(str, words))
        assert ran.code == 0, ran.err


def _toml(value: object) -> str:
    return json.dumps(str(value) if isinstance(value, Path) else value)


class Calls:
    """Calls of a test: to the services, to the allocator as from the left host, and to that host's agent."""

    def __init__(self, near: grpc.aio.Channel, scaler: grpc.aio.Channel, fleet: grpc.aio.Channel) -> None:
        self.allocator = Client(allocator_api.AllocatorServiceStub(near), timeout=60.0)
        self.endpoints: Any = autoscaler_api.EndpointServiceStub(scaler)
        self.fleet: Any = monitor_api.FleetServiceStub(fleet)

    async def nodes(self) -> dict[str, str]:
        """The state of each node, by its id."""
        listed = await self.fleet.ListNodes(monitor_api.ListNodesRequest(), timeout=60)
        return {
            one.name.removeprefix("nodes/"): monitor_api.NodeState.Name(one.state).removeprefix("NODE_STATE_")
            for one in listed.nodes
        }

    async def replicas(self) -> dict[str, autoscaler_api.Replica]:
        """The replicas that have not ended, by the node that each is on; no node has two."""
        request = autoscaler_api.ListReplicasRequest()
        listed = [
            one for one in (await self.endpoints.ListReplicas(request, timeout=60)).replicas if one.node
        ]
        found = {one.node.removeprefix("nodes/"): one for one in listed}
        assert len(found) == len(listed), "\n".join(map(str, listed))
        return found


@contextmanager
def three_hosts(folder: Path) -> Generator[Hosts]:
    """All of it, starting."""
    with lan(SERVICES, LEFT, RIGHT) as hosts:
        site = Hosts(hosts, folder)
        site.issue()
        site.start()
        yield site


@asynccontextmanager
async def calling(site: Hosts) -> AsyncGenerator[Calls]:
    """Calls to the services, once both nodes are there."""
    here = site.lan.address(SERVICES)
    targets = [f"{here}:{port}" for port in (ALLOCATOR, AUTOSCALER, FLEET)]
    addresses = site.lan.reach(SERVICES, *targets, log=site.folder / "reach.log")
    near, scaler, fleet = (site.channel(address) for address in addresses)
    async with near, scaler, fleet:
        calls = Calls(near, scaler, fleet)

        async def both() -> bool:
            return await calls.nodes() == {LEFT: "ONLINE", RIGHT: "ONLINE"}

        await eventually(both, timeout=120.0, retry_on=(AssertionError, grpc.aio.AioRpcError))
        yield calls

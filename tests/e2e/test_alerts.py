"""Alerts fire for real: Prometheus with our rules scrapes every program, and the programs and the hardware are broken.

Times of the rules are shortened, thresholds in minutes too; nothing else of them is changed.
"""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from uuid import uuid4

import grpc
import httpx
import psutil
import pytest
from pydantic import SecretStr

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common import errors, programs
from gpuscale.common.rpc.channel import open_channel
from tests.support.allocator import Client
from tests.support.autoscaler_app import endpoint
from tests.support.fixtures import need
from tests.support.forked import Forked
from tests.support.nvml_double import NvmlDouble, env_with_double, why_unavailable, wired_gpus
from tests.support.nvml_double.double import FIELD_IDS
from tests.support.ports import free_port
from tests.support.small_disk import small_disk
from tests.support.tokens import token, write_tokens
from tests.support.up import ctl_environment
from tests.support.waiting import eventually

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "rules.yml"
PROGRAMS = ("fleet", "allocator", "autoscaler", "gateway", "dashboard", "agent", "adapter")
SLOW = {"allocator": {"GPUSCALE_FAILPOINTS": "allocator.store.before_commit=sleep:0.4"}}
"""What holds programs up from the beginning on."""
WINDOW = "20s"
SELDOM = {
    *("GpuscaleGpuMemoryErrors", "GpuscaleGpuRepairPending", "GpuscaleGpuRowsNotReplaced"),
    *("GpuscaleGpuNeedsAction", "GpuscaleGpusLeftOut"),
}
"""Of GPUs, too: errors of memory are read once in a while alone, the driver's double asks for nothing, and has no thousands of GPUs."""


def alerts_of_gpus() -> set[str]:
    """Names of all that the double can make fire."""
    return set(re.findall(r"- alert: (GpuscaleGpu\w+)", RULES.read_text(encoding="utf-8"))) - SELDOM


def shortened() -> str:
    """The rules, with all times in seconds."""
    text = re.sub(r"\bfor: \w+", "for: 1s", RULES.read_text(encoding="utf-8"))
    text = re.sub(r"\[\d+m\]", f"[{WINDOW}]", text)
    return re.sub(r"(longest_wait_seconds|silent_seconds) > \d+", r"\1 > 2", text)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as place:
        yield place


class Site:
    """All programs on one host, and Prometheus."""

    def __init__(self, folder: Path, disk: Path) -> None:
        self.double = NvmlDouble(folder)
        self.double.gpus = wired_gpus(4)
        self.double.write()
        self.at = {name: f"127.0.0.1:{free_port()}" for name in PROGRAMS}
        self.metrics = {name: f"127.0.0.1:{free_port()}" for name in PROGRAMS}
        self.disk = disk
        self.processes: dict[str, subprocess.Popen[bytes] | Forked] = {}
        self._folder = folder
        soon = (datetime.now(UTC) + timedelta(days=3)).isoformat(timespec="seconds")
        tokens = write_tokens(folder / "tokens.toml", alice="admin")
        tokens.write_text(f"{tokens.read_text()}expires = {soon}\n")
        (folder / "alice.token").write_text(token("alice"))
        (folder / "alice.token").chmod(0o600)
        (folder / "gpuscale.toml").write_text(self._settings(tokens))
        (folder / "gpuscale.toml").chmod(0o600)
        port = free_port()
        self.prometheus = f"http://127.0.0.1:{port}"
        (folder / "rules.yml").write_text(shortened())
        jobs = [
            {
                "job_name": f"gpuscale-{name}",
                "authorization": {"credentials_file": str(folder / "alice.token")},
                "static_configs": [{"targets": [address]}],
                "honor_labels": True,
                # The fleet has what the agents show of GPUs, too: it is asked for the rest.
                **({"metric_relabel_configs": [_WITHOUT_GPUS]} if name == "fleet" else {}),
            }
            for name, address in self.metrics.items()
        ]
        every = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        config = {"global": every, "rule_files": [str(folder / "rules.yml")], "scrape_configs": jobs}
        (folder / "prometheus.json").write_text(json.dumps(config))

    def _settings(self, tokens: Path) -> str:
        at, token_file = self.at, self._folder / "alice.token"
        others = "".join(f'{name}_address = "{at[name]}"\n' for name in ("fleet", "allocator", "autoscaler"))
        wanted = {
            "agent": 'source = "nvml"\nnode = "n1"\nperiod_seconds = 0.5\nsoft_deadline_seconds = 0.5\nhard_deadline_seconds = 1.0\n'
            f'fleet_address = "{at["fleet"]}"\nallocator_address = "{at["allocator"]}"\n',
            "fleet": "",
            "allocator": f'fleet_address = "{at["fleet"]}"\ndata_dir = "{self.disk}"\n',
            "autoscaler": f'fleet_address = "{at["fleet"]}"\nallocator_address = "{at["allocator"]}"\n'
            f'data_dir = "{self._folder / "autoscaler"}"\n',
            "gateway": others,
            "dashboard": f'gateway_address = "{at["gateway"]}"\n',
            "adapter": f'node = "n1"\nautoscaler_address = "{at["autoscaler"]}"\ndata_dir = "{self._folder / "adapter"}"\nend_replicas = true\n',
        }
        tables = [
            f"[{name}]\n{lines}"
            + (f'listen = "{at[name]}"\n' if name != "adapter" else "")
            + f'metrics_listen = "{self.metrics[name]}"\ntokens_file = "{tokens}"\n'
            + (f'token_file = "{token_file}"\n' if name not in {"fleet", "gateway"} else "")
            for name, lines in wanted.items()
        ]
        nowhere = f"127.0.0.1:{free_port()}"
        return "".join(tables) + (
            f'[brokers.default]\namqp_url = "amqp://a:b@{nowhere}"\nmanagement_url = "http://a:b@{nowhere}"\n'
            '[templates.worker]\ncommand = ["/bin/sleep", "1000"]\n'
            '[templates.told]\ncommand = ["/bin/sleep", "{seconds:int}"]\n'
        )

    def start(self, name: str, **environment: str) -> None:
        """Begin a life of a program: forked, but for the agent, which the system leads to the driver's double."""
        config, file = {"GPUSCALE_CONFIG": str(self._folder / "gpuscale.toml")}, self._folder / f"{name}.log"
        clean, program = ctl_environment(**config, **environment), f"gpuscale-{name}"
        if name != "agent":
            self.processes[name] = Forked(programs.PROGRAMS[program][0], (), clean, file)
            return
        clean |= {key: env_with_double(self.double)[key] for key in ("LD_LIBRARY_PATH", "NVML_DOUBLE_CONFIG")}
        with file.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [Path(sys.executable).with_name(program)], env=clean, stdout=log, stderr=log
            )

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(30)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[httpx.AsyncClient]:
        """Everything, until the block ends; yields a client of Prometheus."""
        data = f"--storage.tsdb.path={self._folder / 'tsdb'}"
        config = f"--config.file={self._folder / 'prometheus.json'}"
        address = f"--web.listen-address={self.prometheus.removeprefix('http://')}"
        try:
            for name in PROGRAMS:
                self.start(name, **SLOW.get(name, {}))
            with (self._folder / "prometheus.log").open("wb") as log:
                self.processes["prometheus"] = subprocess.Popen(
                    ["prometheus", config, data, address], stdout=log, stderr=log
                )
            async with httpx.AsyncClient(base_url=self.prometheus, trust_env=False) as client:
                yield client
        finally:
            adapter = self.processes["adapter"]
            adapter.send_signal(signal.SIGTERM)  # ends its replicas
            adapter.wait(60)
            for name in self.processes:
                self.kill(name)

    async def keep_writing(self, channel: grpc.aio.Channel) -> None:
        """Make one quota after the other, so that there is something to write."""
        quotas, name = allocator_api.QuotaServiceStub(channel), "t" * 40
        for number in count():
            quota = allocator_api.Quota(tenant=f"{name}-{number}", gpu_milli_limit=1000)
            with suppress(grpc.RpcError):
                await quotas.SetQuota(allocator_api.SetQuotaRequest(quota=quota), timeout=60)
            await asyncio.sleep(0.1)

    async def visit(self) -> None:
        """Look at the dashboard again and again: for nobody it asks for little."""
        async with httpx.AsyncClient(trust_env=False, timeout=60) as browser:
            while True:
                with suppress(httpx.HTTPError):
                    await browser.get(f"http://{self.at['dashboard']}/time")
                await asyncio.sleep(1.0)

    async def lag(self, name: str, until: asyncio.Event) -> None:
        """Stop a process for half of the time, so that its event loop is late again and again."""
        process = psutil.Process(self.processes[name].pid)
        while not until.is_set():
            process.suspend()
            await asyncio.sleep(0.6)
            process.resume()
            await asyncio.sleep(0.3)


_WITHOUT_GPUS = {"source_labels": ["__name__"], "regex": "gpuscale_(gpu|host)_.*|DCGM_.*", "action": "drop"}


async def firing(client: httpx.AsyncClient) -> set[str]:
    """Names of the alerts that fire."""
    found = (await client.get("/api/v1/alerts")).raise_for_status().json()["data"]["alerts"]
    return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


async def fired(client: httpx.AsyncClient) -> set[str]:
    """Names of the alerts that have fired since the beginning."""
    query = {"match[]": 'ALERTS{alertstate="firing"}'}
    found = (await client.get("/api/v1/series", params=query)).raise_for_status().json()["data"]
    return {one["alertname"] for one in found}


async def ask(site: Site, channel: grpc.aio.Channel) -> asyncio.Task[object]:
    """Reserve, wait for more than there is, want more replicas than GPUs, replicas that are refused, and a queue that is not there."""
    client = Client(allocator_api.AllocatorServiceStub(channel), timeout=600.0)

    endpoints = api.EndpointServiceStub(channel)

    async def reserved() -> bool:
        await endpoints.ListEndpoints(api.ListEndpointsRequest())
        return bool(await client.reserve(1, ttl=600, holder="alice"))

    await eventually(reserved, timeout=150.0, retry_on=(grpc.RpcError, errors.GpuscaleError))
    for made in (endpoint(low=4, high=4, gpus=1, name="short"), endpoint(low=1, high=1, name="told")):
        made.spec.template.template = "worker" if made.name == "endpoints/short" else "told"
        await endpoints.CreateEndpoint(api.CreateEndpointRequest(endpoint=made, request_id=str(uuid4())))
    spec = api.QueueWatcherSpec(broker="default", queue="jobs")
    watcher = api.QueueWatcher(name="watchers/jobs", spec=spec)
    await api.QueueWatcherServiceStub(channel).CreateQueueWatcher(
        api.CreateQueueWatcherRequest(queue_watcher=watcher, request_id=str(uuid4()))
    )
    return asyncio.ensure_future(client.reserve(4, wait={"seconds": 590}))


def break_gpus(double: NvmlDouble) -> None:
    """Everything that can be wrong with GPUs, on the last two of four."""
    ids = {name: number for number, name in FIELD_IDS.items()}
    sick, gone = double.gpus[2], double.gpus[3]
    sick.event_reasons = 0x20 | 0x40 | 0x80
    sick.fields[ids["pcie_replay_count"]] = 10_000
    sick.fields[ids["nvlink_recovery_error_count"]] = 7
    gone.fail("*", 15)  # GPU_IS_LOST
    double.raise_event(2, 79)


async def read_anew(agent: str) -> None:
    """Have an agent read everything at once, also what is read each 30 s."""
    async with open_channel(agent, token=SecretStr(token("alice"))) as channel:
        driver = monitor_api.DriverServiceStub(channel)
        shortly = monitor_api.ReleaseDriverRequest(reason="read anew", max_duration={"seconds": 60})
        await driver.ReleaseDriver(shortly)
        await driver.ResumeDriver(monitor_api.ResumeDriverRequest())


@pytest.mark.timeout(600)
async def test_alerts_fire_on_what_they_are_for(tmp_path: Path, disk: Path) -> None:
    need(why_unavailable())
    if shutil.which("prometheus") is None:
        need("prometheus is not installed (tools/install_test_servers.sh)")
    site = Site(tmp_path, disk)
    async with (
        site.running() as client,
        open_channel(site.at["gateway"], token=SecretStr(token("alice"))) as way,
    ):
        waiting = await ask(site, way)

        async def healthy() -> bool:
            query = {"query": 'count(up{job=~"gpuscale.*"} == 1)'}
            [one] = (await client.get("/api/v1/query", params=query)).json()["data"]["result"]
            return one["value"][1] == str(len(PROGRAMS))

        await eventually(healthy, timeout=150.0, retry_on=(ValueError, httpx.HTTPError))
        async with httpx.AsyncClient(trust_env=False, timeout=60) as browser:
            assert (await browser.get(f"http://{site.at['dashboard']}/time")).status_code == 200
        asking = asyncio.ensure_future(site.keep_writing(way))
        break_gpus(site.double)
        await read_anew(site.at["agent"])
        await until_firing(client, alerts_of_gpus())
        site.double.hold(site.double.gpus[0].rules)
        site.double.write()
        gateway = psutil.Process(site.processes["gateway"].pid)
        most, usual = gateway.num_fds() + 2, gateway.rlimit(psutil.RLIMIT_NOFILE)
        gateway.rlimit(psutil.RLIMIT_NOFILE, (most, usual[1]))
        calm = asyncio.Event()
        lag = asyncio.ensure_future(site.lag("fleet", calm))
        await until_firing(
            client,
            {
                "GpuscaleTokenEndsSoon",
                "GpuscaleDiskFillsUp",
                "GpuscaleWaitsLong",
                "GpuscaleEndpointShort",
                "GpuscaleQueuesUnreadable",
                "GpuscaleEngineFails",
                "GpuscaleCommitsSlow",
                "GpuscaleHealth",
                "GpuscaleCollectionFailing",
                "GpuscaleLoopBlocked",
                "GpuscaleDescriptorsRunOut",
                "GpuscaleThreadsHung",
            },
        )
        asking.cancel()
        calm.set()
        await lag
        gateway.rlimit(psutil.RLIMIT_NOFILE, usual)
        visiting = asyncio.ensure_future(site.visit())
        site.kill("autoscaler")
        site.kill("agent")
        of_the_killed = {
            "GpuscaleAdapterCutOff",
            "GpuscaleDashboardFails",
            "GpuscaleDown",
            "GpuscaleNodeStale",
            "GpuscaleNodeLostWithReservations",
        }
        await until_firing(client, of_the_killed)
        for one in (visiting, waiting):
            one.cancel()
        await asyncio.gather(visiting, waiting, return_exceptions=True)


async def until_firing(client: httpx.AsyncClient, wanted: set[str]) -> None:
    """Wait until all of these have fired."""

    async def all_of_them() -> bool:
        missing = wanted - await fired(client)
        assert not missing, f"did not fire: {missing}"
        return True

    await eventually(all_of_them, timeout=150.0, retry_on=(AssertionError, TimeoutError, httpx.HTTPError))

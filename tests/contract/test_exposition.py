"""/metrics of a real agent over the driver's double: what dashboards, rules and Prometheus itself expect of it."""

import inspect
import json
import re
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpuscale.allocator import app as allocator_figures
from gpuscale.autoscaler import app as autoscaler_figures
from gpuscale.autoscaler.adapters import main as adapter_figures
from gpuscale.common.rpc import meter
from gpuscale.common.rpc.meter import CallMeter, certificates_text
from gpuscale.common.runtime.metrics_text import Family, Histogram, MetricsPage
from gpuscale.common.runtime.tasks import SystemClock
from gpuscale.common.security.auth import Authenticator, Caller
from gpuscale.common.store.store import add_store
from gpuscale.dashboard import figures as dashboard_figures
from gpuscale.monitor.agent.nvml.field_values import GPM_METRICS
from gpuscale.monitor.app.fleet import open_fleet
from gpuscale.monitor.app.settings import FleetSettings
from gpuscale.monitor.exposition import agent, fleet, snapshots
from gpuscale.monitor.model.prometheus import DCGM, DCGM_CHECKED, GPU, HOST, ReadingSeries
from tests.support.certificates import Authority
from tests.support.monitor import running_agent, serve
from tests.support.nvml_double import NvmlDouble, NvmlReturn, wired_gpus
from tests.support.ports import free_port
from tests.support.promtool import named, promtool, samples, value
from tests.support.tokens import token, write_tokens
from tests.support.waiting import eventually

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus"
BOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
BOARD = dict.fromkeys(
    (
        *("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL"),
        *("DCGM_FI_DEV_FB_USED", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
    ),
    "gauge",
)
"""What dcgm-exporter's own Grafana board (12239) asks for."""
GAUGES = (
    *(
        "DCGM_FI_DEV_MEM_CLOCK",
        "DCGM_FI_DEV_MEMORY_TEMP",
        "DCGM_FI_DEV_MEM_COPY_UTIL",
        "DCGM_FI_DEV_ENC_UTIL",
    ),
    *(
        "DCGM_FI_DEV_DEC_UTIL",
        "DCGM_FI_DEV_FB_FREE",
        "DCGM_FI_DEV_FB_RESERVED",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
    ),
    *("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_PROF_GR_ENGINE_ACTIVE"),
    *("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES"),
)
COUNTERS = (
    *("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),
    *("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS"),
)
DEFAULT = BOARD | dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter")
"""Its default series (etc/default-counters.csv there) that NVML can give; NVLINK_BANDWIDTH_TOTAL, a rate, comes with the second reading after 30 s."""
# What dcgm-exporter's own names break of Prometheus' rules (docs/metrics.md); `checked` breaks none.
DCGM_BREAKS = re.compile(
    r'DCGM_FI_DEV_\w+ counter metrics should have "_total" suffix'
    r"|DCGM_FI_DEV_PCIE_REPLAY_COUNTER metric name should not include type 'counter'"
)


async def page(address: str) -> str:
    async with httpx.AsyncClient(trust_env=False) as session:
        return (await session.get(f"http://{address}/metrics")).text


@asynccontextmanager
async def metrics(
    double: NvmlDouble, fleet_address: str | None = None, **settings: object
) -> AsyncIterator[str]:
    """The address of the page of an agent that has read every GPU of the double."""
    double.write()
    address = f"127.0.0.1:{free_port()}"
    async with running_agent(fleet_address, source="nvml", metrics_listen=address, **settings):
        await eventually(
            lambda: page(address),
            lambda found: len(named(found, "gpuscale_gpu_processes")) == len(double.gpus),
        )
        yield address


def families() -> Iterator[Family]:
    """Every family that a page may have."""
    rooms = (allocator_figures, autoscaler_figures, adapter_figures, dashboard_figures)
    for module in (agent, fleet, snapshots, meter, *rooms):
        yield from (value for _, value in inspect.getmembers(module) if isinstance(value, Family))
    yield from (series.family for series in (*DCGM, *GPU, *HOST))


async def test_every_default_series_of_dcgm_that_nvml_can_give_is_there(nvml_double: NvmlDouble) -> None:
    nvml_double.gpus = wired_gpus(8)
    nvml_double.gpus[3].utilization_percent = 95
    nvml_double.gpus[3].memory_used_bytes = 5 * 2**30
    nvml_double.gpus[3].power_watts = 612.5
    nvml_double.gpus[3].activity[GPM_METRICS["tensor_activity_percent"]] = 37.5
    async with metrics(nvml_double, metrics_names="all") as address:
        for index in range(8):
            nvml_double.raise_event(index, 63)

        async def heard() -> str:
            """The page once it has all of it: a GPU that is late on a busy machine has no readings for a moment."""
            text = await page(address)
            names = "DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_PROF_DRAM_ACTIVE"
            there = (len(named(text, name)) for name in names)
            return text if min(there) == 8 else ""

        text = await eventually(heard)
    kinds = {family.name: family.type for family in text_string_to_metric_families(text)}
    for name, kind in DEFAULT.items():
        assert kinds.get(name) == kind, name
        found = named(text, name)
        assert {one.labels["gpu"] for one in found} == {str(index) for index in range(8)}, name
        assert len({one.labels["UUID"] for one in found}) == 8
        wanted = ["gpu", "UUID", "pci_bus_id", "device", "modelName", "hostname", "DCGM_FI_DRIVER_VERSION"]
        assert list(found[0].labels) == [*wanted, "DCGM_FI_DEV_SERIAL", "DCGM_FI_DEV_VBIOS_VERSION"]
    third = nvml_double.gpus[3]
    busy = {name: value(text, name, UUID=third.uuid) for name in BOARD}
    assert busy == {
        "DCGM_FI_DEV_GPU_TEMP": third.temperature_celsius,
        "DCGM_FI_DEV_POWER_USAGE": 612.5,
        "DCGM_FI_DEV_SM_CLOCK": third.sm_clock_mhz,
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.375,
        "DCGM_FI_DEV_GPU_UTIL": 95,
        "DCGM_FI_DEV_FB_USED": 5 * 1024,
    }
    memory = [value(text, f"DCGM_FI_DEV_FB_{part}", UUID=third.uuid) for part in ("FREE", "USED", "RESERVED")]
    assert sum(memory) == value(text, "DCGM_FI_DEV_FB_TOTAL", UUID=third.uuid) == 80 * 1024
    assert value(text, "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", UUID=third.uuid) == 5_000_000
    assert value(text, "DCGM_FI_DEV_XID_ERRORS", UUID=third.uuid) == 63


async def test_what_the_driver_does_not_support_has_no_series(nvml_double: NvmlDouble) -> None:
    nvml_double.gpus[1].power_watts = None
    nvml_double.gpus[1].utilization_percent = None
    async with metrics(nvml_double) as address:
        text = await page(address)
    for name in ("DCGM_FI_DEV_POWER_USAGE", "gpuscale_gpu_power_watts", "gpuscale_gpu_utilization_ratio"):
        assert {one.labels["gpu"] for one in named(text, name)} == {"0"}, name
    assert value(text, "gpuscale_gpu_absent_readings", gpu="1", reason="NOT_SUPPORTED") >= 2


async def test_no_gpu_where_the_driver_fails_is_a_visible_failure(nvml_double: NvmlDouble) -> None:
    async with metrics(nvml_double) as address:
        assert value(await page(address), "gpuscale_collection_success") == 1
        nvml_double.fail_start(NvmlReturn.DRIVER_NOT_LOADED)
        nvml_double.reload_driver()
        await eventually(
            lambda: page(address), lambda found: value(found, "gpuscale_collection_success") == 0
        )
        text = await page(address)
    assert value(text, "gpuscale_collection_gpus_expected") == 2
    assert value(text, "gpuscale_node_gpus_working") == 0
    assert not named(text, "DCGM_FI_DEV_GPU_UTIL")
    assert value(text, "gpuscale_node_gpu_problem") == 1


@asynccontextmanager
async def both_pages(double: NvmlDouble) -> AsyncIterator[tuple[str, str]]:
    """The texts of an agent's page and of its fleet's, the agent's with an XID error."""
    double.gpus = wired_gpus(2)
    listen = f"127.0.0.1:{free_port()}"
    async with (
        open_fleet(FleetSettings(metrics_listen=listen), clock=SystemClock()) as services,
        serve(*services) as fleet_address,
        metrics(double, fleet_address) as address,
    ):
        double.raise_event(0, 63)

        async def arrived() -> bool:
            text = await page(listen)  # GPM is read last of all, once it was sampled twice
            names = ("gpuscale_gpu_processes", "gpuscale_gpu_sm_activity_ratio")
            return all(len(named(text, name)) == 2 for name in names)

        async def watched() -> bool:
            pages = {"agent": await page(address), "fleet": await page(listen)}
            return all(value(pages[one], f"gpuscale_{one}_loop_lag_seconds_count") for one in pages)

        await eventually(lambda: page(address), lambda found: "gpuscale_gpu_xid_errors_total{" in found)
        await eventually(arrived)
        await eventually(watched)
        yield await page(address), await page(listen)


async def test_the_default_pages_pass_promtool_are_documented_and_have_all_that_the_stock_board_asks_for(
    nvml_double: NvmlDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuscale.monitor.app.agent.LAG_PERIOD", 0.1)
    async with both_pages(nvml_double) as pages:
        for text in pages:
            assert promtool("check", "metrics", stdin=text) == (0, "")
            for name in BOARD:
                found = named(text, name)
                assert {one.labels["gpu"] for one in found} == {"0", "1"}, name
                assert all({"UUID", "device", "pci_bus_id", "hostname"} <= one.labels.keys() for one in found)
    assert all(one.labels["node"] == "alpha" for one in named(pages[1], "DCGM_FI_DEV_GPU_UTIL"))
    assert value(pages[1], "gpuscale_fleet_nodes", state="ONLINE") == 1
    reference = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text().replace("SERVICE", "agent")
    known = {family.name for family in families()} | set(
        re.findall(r"^# TYPE (\S+) ", pages[0], re.MULTILINE)
    )
    assert len(known) > 150
    documented = set(re.findall(r"`(\w+)`", reference))
    assert known - documented == {"DCGM_FI_DEV_XID_ERRORS"}  # on the page of metrics, with its twin


@pytest.mark.parametrize(("dcgm", "status"), [(DCGM_CHECKED, 0), (DCGM, 3)], ids=["checked", "all"])
def test_promtool_finds_no_fault_in_any_family_but_in_those_of_dcgm_itself(
    dcgm: Collection[ReadingSeries], status: int
) -> None:
    """Those too that no driver's double has a reading for; 3: what it says is about style."""
    made = MetricsPage()
    of_dcgm = [series.family for series in DCGM]
    ours = (one for one in families() if one not in of_dcgm)
    for family in (*ours, *(one.family for one in dcgm)):
        if family.kind == "histogram":
            made.add_histogram(family, {}, Histogram())
        else:
            made.add(family, "", 1)
    found, said = promtool("check", "metrics", stdin=b"".join(made.chunks()).decode())
    assert [line for line in said.splitlines() if not DCGM_BREAKS.fullmatch(line)] == []
    assert found == status


def test_the_alert_rules_are_valid_and_fire_when_they_should() -> None:
    status, said = promtool("check", "rules", RULES / "rules.yml")
    assert status == 0, said
    status, said = promtool("test", "rules", RULES / "rules_test.yml")
    assert status == 0, said


def test_every_alert_is_tested() -> None:
    rules = (RULES / "rules.yml").read_text(encoding="utf-8")
    tests = (RULES / "rules_test.yml").read_text(encoding="utf-8")
    alerts: list[str] = re.findall(r"- alert: (\w+)", rules)
    assert len(alerts) > 15
    assert [alert for alert in alerts if alert not in tests] == []


def test_no_summary_of_an_alert_has_a_count_before_its_noun() -> None:
    """It would say `1 reservations`."""
    rules = (RULES / "rules.yml").read_text(encoding="utf-8")
    assert re.findall(r"\{\{ \$value (?:\| humanize )?\}\} .*", rules) == []


def expressions(board: Path) -> Iterator[str]:
    """Every query of a board, with Grafana's variables filled in."""
    text = re.sub(r"\$__rate_interval", "1m", board.read_text(encoding="utf-8"))
    text = re.sub(r"\$(node|gpu)", ".*", text)
    found = json.loads(text)
    for panel in found["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (one["expr"] for one in found["annotations"]["list"])


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_every_query_of_a_board_is_valid(board: Path, tmp_path: Path) -> None:
    queries = list(expressions(board))
    assert len(queries) > 20
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}), encoding="utf-8")
    status, said = promtool("check", "rules", path)
    assert status == 0, said


async def services_show(folder: Path) -> set[str]:
    """The series that services share."""
    tokens = write_tokens(folder / "tokens.toml", alice="viewer")
    tokens.write_text(f"{tokens.read_text()}expires = 2100-01-01T00:00:00Z\n")
    authenticator = Authenticator(tokens_file=tokens)
    authenticator.recognise(Caller(loopback=True, secure=False, authorization=[f"Bearer {token('alice')}"]))
    found: set[str] = set()
    for service in ("allocator", "autoscaler", "fleet", "gateway"):
        meter = CallMeter(service, authenticator)
        meter.ended["/M", "OK"] = meter.failed["/M", "NO_CAPACITY"] = 1
        meter.seconds["/M"].observe(1.0)

        async def stored(page: MetricsPage, prefix: str = meter.prefix) -> None:
            add_store(page, prefix, folder / "state.db")

        with meter.leading(1), meter.showing(stored):
            text = "".join([chunk.decode() async for chunk in meter.render()])
        found |= {sample.name for sample in samples(text)}
    page = certificates_text({"tls_cert_file": Authority(folder).file}).decode()
    return found | {sample.name for sample in samples(page)}


@pytest.mark.parametrize(
    "file", [*BOARDS, RULES / "rules.yml", RULES / "rules_test.yml"], ids=lambda p: p.name
)
async def test_only_series_that_exist_are_asked_for(file: Path, tmp_path: Path) -> None:
    text = re.sub(r"#.*", "", file.read_text(encoding="utf-8"))
    text = text.replace("(allocator|autoscaler)", "allocator").replace("gpuscale_[a-z]+", "gpuscale_gateway")
    used = set(
        re.findall(r"\b(?:gpuscale_[a-z]\w+|process_\w+)", text.replace("gpuscale_.*", "gpuscale_gateway"))
    )
    assert len(used) > 10
    shown = {family.name for family in families()}
    shown |= {f"{family.name}_bucket" for family in families() if family.kind == "histogram"}
    assert used - shown - await services_show(tmp_path) == set()

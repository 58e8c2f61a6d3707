"""Nodes and their GPUs."""

from collections.abc import Mapping

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.cli.console.cells import (
    ABSENT,
    Column,
    View,
    counted_models,
    duration,
    number,
    percent,
    short,
    size,
    text,
    used_of,
)
from gpuscale.cli.grammar.jsonpath import parse_path
from gpuscale.client.states import NO_MARKS, Marks, gpu_state, node_state, problem


def gpu_count(node: monitor_api.Node) -> str:
    """`8 x H100 80GB HBM3`, `4 x A100, 4 x L40`, or `4 x … SIMULATED`; `-` where GPUs cannot be read."""
    if node.snapshot.gpu_problem and not node.snapshot.gpus:
        return ABSENT
    return counted_models(node.snapshot.gpus, simulated=node.snapshot.simulated)


def _load(node: monitor_api.Node) -> str:
    host = node.snapshot.host_reading
    return " ".join(number(host, field, "{:.2f}".format) for field in ("load_1m", "load_5m", "load_15m"))


def nodes(marked: Marks = NO_MARKS, *, problems: bool = False) -> View[monitor_api.Node]:
    """The view of nodes, given what is cordoned; `problems` shows what is wrong with their GPUs where it is not wide too."""
    return View(
        "nodes",
        (
            Column("NAME", lambda node: short(node.name)),
            Column("STATE", lambda node: node_state(node, marked)),
            Column("GPUS", gpu_count),
            Column("CPU", lambda node: number(node.snapshot.host_reading, "cpu_percent", percent)),
            Column("CORES", lambda node: number(node.snapshot.host_reading, "cpu_count"), wide=True),
            Column(
                "MEMORY",
                lambda node: used_of(node.snapshot.host_reading, "memory_used_bytes", "memory_total_bytes"),
            ),
            Column("LOAD", _load),
            Column("AGE", lambda node: duration(node.snapshot, "age"), moving=True),
            Column("HOSTNAME", lambda node: text(node.snapshot.host.hostname), wide=True),
            Column("SYSTEM", lambda node: text(node.snapshot.host.operating_system), wide=True),
            Column("DRIVER", lambda node: text(node.snapshot.host.driver_version), wide=True),
            Column("AGENT", lambda node: text(node.agent_version), wide=True),
            Column("PROBLEM", lambda node: text(problem(node)), wide=not problems),
        ),
        labels=parse_path("snapshot.host.labels"),
    )


def gpu_model(gpu: types_api.Gpu) -> str:
    """Product name; a simulated GPU says so."""
    return f"{text(gpu.model)} SIMULATED" if gpu.simulated else text(gpu.model)


def gpus(holders: Mapping[str, str], marked: Marks = NO_MARKS) -> View[types_api.Gpu]:
    """The view of GPUs, given who holds the reserved ones (name of the GPU -> holder), and what is cordoned."""
    return View(
        "gpus",
        (
            Column("NODE", lambda gpu: short(gpu.name).partition("/")[0]),
            Column("GPU", lambda gpu: str(gpu.index)),
            Column("MODEL", gpu_model),
            Column("STATE", lambda gpu: gpu_state(gpu, marked)),
            Column("UTIL", lambda gpu: number(gpu.reading, "utilization_percent", percent)),
            Column("MEMORY", lambda gpu: used_of(gpu.reading, "memory_used_bytes", "memory_total_bytes")),
            Column("FREE", lambda gpu: number(gpu.reading, "memory_free_bytes", size)),
            Column("TEMP", lambda gpu: number(gpu.reading, "temperature_celsius", "{:.0f}C".format)),
            Column("POWER", lambda gpu: number(gpu.reading, "power_watts", "{:.0f}W".format)),
            Column(
                "LIMIT", lambda gpu: number(gpu.reading, "power_limit_watts", "{:.0f}W".format), wide=True
            ),
            Column("CLOCK", lambda gpu: number(gpu.reading, "sm_clock_mhz", "{:.0f}MHz".format), wide=True),
            Column("PROCESSES", lambda gpu: str(len(gpu.reading.processes)), wide=True),
            Column("HOLDER", lambda gpu: text(holders.get(gpu.name, ""))),
            Column("AGE", lambda gpu: duration(gpu.reading, "age"), moving=True),
            Column("QUARANTINE", lambda gpu: text(gpu.quarantine), wide=True),
            Column("PCI", lambda gpu: text(gpu.pci_bus_id), wide=True),
            Column("UUID", lambda gpu: gpu.uuid),
        ),
    )

"""A small site with something of each kind, and what is asked of it, for `tests.integration.allocator.restart_play`."""

from collections.abc import Sequence
from typing import Any

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from tests.integration.allocator.restarted import FOR_EVER
from tests.support.fake_fleet import gpu_message, node_message

MIB = 1024 * 1024
TENANTS = ("ann", "bob", "eve")
SPOTS = (
    "nodes/n0",
    "nodes/n1",
    "nodes/n2",
    "nodes/n0/gpus/n0-0",
    "nodes/n1/gpus/n1-1",
    "nodes/n2/gpus/gpu-parent",
)
WISHES: Sequence[dict[str, Any]] = (
    {},
    {"policy": api.PlacementPolicy.PLACEMENT_POLICY_BESTFIT},
    {"policy": api.PlacementPolicy.PLACEMENT_POLICY_FIRSTFIT},
    {"gpu_milli": 250},
    {"gpu_milli": 600},
    {"gpu_memory_bytes": 20_000 * MIB},
    {"mig_profile": "1g.10gb"},
    {"models": ["a100"]},
    {"cpu_milli": 4000, "host_memory_bytes": 10_000 * MIB},
    {"apart_from": {"app": "db"}},
    {"gpu_set": api.GpuSet.GPU_SET_MEMORY_BALANCED},
    {"member_count": 2, "gang_strategy": api.GangStrategy.GANG_STRATEGY_STRICT_SPREAD},
    {"member_count": 3, "gpu_milli": 400, "gang_strategy": api.GangStrategy.GANG_STRATEGY_PACK},
    {"member_count": 2, "cpu_milli": 2000, "gang_strategy": api.GangStrategy.GANG_STRATEGY_SPREAD},
)


def site() -> list[monitor_api.Node]:
    """Whole GPUs of two models, MIG instances, and GPUs with processes of no reservation."""
    whole = [_linked(gpu_message(f"n0-{index}", index), 4, "n0") for index in range(4)]
    older = [
        gpu_message(f"n1-{index}", index, total=40_000, free=40_000, utilization=7.0) for index in range(3)
    ]
    parts = [gpu_message(f"MIG-{index}", index, total=10_000, free=10_000) for index in range(3)]
    used = [gpu_message(f"n3-{index}", index, free=80_000 - 9_000 * index) for index in range(2)]
    for gpu in older:
        gpu.model = "Test A100"
    for gpu in whole:
        gpu.model = "Test H200"
    for part in parts:
        part.parent_uuid, part.mig_profile = "GPU-Parent", "1g.10gb"
    used[1].reading.processes.add(pid=77, memory_used_bytes=9_000 * MIB, command="strange")
    found = [
        node_message(f"n{number}", *gpus, period=FOR_EVER)
        for number, gpus in enumerate((whole, older, parts, used))
    ]
    for node, zone in zip(found, "abab", strict=True):
        node.snapshot.host.labels["zone"] = zone
        node.snapshot.host_reading.cpu_count = 32
        node.snapshot.host_reading.memory_total_bytes = 256_000 * MIB
    return found


def _linked(gpu: types_api.Gpu, count: int, node: str) -> types_api.Gpu:
    for index in range(count):
        if index != gpu.index:
            gpu.nvlinks.add(uuid=f"{node}-{index}", link_count=1 + (gpu.index + index) % 2)
    return gpu

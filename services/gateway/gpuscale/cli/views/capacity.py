"""Cordons, quotas, and nodes by how idle they are."""

from datetime import UTC, datetime

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.cli.console.cells import ABSENT, Column, View, number, percent, short, since, text
from gpuscale.cli.grammar.quantities import format_duration
from gpuscale.common import wire

WHOLE = 1000


def _until_drained(cordon: allocator_api.Cordon) -> str:
    """What is left until what is there is ended; `-` where nothing is drained."""
    if not cordon.HasField("drain_deadline"):
        return ABSENT
    left = (wire.to_datetime(cordon.drain_deadline) - datetime.now(UTC)).total_seconds()
    return format_duration(left) if left > 0 else "over"


def _gpus(milli: float) -> str:
    return f"{milli / WHOLE:g}"


CORDONS = View[allocator_api.Cordon](
    "cordons",
    (
        Column("NAME", lambda cordon: short(cordon.name)),
        Column("AGE", lambda cordon: since(cordon, "create_time"), moving=True),
        Column("DRAINED IN", _until_drained, moving=True),
        Column("THERE", lambda cordon: text(", ".join(map(short, cordon.reservations)))),
        Column("BY", lambda cordon: text(cordon.author)),
        Column("REASON", lambda cordon: text(cordon.reason)),
    ),
)
QUOTAS = View[allocator_api.Quota](
    "quotas",
    (
        Column("TENANT", lambda quota: quota.tenant),
        Column("GPUS HELD", lambda quota: _gpus(quota.gpu_milli_held)),
        Column("LIMIT", lambda quota: number(quota, "gpu_milli_limit", _gpus)),
        Column("WEIGHT", lambda quota: number(quota, "weight") if quota.HasField("weight") else "1"),
        Column("WAITING", lambda quota: str(quota.waiting_count)),
    ),
)
RANKED_NODES = View[allocator_api.RankedNode](
    "nodes",
    (
        Column("NAME", lambda node: short(node.name)),
        Column("IDLE", lambda node: f"{node.idle_gpu_count}/{node.gpu_count}"),
        Column("ENOUGH", lambda node: "yes" if node.sufficient else "no"),
        Column("UTIL", lambda node: number(node, "mean_utilization_percent", percent)),
        Column("MEMORY", lambda node: number(node, "mean_memory_percent", percent)),
        Column("BECAUSE", lambda node: text(node.message)),
    ),
)

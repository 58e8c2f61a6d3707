"""A recording as a plain dictionary, in the format of the LLM autotuner's GPU tracking.

GPUs are keyed by their index as a string, memory is in units of 2^20 bytes under the name `mb`, values have one decimal. What was never
read is absent, never zero.
"""

from collections import Counter
from collections.abc import Mapping

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import seconds

_MIB = float(1 << 20)
_METRICS: Mapping[str, tuple["monitor_api.Metric.ValueType", float]] = {
    "utilization": (monitor_api.Metric.METRIC_UTILIZATION_PERCENT, 1.0),
    "memory_used_mb": (monitor_api.Metric.METRIC_MEMORY_USED_BYTES, _MIB),
    "memory_usage_percent": (monitor_api.Metric.METRIC_MEMORY_USED_PERCENT, 1.0),
    "temperature_c": (monitor_api.Metric.METRIC_TEMPERATURE_CELSIUS, 1.0),
    "power_draw_w": (monitor_api.Metric.METRIC_POWER_WATTS, 1.0),
}


def seed_view(recording: monitor_api.Recording) -> dict[str, object]:
    """The statistics of a recording.

    GPUs are named by index ("0"), or by node and index ("host-1/0") if several nodes are recorded. Those that share an index,
    such as MIG instances, are named by UUID.
    """
    nodes = {gpu.name.split("/")[1] for gpu in recording.gpus}
    alone = len(nodes) == 1
    names = [str(gpu.index) if alone else f"{gpu.name.split('/')[1]}/{gpu.index}" for gpu in recording.gpus]
    sharing = Counter(names)
    gpu_stats: dict[str, object] = {}
    for shown, gpu in zip(names, recording.gpus, strict=True):
        by_metric = {stats.metric: stats for stats in gpu.stats}
        found: dict[str, object] = {"name": gpu.model}
        for name, (metric, unit) in _METRICS.items():
            stats = by_metric.get(metric)
            if stats is None:
                continue
            values = {"min": stats.min, "max": stats.max, "mean": stats.mean}
            figures: dict[str, float] = {key: round(value / unit, 1) for key, value in values.items()}
            if name == "utilization":
                figures["samples"] = stats.sample_count
            found[name] = figures
        gpu_stats[shown if sharing[shown] == 1 else gpu.uuid] = found
    return {
        "monitoring_duration_seconds": round(seconds(recording.duration), 1),
        "sample_count": recording.sample_count,
        "gpu_stats": gpu_stats,
    }

"""The statistics of a recording, in the shape of the LLM autotuner's monitoring data."""

from gpuscale.api.monitor import v1 as api
from gpuscale.client.recording_view import seed_view
from gpuscale.common.wire import to_duration

M = api.Metric


def stats(metric: "api.Metric", low: float, high: float, mean: float, count: int) -> api.MetricStats:
    return api.MetricStats(metric=metric, min=low, max=high, mean=mean, sample_count=count)


FULL = api.RecordedGpu(
    name="nodes/alpha/gpus/gpu-1",
    uuid="GPU-1",
    index=0,
    model="NVIDIA A100-SXM4-80GB",
    sample_count=45,
    stats=[
        stats(M.METRIC_UTILIZATION_PERCENT, 78, 95, 87.34, 45),
        stats(M.METRIC_MEMORY_USED_BYTES, 15234 * 2**20, 15678 * 2**20, 15456.2 * 2**20, 45),
        stats(M.METRIC_MEMORY_USED_PERCENT, 18.5, 19.1, 18.8, 45),
        stats(M.METRIC_TEMPERATURE_CELSIUS, 56, 62, 59.1, 45),
        stats(M.METRIC_POWER_WATTS, 245, 280, 265.3, 45),
        stats(M.METRIC_SM_CLOCK_MHZ, 1, 2, 3, 45),
    ],
)


def test_it_is_exactly_the_shape_that_scripts_know() -> None:
    recording = api.Recording(duration=to_duration(45.2), sample_count=45, gpus=[FULL])
    assert seed_view(recording) == {
        "monitoring_duration_seconds": 45.2,
        "sample_count": 45,
        "gpu_stats": {
            "0": {
                "name": "NVIDIA A100-SXM4-80GB",
                "utilization": {"min": 78.0, "max": 95.0, "mean": 87.3, "samples": 45},
                "memory_used_mb": {"min": 15234.0, "max": 15678.0, "mean": 15456.2},
                "memory_usage_percent": {"min": 18.5, "max": 19.1, "mean": 18.8},
                "temperature_c": {"min": 56.0, "max": 62.0, "mean": 59.1},
                "power_draw_w": {"min": 245.0, "max": 280.0, "mean": 265.3},
            }
        },
    }


def test_what_was_never_read_is_absent_and_not_zero() -> None:
    bare = api.RecordedGpu(name="nodes/alpha/gpus/gpu-2", index=1, model="MIG", sample_count=0)
    view = seed_view(api.Recording(gpus=[bare]))
    assert view["gpu_stats"] == {"1": {"name": "MIG"}}


def test_gpus_of_several_nodes_do_not_hide_each_other() -> None:
    other = api.RecordedGpu(name="nodes/beta/gpus/gpu-9", index=0, model="B")
    gpus = seed_view(api.Recording(gpus=[FULL, other]))["gpu_stats"]
    assert isinstance(gpus, dict)
    assert sorted(gpus) == ["alpha/0", "beta/0"]


def test_mig_instances_do_not_hide_their_gpu_whose_index_they_have() -> None:
    """An instance has the index of its GPU; two of one index would be one entry."""
    parts = [api.RecordedGpu(name="nodes/alpha/gpus/mig", uuid=f"MIG-{n}", index=0, model="1g") for n in "ab"]
    whole = api.RecordedGpu(name="nodes/alpha/gpus/gpu-2", uuid="GPU-2", index=1, model="B")
    gpus = seed_view(api.Recording(gpus=[FULL, *parts, whole]))["gpu_stats"]
    assert isinstance(gpus, dict)
    assert sorted(gpus) == ["1", "GPU-1", "MIG-a", "MIG-b"]

"""From recordings to the messages of the contract."""

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.dates import Dates
from gpuscale.monitor.history.metrics import Metric, Stats
from gpuscale.monitor.recording.model import RecordedGpu, Recording


def to_stats(metric: Metric, stats: Stats) -> monitor_api.MetricStats:
    """Figures of one metric as a message."""
    return monitor_api.MetricStats(
        metric=monitor_api.Metric.Value(f"METRIC_{metric.name}"),
        min=stats.min,
        max=stats.max,
        mean=stats.mean,
        sample_count=stats.count,
    )


def to_recording(recording: Recording, dates: Dates) -> monitor_api.Recording:
    """A recording as a message."""
    ended = recording.ended_at
    return monitor_api.Recording(
        name=f"recordings/{recording.order.id}",
        state=monitor_api.Recording.State.Value(f"STATE_{recording.state.name}"),
        interval=to_duration(recording.order.interval),
        max_duration=to_duration(recording.order.max_duration),
        start_time=dates.timestamp(recording.started_at),
        end_time=None if ended is None else dates.timestamp(ended),
        duration=to_duration(recording.duration(dates.now)),
        sample_count=recording.sample_count,
        gpus=[_to_gpu(gpu) for gpu in recording.gpus],
    )


def _to_gpu(gpu: RecordedGpu) -> monitor_api.RecordedGpu:
    return monitor_api.RecordedGpu(
        name=gpu.target.name,
        uuid=gpu.target.uuid,
        index=gpu.target.index,
        model=gpu.target.model,
        sample_count=gpu.sample_count,
        stats=[to_stats(metric, stats) for metric, stats in gpu.stats()],
    )

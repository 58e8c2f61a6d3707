"""From recordings to the messages of the contract."""

import asyncio

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration
from gpuscale.monitor.model.metrics import Metric, Stats
from gpuscale.monitor.model.recordings import RecordedGpu, Recording
from gpuscale.monitor.wire.dates import Dates

GPUS_AT_ONCE = 64
"""So many GPUs are written into a message before other work gets its turn."""


_METRICS = {metric: monitor_api.Metric.Value(f"METRIC_{metric.name}") for metric in Metric}


def to_stats(metric: Metric, stats: Stats) -> monitor_api.MetricStats:
    """Figures of one metric as a message."""
    return monitor_api.MetricStats(
        metric=_METRICS[metric],
        min=stats.min,
        max=stats.max,
        mean=stats.mean,
        sample_count=stats.count,
    )


async def to_recording(recording: Recording, dates: Dates) -> monitor_api.Recording:
    """A recording as a message."""
    ended = recording.ended_at
    message = monitor_api.Recording(
        name=f"recordings/{recording.order.id}",
        state=monitor_api.Recording.State.Value(f"STATE_{recording.state.name}"),
        interval=to_duration(recording.order.interval),
        max_duration=to_duration(recording.order.max_duration),
        start_time=dates.timestamp(recording.started_at),
        end_time=None if ended is None else dates.timestamp(ended),
        duration=to_duration(recording.duration(dates.now)),
    )
    for start in range(0, len(recording.gpus), GPUS_AT_ONCE):
        if start:
            await asyncio.sleep(0)
        message.gpus.extend(_to_gpu(gpu) for gpu in recording.gpus[start : start + GPUS_AT_ONCE])
    message.sample_count = max((gpu.sample_count for gpu in message.gpus), default=0)
    return message


def _to_gpu(gpu: RecordedGpu) -> monitor_api.RecordedGpu:
    figures = gpu.figures()
    return monitor_api.RecordedGpu(
        name=gpu.target.name,
        uuid=gpu.target.uuid,
        index=gpu.target.index,
        model=gpu.target.model,
        sample_count=figures.sample_count,
        stats=[to_stats(metric, stats) for metric, stats in figures.stats()],
    )

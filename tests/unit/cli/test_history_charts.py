"""A chart of history in a terminal."""

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.views.monitor import drawn
from gpuscale.common.wire import to_duration


def answer(*means: float | None, step: float = 10.0) -> api.QueryHistoryResponse:
    points = [
        api.HistoryPoint(start_time=Timestamp(seconds=1000 + round(step) * nth), mean=mean, sample_count=1)
        for nth, mean in enumerate(means)
        if mean is not None
    ]
    series = api.HistorySeries(
        name="nodes/alpha/gpus/gpu-a", metric=api.Metric.METRIC_POWER_WATTS, points=points
    )
    return api.QueryHistoryResponse(series=[series], step=to_duration(step))


def test_a_column_is_as_high_as_its_mean_and_blank_without_a_sample() -> None:
    lines = list(drawn(answer(400.0, 0.0, None, 200.0), 80))
    assert lines[0].endswith("power_watts")
    top, bottom = lines[1], lines[5]
    assert top.split() == ["400", "█"]
    assert bottom == f"{'0':>8} █▁ █"
    assert [line[9:13].ljust(4)[3] for line in lines[1:6]] == [" ", " ", "▄", "█", "█"]


def test_it_fits_into_the_width_however_many_points_there_are() -> None:
    lines = list(drawn(answer(*map(float, range(500))), 80))
    assert max(map(len, lines)) <= 80
    assert len(lines[5]) == 79  # and uses it
    assert lines[1].rstrip().endswith("█")


def test_a_series_without_points_has_none() -> None:
    assert list(drawn(answer(), 80)) == []

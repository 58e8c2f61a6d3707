"""Charts are plain data: what was not read is a gap, and every point says what it is."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.dashboard import charts
from gpuscale.dashboard.facts import GpuFacts

NOW = datetime(2024, 1, 1, 0, 1, tzinfo=UTC)


def at(second: int) -> Timestamp:
    return Timestamp(seconds=int(NOW.timestamp()) - 60 + second)


def gpu(node: str, index: int, utilization: float | None) -> GpuFacts:
    reading = types_api.GpuReading(utilization_percent=utilization)
    return GpuFacts(
        f"{node}/{index}", node, f"GPU-{node}-{index}", index, "H100", "OK", simulated=False, reading=reading
    )


def series_of(options: charts.Options) -> list[dict[str, object]]:
    found = options["series"]
    assert isinstance(found, list)
    return found


def values_of(options: charts.Options) -> list[object]:
    data = series_of(options)[0]["data"]
    assert isinstance(data, list)
    return [cell["value"] for cell in data]


def test_the_map_has_a_row_for_each_node_and_an_empty_cell_for_what_was_not_read() -> None:
    options = charts.map_of(
        [gpu("a", 0, 12.34), gpu("a", 1, None), gpu("b", 0, 100.0)], lambda one: one.utilization, "%", 100.0
    )
    assert values_of(options) == [[0, 0, 12.3], [1, 0, "-"], [0, 1, 100.0]]
    assert options["yAxis"] == {"type": "category", "data": ["a", "b"], "inverse": True}


def test_a_node_with_many_gpus_takes_several_rows() -> None:
    many = [gpu("a", index, 1.0) for index in range(charts.LONGEST_ROW + 2)]
    options = charts.map_of([*many, gpu("b", 0, 1.0)], lambda one: one.utilization, "%", 100.0)
    assert values_of(options)[-3:] == [[0, 1, 1.0], [1, 1, 1.0], [0, 2, 1.0]]
    assert options["yAxis"] == {"type": "category", "data": ["a", "a +1", "b"], "inverse": True}


def test_a_band_stands_on_its_smallest_value() -> None:
    point = monitor_api.HistoryPoint(start_time=at(0), min=10, max=30, mean=15, sample_count=4)
    low, spread, mean = series_of(charts.band(monitor_api.HistorySeries(points=[point]), "power", "W"))
    begin = charts.millis(at(0))
    assert (low["data"], spread["data"], mean["data"]) == ([[begin, 10]], [[begin, 20]], [[begin, 15]])


def test_a_chart_without_points_is_empty() -> None:
    assert [one["data"] for one in series_of(charts.band(None, "power", "W"))] == [[], [], []]


def decision(second: int, before: int, wanted: int, **fields: object) -> autoscaler_api.Decision:
    made = autoscaler_api.Decision(
        create_time=at(second), last_time=at(second + 2), before=before, wanted=wanted, granted=before
    )
    made.summary = str(fields.get("summary", ""))
    return made


def test_replicas_go_on_until_now_and_changes_are_marked_with_their_reason() -> None:
    endpoint = autoscaler_api.Endpoint(spec=autoscaler_api.EndpointSpec(min_replicas=1, max_replicas=9))
    decisions = [decision(30, 1, 4, summary="depth is 40"), decision(0, 1, 1)]
    wanted, granted = series_of(charts.scaling(endpoint, decisions, NOW))
    end = NOW.timestamp() * 1000
    assert wanted["data"] == [[charts.millis(at(0)), 1], [charts.millis(at(30)), 4], [end, 4]]
    assert granted["data"] == [[charts.millis(at(0)), 1], [charts.millis(at(30)), 1], [end, 1]]
    marks = wanted["markPoint"]
    assert isinstance(marks, dict)
    assert marks["data"] == [{"coord": [charts.millis(at(30)), 4], "name": "depth is 40", "value": 3}]


def test_a_signal_that_was_missing_leaves_a_gap() -> None:
    seen, missing = decision(0, 1, 1), decision(10, 1, 1)
    seen.observations.add(signal="depth", value=7)
    missing.observations.add(signal="depth")
    [line] = series_of(charts.signals([missing, seen]))
    times = [charts.millis(at(second)) for second in (0, 2, 10, 12)]
    assert line["data"] == [list(pair) for pair in zip(times, [7, 7, None, None], strict=True)]

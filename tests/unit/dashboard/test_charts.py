"""Charts are plain data: what was not read is a gap, every GPU has its place on a map, and many GPUs still fit on a screen."""

from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.autoscaler import v1 as autoscaler_api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.common.wire import to_duration
from gpuscale.dashboard import charts
from gpuscale.dashboard.charts import Options
from gpuscale.dashboard.facts import GpuSummary
from gpuscale.dashboard.pages import fleet

NOW = datetime(2024, 1, 1, 0, 1, tzinfo=UTC)


def at(second: int) -> Timestamp:
    return Timestamp(seconds=int(NOW.timestamp()) - 60 + second)


def series_of(options: charts.Options) -> list[dict[str, object]]:
    found = options["series"]
    assert isinstance(found, list)
    return found


def test_a_band_stands_on_its_smallest_value() -> None:
    point = monitor_api.HistoryPoint(start_time=at(0), min=10, max=30, mean=15, sample_count=4)
    low, spread, mean = series_of(charts.band(monitor_api.HistorySeries(points=[point]), "power", "W"))
    begin = at(0).ToMilliseconds()
    assert (low["data"], spread["data"], mean["data"]) == (((begin, 10),), ((begin, 20),), ((begin, 15),))


def test_a_chart_without_points_says_so_and_has_no_axes() -> None:
    assert [one["data"] for one in series_of(charts.band(None, "power", "W"))] == [(), (), ()]
    empty: Any = charts.signals(())
    assert (empty["title"]["text"], empty["xAxis"]["show"]) == ("signals: no values yet", False)
    sample = autoscaler_api.SignalSample(status=autoscaler_api.Observation.STATUS_OK, value=1.0)
    single: Any = charts.signals([autoscaler_api.SignalHistory(signal="a", samples=[sample])])
    assert single["xAxis"]["show"] is False, "it would span days"
    drawn: Any = charts.signals([autoscaler_api.SignalHistory(signal="a", samples=[sample, sample])])
    assert (drawn["title"]["text"], drawn["xAxis"]["show"], drawn["yAxis"]["show"]) == ("signals", True, True)


def decision(second: int, before: int, wanted: int, summary: str = "") -> autoscaler_api.Decision:
    name = f"endpoints/a/decisions/{second}"
    made = autoscaler_api.Decision(name=name, before=before, wanted=wanted, granted=before, summary=summary)
    made.create_time.CopyFrom(at(second))
    made.last_time.CopyFrom(at(second + 2))
    return made


def test_replicas_go_on_until_now_and_changes_are_marked_with_their_reason() -> None:
    endpoint = autoscaler_api.Endpoint(spec=autoscaler_api.EndpointSpec(min_replicas=1, max_replicas=9))
    decisions = [decision(30, 1, 4, summary="depth is 40"), decision(0, 1, 1)]
    wanted, granted = series_of(charts.scaling(endpoint, decisions, NOW))
    end = NOW.timestamp() * 1000
    assert wanted["data"] == ((at(0).ToMilliseconds(), 1), (at(30).ToMilliseconds(), 4), (end, 4))
    assert granted["data"] == ((at(0).ToMilliseconds(), 1), (at(30).ToMilliseconds(), 1), (end, 1))
    marks = wanted["markPoint"]
    place, leads = [at(30).ToMilliseconds(), 4], "/endpoints/a/decisions/30"
    assert marks["data"] == [{"coord": place, "name": "depth is 40", "value": 3, "to": leads}]


def test_every_sample_of_a_signal_is_drawn_and_one_that_did_not_count_leaves_a_gap() -> None:
    ok, stale = autoscaler_api.Observation.STATUS_OK, autoscaler_api.Observation.STATUS_STALE
    samples = [
        autoscaler_api.SignalSample(start_time=at(first), end_time=at(last), value=value, status=status)
        for first, last, value, status in ((0, 0, 3, ok), (2, 8, 7, ok), (10, 12, 7, stale), (14, 14, 5, ok))
    ]
    [line] = series_of(charts.signals([autoscaler_api.SignalHistory(signal="depth", samples=samples)]))
    times = [at(second).ToMilliseconds() for second in (0, 2, 8, 10, 12, 14)]
    assert line["data"] == tuple(zip(times, [3, 7, 7, None, None, 5], strict=True))


def test_the_largest_number_of_replicas_is_drawn_where_it_is_near() -> None:
    """Bounds lie on each other where they are one, and in a chart that has no values yet."""
    one = [decision(0, 1, 4)]
    for most, made, shown in ((9, one, ["min", "max"]), (1000, one, ["min"]), (0, one, ["min"]), (9, [], [])):
        endpoint = autoscaler_api.Endpoint(spec=autoscaler_api.EndpointSpec(max_replicas=most))
        wanted, _ = series_of(charts.scaling(endpoint, made, NOW))
        lines = wanted["markLine"]
        assert [one["name"] for one in lines["data"]] == shown


def points(*seconds: int) -> monitor_api.HistorySeries:
    found = [monitor_api.HistoryPoint(start_time=at(second), mean=7, sample_count=1) for second in seconds]
    return monitor_api.HistorySeries(points=found)


def test_a_line_is_broken_where_points_are_missing() -> None:
    [line] = series_of(charts.lines([("a/0", points(0, 1, 2, 30, 31))], "power", "W"))
    assert line["name"] == "a/0"
    drawn = line["data"]
    assert isinstance(drawn, tuple)
    assert [value for _, value in drawn] == [7, 7, 7, None, 7, 7]


def test_longer_steps_from_before_a_restart_are_no_gaps() -> None:
    """Steps of 10 s, a last minute that is one step, 5 s without the fleet, and then steps of 1 s."""
    before, after = ((10 * number, 10) for number in range(6)), ((125 + number, 1) for number in range(9))
    steps = [*before, (60, 60), *after]
    whole = {"min": 1, "max": 1, "mean": 1}
    points = [
        monitor_api.HistoryPoint(**whole, sample_count=n, start_time={"seconds": at}) for at, n in steps
    ]
    drawn = charts.band(monitor_api.HistorySeries(points=points), "utilization", "%")["series"]
    assert [len(one["data"]) for one in drawn] == [len(points)] * 3
    del points[2:6]
    broken = charts.band(monitor_api.HistorySeries(points=points), "utilization", "%")["series"]
    assert [len(one["data"]) for one in broken] == [len(points) + 1] * 3, "40 s of which nothing is kept"


def mapped_gpu(node: str, index: int, utilization: float | None = 1.0) -> GpuSummary:
    return GpuSummary(node, f"GPU-{node}-{index}", index, "H100", "OK", utilization=utilization)


def drawn(*gpus: GpuSummary) -> Options:
    return charts.map_of(gpus, lambda one: one.utilization, "%", 100.0)


def cells_of(options: Options) -> tuple[tuple[int, int, float | str, str], ...]:
    series = options["series"]
    found = series[0]["data"]
    assert isinstance(found, tuple)
    return found


def labels_of(options: Options, axis: str = "yAxis") -> list[str]:
    found = options[axis]
    return found["data"]


def test_a_node_is_a_row_and_what_was_not_read_is_an_empty_cell() -> None:
    options = drawn(mapped_gpu("a", 0, 12.34), mapped_gpu("a", 1, None), mapped_gpu("b", 0, 100.0))
    assert cells_of(options) == ((0, 0, 12.3, "a/0"), (1, 0, "-", "a/1"), (0, 1, 100.0, "b/0"))
    assert labels_of(options) == ["a", "b"]


def test_a_node_with_many_gpus_takes_several_rows() -> None:
    many = [mapped_gpu("a", index) for index in range(charts.LONGEST_ROW + 2)]
    options = drawn(*many, mapped_gpu("b", 0))
    assert [cell[:2] for cell in cells_of(options)[-3:]] == [(0, 1), (1, 1), (0, 2)]
    assert labels_of(options) == ["a", "a +1", "b"]


def test_many_nodes_stand_side_by_side_with_a_gap_between_them() -> None:
    nodes = 2 * charts.MOST_ROWS
    options = drawn(*(mapped_gpu(f"n{node:02}", index) for node in range(nodes) for index in range(8)))
    cells = cells_of(options)
    assert len(cells) == nodes * 8
    assert len({cell[:2] for cell in cells}) == len(cells), "no two in one place"
    assert charts.rows_of(options) == charts.MOST_ROWS
    assert [cell[0] for cell in cells if cell[3].startswith("n01/")] == list(range(9, 17))
    assert max(cell[0] for cell in cells) == len(labels_of(options, "xAxis")) - 1


def test_of_too_many_gpus_a_cell_is_the_mean_of_a_node() -> None:
    nodes = charts.MOST_CELLS // 8 + 1
    options = drawn(
        *(mapped_gpu(f"n{node:03}", index, 10.0 * index) for node in range(nodes) for index in range(8))
    )
    cells = cells_of(options)
    assert len(cells) == nodes
    assert cells[0] == (0, 0, 35.0, "n000")


def test_over_time_a_column_is_a_step_and_what_is_not_kept_is_empty() -> None:
    start = 1_700_000_000
    points = [
        monitor_api.HistoryPoint(start_time=Timestamp(seconds=start + second), mean=mean)
        for second, mean in ((0, 5.0), (20, 7.06))
    ]
    answer = monitor_api.QueryHistoryResponse(
        step=to_duration(10), start_time=Timestamp(seconds=start), end_time=Timestamp(seconds=start + 30)
    )
    lines = [("a/0", None), ("a/1", monitor_api.HistorySeries(points=points))]
    options = charts.over_time(lines, answer, "%", 100.0)
    assert cells_of(options) == ((0, 1, 5.0, "a/1"), (2, 1, 7.1, "a/1"))
    assert labels_of(options) == ["a/0", "a/1"]
    assert labels_of(options, "xAxis") == [1000 * (start + second) for second in (0, 10, 20)]


def test_what_no_history_is_kept_of_is_said() -> None:
    """As where the fleet's memory for history is used up: an empty chart alone might mean that nothing runs."""
    kept = monitor_api.QueryHistoryResponse(step=to_duration(10))
    assert fleet.history_note(kept).startswith("a point every 10 s")
    assert "no history" not in fleet.timeline_note(kept, [])
    lacking = monitor_api.QueryHistoryResponse(not_kept=["nodes/a/gpus/x", "nodes/a/gpus/y"])
    assert fleet.history_note(lacking).startswith("no history yet")
    assert fleet.timeline_note(lacking, []).endswith("; 2 have no history")


def test_labels_of_many_rows_do_not_lie_upon_each_other() -> None:
    lines = [(f"n{number}", None) for number in range(120)]
    axis = charts.over_time(lines, monitor_api.QueryHistoryResponse(), "%", 100.0)["yAxis"]
    shown = axis["axisLabel"]
    assert (shown["interval"] + 1) * charts.row_height(120) >= charts.LABEL_HEIGHT


def test_a_map_by_word_has_a_colour_for_each_of_the_most_frequent_and_one_for_the_rest() -> None:
    gpus = [mapped_gpu("a", index, float(index)) for index in range(5)]
    words = dict(zip((gpu.uuid for gpu in gpus), ("</script>", "ann", "ann", "", "bob"), strict=True))
    options: Any
    options, colours = charts.map_by(gpus, lambda gpu: words[gpu.uuid], "", kinds=("#111111",))
    assert [cell[2] for cell in cells_of(options)] == [2, 1, 1, 0, 2]
    assert colours == {"": charts.CALM, "ann": "#111111", "others": charts.QUIET}
    assert "plain(" in options["tooltip"][":formatter"], "a tooltip is HTML"

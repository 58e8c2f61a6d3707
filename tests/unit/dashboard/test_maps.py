"""Heat maps: every GPU has its place, what was not read is empty, and many GPUs still fit on a screen."""

from google.protobuf.timestamp_pb2 import Timestamp

from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.api.types import v1 as types_api
from gpuscale.common.wire import to_duration
from gpuscale.dashboard import maps
from gpuscale.dashboard.charts import Options
from gpuscale.dashboard.facts import GpuFacts


def gpu(node: str, index: int, utilization: float | None = 1.0) -> GpuFacts:
    reading = types_api.GpuReading(utilization_percent=utilization)
    return GpuFacts(
        f"{node}/{index}", node, f"GPU-{node}-{index}", index, "H100", "OK", simulated=False, reading=reading
    )


def drawn(*gpus: GpuFacts) -> Options:
    return maps.map_of(gpus, lambda one: one.utilization, "%", 100.0)


def cells_of(options: Options) -> tuple[tuple[int, int, float | str, str], ...]:
    series = options["series"]
    assert isinstance(series, list)
    found = series[0]["data"]
    assert isinstance(found, tuple)
    return found


def labels_of(options: Options, axis: str = "yAxis") -> list[str]:
    found = options[axis]
    assert isinstance(found, dict)
    return found["data"]


def test_a_node_is_a_row_and_what_was_not_read_is_an_empty_cell() -> None:
    options = drawn(gpu("a", 0, 12.34), gpu("a", 1, None), gpu("b", 0, 100.0))
    assert cells_of(options) == ((0, 0, 12.3, "a/0"), (1, 0, "-", "a/1"), (0, 1, 100.0, "b/0"))
    assert labels_of(options) == ["a", "b"]


def test_a_node_with_many_gpus_takes_several_rows() -> None:
    many = [gpu("a", index) for index in range(maps.LONGEST_ROW + 2)]
    options = drawn(*many, gpu("b", 0))
    assert [cell[:2] for cell in cells_of(options)[-3:]] == [(0, 1), (1, 1), (0, 2)]
    assert labels_of(options) == ["a", "a +1", "b"]


def test_many_nodes_stand_side_by_side_with_a_gap_between_them() -> None:
    nodes = 2 * maps.MOST_ROWS
    options = drawn(*(gpu(f"n{node:02}", index) for node in range(nodes) for index in range(8)))
    cells = cells_of(options)
    assert len(cells) == nodes * 8
    assert len({cell[:2] for cell in cells}) == len(cells), "no two in one place"
    assert maps.rows_of(options) == maps.MOST_ROWS
    assert [cell[0] for cell in cells if cell[3].startswith("n01/")] == list(range(9, 17))
    assert max(cell[0] for cell in cells) == len(labels_of(options, "xAxis")) - 1


def test_of_too_many_gpus_a_cell_is_the_mean_of_a_node() -> None:
    nodes = maps.MOST_CELLS // 8 + 1
    options = drawn(*(gpu(f"n{node:03}", index, 10.0 * index) for node in range(nodes) for index in range(8)))
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
        step=to_duration(10),
        start_time=Timestamp(seconds=start),
        end_time=Timestamp(seconds=start + 30),
    )
    lines = [("a/0", None), ("a/1", monitor_api.HistorySeries(points=points))]
    options = maps.over_time(lines, answer, "%", 100.0)
    assert cells_of(options) == ((0, 1, 5.0, "a/1"), (2, 1, 7.1, "a/1"))
    assert labels_of(options) == ["a/0", "a/1"]
    assert labels_of(options, "xAxis") == ["22:13:20", "22:13:30", "22:13:40"]


def test_labels_of_many_rows_do_not_lie_upon_each_other() -> None:
    lines = [(f"n{number}", None) for number in range(120)]
    axis = maps.over_time(lines, monitor_api.QueryHistoryResponse(), "%", 100.0)["yAxis"]
    assert isinstance(axis, dict)
    shown = axis["axisLabel"]
    assert isinstance(shown, dict)
    assert (shown["interval"] + 1) * maps.row_height(120) >= maps.LABEL_HEIGHT

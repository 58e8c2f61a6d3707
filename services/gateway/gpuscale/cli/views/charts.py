"""Charts of history in a terminal: a column is the mean of one or more steps, a blank one had no sample."""

from collections.abc import Iterator

from gpuscale.api.monitor import v1 as api
from gpuscale.cli.console.cells import short, word
from gpuscale.cli.grammar.parameters import local_text
from gpuscale.cli.views.monitor import amount
from gpuscale.common.wire import seconds, to_datetime

MARGIN = 10
"""Columns that the scale takes."""
_HEIGHT = 5
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PART = len(_BLOCKS) - 1


def drawn(answer: api.QueryHistoryResponse, width: int) -> Iterator[str]:
    """The lines of a chart for each series that has points, in so many columns."""
    step = seconds(answer.step) or 1.0
    for series in answer.series:
        if not series.points:
            continue
        first, last = (to_datetime(series.points[place].start_time) for place in (0, -1))
        per_column = max(step, ((last - first).total_seconds() + step) / (width - MARGIN))
        columns: dict[int, list[float]] = {}
        for point in series.points:
            place = int((to_datetime(point.start_time) - first).total_seconds() / per_column)
            columns.setdefault(place, []).append(point.mean)
        means = {place: sum(values) / len(values) for place, values in columns.items()}
        low, high = min(0.0, *means.values()), max(means.values())
        whole = [
            max(1, round((means[place] - low) / ((high - low) or 1.0) * _HEIGHT * _PART))
            if place in means
            else 0
            for place in range(max(means) + 1)
        ]
        yield f"{short(series.name)} {word(series, 'metric').lower()}"
        for row in reversed(range(_HEIGHT)):
            bound = high if row == _HEIGHT - 1 else low
            scale = amount(series.metric, bound) if row in {0, _HEIGHT - 1} else ""
            yield (
                f"{scale:>{MARGIN - 2}} "
                + "".join(_BLOCKS[min(_PART, max(0, level - row * _PART))] for level in whole).rstrip()
            )
        yield f"{'':{MARGIN - 1}}{local_text(first)} to {local_text(last)}"
        yield ""

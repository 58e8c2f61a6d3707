"""Pictures of backtests as SVG: replicas and queue of each policy over time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import BacktestReport, BacktestResponse

WIDTH, HEIGHT, MARGIN = 900, 120, 60
"""Of the picture of one policy, in pixels."""
_REPLICAS, _READY, _WAITING = "#1f77b4", "#9ecae1", "#d62728"


def svg(found: "BacktestResponse") -> str:
    """All policies below each other."""
    height = (HEIGHT + MARGIN) * len(found.reports) + MARGIN
    parts = [_policy(one, MARGIN / 2 + index * (HEIGHT + MARGIN)) for index, one in enumerate(found.reports)]
    legend = "".join(
        f'<text x="{MARGIN + 160 * index}" y="{height - 12}" fill="{colour}">{label}</text>'
        for index, (label, colour) in enumerate(
            [("replicas wanted", _REPLICAS), ("replicas ready", _READY), ("requests waiting", _WAITING)]
        )
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * MARGIN}" height="{height}"'
        f' font-family="sans-serif" font-size="12">\n{"".join(parts)}{legend}\n</svg>\n'
    )


def _policy(report: "BacktestReport", top: float) -> str:
    timeline = report.timeline
    most = max([*timeline.wanted, *timeline.ready, 1])
    longest = max([*timeline.waiting, 1])
    title = f"{report.name}: {report.violation_percent:.2f}% late, {report.gpu_hours:.2f} GPU hours"
    end = max([*timeline.seconds, 1.0])
    return (
        f'<g transform="translate({MARGIN},{top:.0f})">'
        f'<text x="0" y="-4">{escape(title)}</text>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>'
        f'<text x="-8" y="12" text-anchor="end" fill="{_REPLICAS}">{most}</text>'
        f'<text x="{WIDTH + 8}" y="12" fill="{_WAITING}">{longest}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{end / 3600:.1f} h</text>'
        f"{_line(timeline.seconds, timeline.waiting, end, longest, _WAITING)}"
        f"{_line(timeline.seconds, timeline.ready, end, most, _READY)}"
        f"{_line(timeline.seconds, timeline.wanted, end, most, _REPLICAS)}</g>\n"
    )


def _line(times: Sequence[float], values: Sequence[int], end: float, most: int, colour: str) -> str:
    """A line of steps: each value holds until the next."""
    points: list[str] = []
    for index, (at, value) in enumerate(zip(times, values, strict=True)):
        x, y = at / end * WIDTH, HEIGHT - value / most * HEIGHT
        if index:
            points.append(f"{x:.1f},{points[-1].partition(',')[2]}")
        points.append(f"{x:.1f},{y:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'

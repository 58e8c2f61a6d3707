"""Presets and backtests: tables, bars for a terminal, and pictures as SVG."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from xml.sax.saxutils import escape

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import Column, View, short, since, text, word
from gpuscale.cli.console.output import Output
from gpuscale.cli.grammar.parameters import format_duration
from gpuscale.client.tuning import Trial

BARS = "▁▂▃▄▅▆▇█"
BARS_WIDTH = 72
WIDTH, HEIGHT, MARGIN = 900, 120, 60
"""Of the picture of one policy, in pixels."""
_REPLICAS, _READY, _WAITING = "#1f77b4", "#9ecae1", "#d62728"

PRESETS = View[api.Preset](
    "presets",
    (
        Column("NAME", lambda preset: short(preset.name)),
        Column("WHAT", lambda preset: preset.summary),
        Column("PARAMETERS", lambda preset: text(",".join(sorted(preset.parameters))), wide=True),
    ),
)


BACKTESTS = View[api.Backtest](
    "backtests",
    (
        Column("NAME", lambda one: short(one.name)),
        Column("STATE", lambda one: word(one, "state")),
        Column("DONE", lambda one: f"{one.done_count}/{len(one.spec.policies)}"),
        Column("REQUESTS", lambda one: str(one.request_count)),
        Column("BY", lambda one: text(one.creator)),
        Column("AGE", lambda one: since(one, "create_time"), moving=True),
        Column("WHY", lambda one: text(one.message)),
    ),
)


def reports(work: float) -> View[api.BacktestReport]:
    """The view of backtests; `work` is the GPU hours of the work alone."""
    return View(
        "reports",
        (
            Column("POLICY", lambda one: one.name),
            Column("LATE", lambda one: f"{one.violation_percent:.2f}%"),
            Column("GPU-HOURS", lambda one: f"{one.gpu_hours:.2f}"),
            Column("X-WORK", lambda one: f"{one.gpu_hours / work:.2f}" if work else "-"),
            Column("P50", lambda one: _wait(one.wait_p50_seconds)),
            Column("P95", lambda one: _wait(one.wait_p95_seconds)),
            Column("P99", lambda one: _wait(one.wait_p99_seconds)),
            Column("FLAPS", lambda one: str(one.flap_count), spare=True),
            Column("CHANGES", lambda one: str(one.change_count), spare=True),
            Column("MOST", lambda one: str(one.most_replicas), spare=True),
            Column("PENDING-HOURS", lambda one: f"{one.pending_replica_hours:.2f}", spare=True),
            Column("BACKLOG-HOURS", lambda one: f"{one.backlog_hours:.2f}", wide=True),
            Column("UNSERVED", lambda one: str(one.unserved_count), wide=True),
            Column("KILLED", lambda one: str(one.killed_count), wide=True),
            Column("WASTED-STARTS", lambda one: str(one.wasted_start_count), wide=True),
        ),
    )


def tuning(trials: Mapping[str, Trial], chosen: str, work: float) -> View[api.BacktestReport]:
    """The view of policies to choose from; what is chosen has a star."""
    _, late, *others = reports(work).columns
    return View(
        "tuning",
        (
            Column("POLICY", lambda one: f"{'*' if one.name == chosen else ' '} {one.name}"),
            late,
            Column("AT-MOST", lambda one: f"{trials[one.name].most_late:.2f}%"),
            *(replace(one, spare=one.heading != "GPU-HOURS") for one in others),
        ),
    )


def report_lines(output: Output, found: api.BacktestResponse) -> list[str]:
    """A table of all policies, and the GPU hours of the work alone."""
    return [
        *output.table(found.reports, reports(found.work_gpu_hours)),
        work_line(found),
    ]


def work_line(found: api.BacktestResponse) -> str:
    """The GPU hours of the work alone."""
    return f"work alone: {found.work_gpu_hours:.2f} GPU hours; no policy can need less"


def picture_lines(found: api.BacktestResponse) -> list[str]:
    """Replicas and queue of each policy over time, as bars."""
    lines: list[str] = []
    for one in found.reports:
        most = max(one.timeline.waiting, default=0)
        lines += [
            "",
            one.name,
            f"  replicas  {bars(one.timeline.wanted)}  to {one.most_replicas}",
            f"  waiting   {bars(one.timeline.waiting)}  to {most}",
        ]
    return lines


def bars(values: Sequence[int], width: int = BARS_WIDTH) -> str:
    """A line of bars, each as high as the largest of its values."""
    most = max(values, default=0)
    count = min(width, len(values))
    parts = (values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count))
    return "".join(BARS[round(max(part) / most * (len(BARS) - 1)) if most > 0 else 0] for part in parts)


def _wait(value: float) -> str:
    return f"{value:.1f}s" if value < 100 else format_duration(value)


def svg(found: api.BacktestResponse) -> str:
    """A picture of replicas and queue over time, all policies below each other."""
    height = (HEIGHT + MARGIN) * len(found.reports) + MARGIN
    parts: list[str] = []
    for index, report in enumerate(found.reports):
        timeline, top = report.timeline, MARGIN / 2 + index * (HEIGHT + MARGIN)
        most = max([*timeline.wanted, *timeline.ready, 1])
        longest, end = max([*timeline.waiting, 1]), max([*timeline.seconds, 1.0])
        title = f"{report.name}: {report.violation_percent:.2f}% late, {report.gpu_hours:.2f} GPU hours"
        parts.append(
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


def _line(times: Sequence[float], values: Sequence[int], end: float, most: int, colour: str) -> str:
    """A stepped line: each value holds until the next."""
    points: list[str] = []
    for index, (at, value) in enumerate(zip(times, values, strict=True)):
        x, y = at / end * WIDTH, HEIGHT - value / most * HEIGHT
        if index:
            points.append(f"{x:.1f},{points[-1].partition(',')[2]}")
        points.append(f"{x:.1f},{y:.1f}")
    return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'

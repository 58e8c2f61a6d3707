"""Presets, evaluations and backtests: columns, and lines for a person."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import Column, View, text
from gpuscale.cli.grammar.quantities import format_duration
from gpuscale.common.wire import seconds

if TYPE_CHECKING:
    from gpuscale.cli.console.output import Output

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 72
DEFAULT_TICK = 15.0
"""Seconds from one evaluation to the next of an endpoint that states none."""

PRESETS = View[api.Preset](
    "presets",
    (
        Column("NAME", lambda preset: preset.name),
        Column("WHAT", lambda preset: preset.summary),
        Column("PARAMETERS", lambda preset: text(",".join(sorted(preset.parameters))), wide=True),
    ),
)


def reports(work: float) -> View[api.BacktestReport]:
    """The columns of backtests; `work`: the GPU hours of the work alone."""
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
            Column("FLAPS", lambda one: str(one.flap_count)),
            Column("CHANGES", lambda one: str(one.change_count)),
            Column("MOST", lambda one: str(one.most_replicas)),
            Column("PENDING-HOURS", lambda one: f"{one.pending_replica_hours:.2f}"),
            Column("BACKLOG-HOURS", lambda one: f"{one.backlog_hours:.2f}", wide=True),
            Column("UNSERVED", lambda one: str(one.unserved_count), wide=True),
            Column("KILLED", lambda one: str(one.killed_count), wide=True),
            Column("WASTED-STARTS", lambda one: str(one.wasted_start_count), wide=True),
        ),
    )


def report_lines(output: "Output", found: api.BacktestResponse) -> list[str]:
    """A table of all policies beside the work alone."""
    work = found.work_gpu_hours
    return [
        *output.table(found.reports, reports(work)),
        f"work alone: {work:.2f} GPU hours; no policy can need less",
    ]


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


def bars(values: Sequence[int], width: int = WIDTH) -> str:
    """A line of bars, each for the most of its part of the values."""
    most = max(values, default=0)
    count = min(width, len(values))
    parts = (values[len(values) * i // count : len(values) * (i + 1) // count] for i in range(count))
    return "".join(BARS[round(max(part) / most * (len(BARS) - 1)) if most > 0 else 0] for part in parts)


def evaluation_lines(found: api.EvaluateResponse) -> list[str]:
    """What the count would be otherwise, and when it may change."""
    wanted = found.decision.wanted
    lines = [f"  would be {one.wanted} if {one.text}" for one in found.alternatives]
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        lines.append(f"  may go to {found.next_change.wanted} in {wait}, if signals stay as they are")
    elif not lines:
        lines.append(f"  stays at {wanted} while signals stay as they are")
    return lines


def outlook_lines(endpoint: api.Endpoint, found: api.EvaluateResponse) -> list[str]:
    """What would change the count of an endpoint, and when it may change next."""
    seen = found.decision.observations
    absent = [one.signal for one in seen if one.status != api.Observation.STATUS_OK]
    told = [one.signal for one in seen if one.status == api.Observation.STATUS_OK]
    lines = ["what would change it:"]
    lines += [f"  it would be {one.wanted} if {one.text}" for one in found.alternatives]
    if absent:
        lines.append(f"  {', '.join(absent)}: rules that need it hold until it can be had again")
    if told and not endpoint.spec.paused:
        lines.append(f"  other values of {', '.join(told)}, as its rules say")
    if len(lines) == 1:
        lines.append("  a person: gpuscalectl scale endpoint, or another spec")
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        when = f"to {found.next_change.wanted} in {wait}, if signals stay as they are"
    else:
        tick = seconds(endpoint.spec.tick) or DEFAULT_TICK
        when = f"when they do: they are read every {format_duration(tick)}"
    return [*lines, f"when it may next change: {when}"]


def _wait(value: float) -> str:
    return f"{value:.1f}s" if value < 100 else format_duration(value)

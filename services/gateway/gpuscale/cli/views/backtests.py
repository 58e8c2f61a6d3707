"""Presets and backtests as tables."""

from collections.abc import Mapping
from dataclasses import replace

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import Column, View, short, since, text, word
from gpuscale.cli.console.output import Output
from gpuscale.cli.grammar.parameters import format_duration
from gpuscale.client.tuning import Trial

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


def _wait(value: float) -> str:
    return f"{value:.1f}s" if value < 100 else format_duration(value)

"""`gpuscalectl backtest`: what policies would have made of a workload."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.workload import Workload, preset_names, run
from gpuscale.cli.console.output import Format, to_dict, write_lines
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.typed import takes
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import BacktestPolicy

BARS = "-"
"""In place of a file: the picture as bars, below the table."""


@takes("workload", Workload)
def backtest(
    context: typer.Context,
    workload: Workload,
    file: Annotated[
        list[str] | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Policies, or endpoints as for apply; may be repeated."
        ),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A preset, beside those in files; `all` for every one."),
    ] = None,
    share_gpus: Annotated[
        bool,
        typer.Option(
            "--share-gpus",
            help="Run all policies at once, beside each other on --max-gpus; the first come first.",
        ),
    ] = False,
    trace_of: Annotated[
        list[str] | None,
        typer.Option(metavar="POLICY=FILE", help="A trace for one policy alone; may be repeated."),
    ] = None,
    plot: Annotated[
        str, typer.Option(metavar="FILE", help="Draw replicas and queue as SVG; - for bars below the table.")
    ] = "",
) -> None:
    """Run policies on a recorded workload: waits beyond the goal, GPU hours, flaps, beside the work alone."""
    from gpuscale.cli.views.asking import picture_lines, report_lines
    from gpuscale.cli.views.plot import svg

    if not file and not preset:
        raise InvalidArgumentError("there is no policy: pass --file, or --preset")
    policies = _policies(file or [])
    request = workload.request()
    request.shared_gpus = share_gpus
    session = session_of(context)
    with session.connect() as client:
        policies += [_preset(name) for name in preset_names(client, preset or [])]
        _give_traces(policies, trace_of or [])
        found = run(client, request, policies)
    if plot and plot != BARS:
        _write(Path(plot), svg(found))
    output = session.output
    if output.human:
        write_lines([*report_lines(output, found), *(picture_lines(found) if plot == BARS else ())])
    elif output.format is Format.NAME:
        write_lines([one.name for one in found.reports])
    else:
        output.write_data(to_dict(found))


def _policies(files: list[str]) -> "list[BacktestPolicy]":
    from gpuscale.cli.commands.apply import read
    from gpuscale.cli.manifests.policies import parse_policies

    return [one for name in files for text, source in read(name) for one in parse_policies(text, source)]


def _give_traces(policies: "list[BacktestPolicy]", typed: list[str]) -> None:
    from gpuscale.cli.commands.workload import read_workload

    by_name = {policy.name: policy for policy in policies}
    for text in typed:
        name, _, file = text.partition("=")
        if name not in by_name or not file:
            raise typer.BadParameter(f"{text!r} names no policy and trace; write it like POLICY=FILE")
        by_name[name].workload.CopyFrom(read_workload(file))


def _preset(name: str) -> "BacktestPolicy":
    from gpuscale.api.autoscaler import v1 as api

    return api.BacktestPolicy(name=name, preset=api.PresetWish(preset=name))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from error
    note(f"{path} written")

"""`gpuscalectl tune`: the policy that meets a goal on a recorded workload with the fewest GPU hours."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.workload import Workload, run
from gpuscale.cli.console.output import Format, dump_yaml, to_dict, write_lines
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.typed import takes
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuscale.api.autoscaler.v1 import BacktestPolicy, BacktestResponse
    from gpuscale.client import Client

BATCH = 8
"""Policies of one call."""


@takes("workload", Workload)
def tune(
    context: typer.Context,
    workload: Workload,
    late: Annotated[
        float, typer.Option(min=0, max=100, help="Percent of requests that may wait longer.")
    ] = 1.0,
    watcher: Annotated[
        str, typer.Option(metavar="NAME", help="Queue watcher of the policy's signals.")
    ] = "jobs",
    template: Annotated[str, typer.Option(metavar="NAME", help="Command template of a replica.")] = "worker",
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each replica.")] = 1,
    min_replicas: Annotated[int, typer.Option("--min", min=0, help="Fewest replicas.")] = 1,
    max_replicas: Annotated[
        int | None,
        typer.Option("--max", min=1, help="Most replicas; as many as there are GPUs when not given."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the endpoint that is written.")] = "",
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the policy there, for apply -f.", show_default=False),
    ] = None,
) -> None:
    """Search families of policies and their parameters for the cheapest that meets the goal, and write it."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.commands import tuning
    from gpuscale.cli.commands.preset import manifest
    from gpuscale.cli.console.resources import full_name
    from gpuscale.cli.views.asking import report_lines
    from gpuscale.common import names

    wish = api.PresetWish(
        watcher=full_name(names.WATCHER, watcher),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        template=api.ReplicaTemplate(template=template, gpu_count=gpus),
    )
    session = session_of(context)
    with session.connect() as client:
        found = _run(client, workload, list(tuning.candidates(wish, workload.goal, workload.slots)))
    chosen = tuning.choose(found.reports, late)
    made = manifest(name or watcher, chosen.spec)
    shown = api.BacktestResponse(reports=tuning.pareto(found.reports), work_gpu_hours=found.work_gpu_hours)
    if write is not None:
        _write(write, made)
    output = session.output
    if output.human:
        short = f"none has at most {late:g}% late; the fewest: " if chosen.violation_percent > late else ""
        write_lines([*report_lines(output, shown), f"{short}{chosen.name}"])
    elif output.format is Format.NAME:
        write_lines([chosen.name])
    else:
        output.write_data(
            {"pareto": [to_dict(one) for one in shown.reports], "chosen": chosen.name, "policy": made}
        )


def _run(client: "Client", workload: Workload, policies: "Sequence[BacktestPolicy]") -> "BacktestResponse":
    """The reports of all policies, a batch a call."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.commands import tuning

    request, found = workload.request(), api.BacktestResponse()
    for batch in tuning.batches(policies, BATCH):
        part = run(client, request, list(batch))
        found.reports.extend(part.reports)
        found.work_gpu_hours = part.work_gpu_hours
        note(f"{len(found.reports)} of {len(policies)} policies run")
    return found


def _write(path: Path, made: object) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            dump_yaml(made, file)
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror}") from error
    note(f"{path} written; apply it with: gpuscalectl apply -f {path}")

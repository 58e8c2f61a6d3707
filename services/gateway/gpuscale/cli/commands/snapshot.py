"""`gpuscalectl snapshot`: what a host's own agent reads, without the fleet between."""

from typing import Annotated

import typer

from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.grammar.options import duration


def snapshot(
    context: typer.Context,
    max_age: Annotated[
        float,
        typer.Option(parser=duration, metavar="DURATION", help="Oldest reading that will do."),
    ] = 5.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Read now, whatever was read before.")] = False,
) -> None:
    """Show the GPUs of one host, asked of the agent at --address; a reading of the last 5 s is not taken again."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views import monitor
    from gpuscale.common.wire import to_duration

    session = session_of(context)
    request = api.GetSnapshotRequest(max_age=to_duration(0.0 if fresh else max_age))
    with session.connect() as client:
        found = client.agent.GetSnapshot(request).snapshot
    if not session.output.human:
        session.output.write_data(to_dict(found))
        return
    session.output.write_list(found.gpus, monitor.gpus({}))
    if found.gpu_problem:
        note(f"{found.node}: {found.gpu_problem}")

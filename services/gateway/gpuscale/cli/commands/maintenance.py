"""`gpuscalectl cordon`, `uncordon`, `drain`, `clear` and `driver`: nodes and GPUs out of use, and back."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import to_dict, write_lines
from gpuscale.cli.console.session import Session, session_of
from gpuscale.cli.console.several import Done, named, say_each
from gpuscale.cli.grammar.options import duration

if TYPE_CHECKING:
    from gpuscale.api.monitor.v1 import Node
    from gpuscale.client import Client

Spots = Annotated[
    list[str],
    typer.Argument(
        metavar="[node|gpu] NAME...", help="NODE, NODE/INDEX, NODE/UUID or UUID.", show_default=False
    ),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for others to read.")]


def cordon(context: typer.Context, name: Spots, reason: Reason = "") -> None:
    """Let nothing new onto nodes or GPUs; what is there stays."""
    from gpuscale.api.allocator import v1 as api

    def put(client: "Client", full: str) -> Done:
        found = client.nodes.CordonNode(api.CordonNodeRequest(name=full, reason=reason)).cordon
        return Done(full, f"{found.name} cordoned", to_dict(found))

    def check(client: "Client", full: str) -> None:
        client.nodes.CordonNode(api.CordonNodeRequest(name=full, validate_only=True))

    session = session_of(context)
    say_each(session, "cordons", _names(session, name), put, check)


def uncordon(context: typer.Context, name: Spots) -> None:
    """Lift cordons, and with them drains."""
    from gpuscale.api.allocator import v1 as api

    def lift(client: "Client", full: str) -> Done:
        client.nodes.UncordonNode(api.UncordonNodeRequest(name=full))
        return named(full, "uncordoned")

    def check(client: "Client", full: str) -> None:
        client.nodes.UncordonNode(api.UncordonNodeRequest(name=full, validate_only=True))

    session = session_of(context)
    say_each(session, "cordons", _names(session, name), lift, check)


def drain(
    context: typer.Context,
    name: Spots,
    grace: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="DURATION",
            help="How long holders have to leave; 10 minutes when not given.",
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """Cordon nodes or GPUs, tell the holders of what is there to leave, and end at the deadline what is left."""
    from gpuscale.api.allocator import v1 as api
    from gpuscale.cli.console.cells import short
    from gpuscale.common.wire import to_duration

    def empty(client: "Client", full: str) -> Done:
        found = client.nodes.DrainNode(
            api.DrainNodeRequest(
                name=full, reason=reason, grace=None if grace is None else to_duration(grace)
            )
        )
        leaving = ", ".join(f"{short(one.name)} of {one.holder}" for one in found.reservations)
        line = f"{found.cordon.name} drains; to leave: {leaving or 'nobody'}"
        return Done(full, line, to_dict(found.cordon))

    def check(client: "Client", full: str) -> None:
        client.nodes.DrainNode(api.DrainNodeRequest(name=full, validate_only=True))

    session = session_of(context)
    say_each(session, "cordons", _names(session, name), empty, check)


clear_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
driver_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@clear_app.command("quarantine")
def clear_quarantine(
    context: typer.Context,
    name: Annotated[
        list[str],
        typer.Argument(metavar="GPU...", help="NODE/INDEX, NODE/UUID or UUID.", show_default=False),
    ],
) -> None:
    """Let work onto quarantined GPUs again; a fault that lasts no longer keeps it away until it begins anew."""
    from gpuscale.api.monitor import v1 as api

    def clear(client: "Client", full: str) -> Done:
        found = client.health.ClearQuarantine(api.ClearQuarantineRequest(name=full)).health_events
        line = f"{full} was not quarantined" if not found else f"{full} is out of quarantine"
        return Done(full, line, {"name": full, "healthEvents": [to_dict(event) for event in found]})

    session = session_of(context)
    say_each(session, "gpus", _names(session, ["gpus", *name]), clear)


@clear_app.command("fence")
def clear_fence(
    context: typer.Context,
    gpu: Annotated[list[str], typer.Argument(metavar="UUID...", show_default=False)],
) -> None:
    """Have the agent at --address forget the fences of GPUs, and what was admitted on them.

    For when the allocator lost its state and gives lower fences than before: the agent refuses these as of holders whose
    lease is over. Needs role admin.
    """
    from gpuscale.api.monitor import v1 as api

    def reset(client: "Client", uuid: str) -> Done:
        client.work.ResetFences(api.ResetFencesRequest(gpu_uuids=[uuid]))
        return named(uuid, "has no fence now")

    say_each(session_of(context), "gpus", gpu, reset)


@driver_app.command("release")
def driver_release(
    context: typer.Context,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for others to read.", show_default=False)],
    longest: Annotated[
        float, typer.Option("--for", parser=duration, metavar="DURATION", help="Longest time, at most 1h.")
    ] = 600.0,
) -> None:
    """Let the agent at --address close the GPU driver, so that GPUs can be reset or the driver be changed."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.common.wire import to_datetime, to_duration

    session = session_of(context)
    request = api.ReleaseDriverRequest(max_duration=to_duration(longest), reason=reason)
    with session.connect() as client:
        answer = client.driver.ReleaseDriver(request)
    if session.output.human:
        until = to_datetime(answer.resume_time).astimezone()
        write_lines([f"driver released until {until:%H:%M:%S}; sooner: gpuscalectl driver resume"])
    else:
        session.output.write_data(to_dict(answer))


@driver_app.command("resume")
def driver_resume(context: typer.Context) -> None:
    """Let the agent at --address open the GPU driver again before the time is over."""
    from gpuscale.api.monitor import v1 as api

    session = session_of(context)
    with session.connect() as client:
        answer = client.driver.ResumeDriver(api.ResumeDriverRequest())
    if session.output.human:
        write_lines(["driver resumed" if answer.was_released else "the driver was not released"])
    else:
        session.output.write_data(to_dict(answer))


def _names(session: Session, typed: list[str]) -> list[str]:
    """Resource names of nodes and GPUs, which may stand behind their noun."""
    from gpuscale.cli.console import resources

    noun, rest = resources.without_noun(typed, "nodes", "gpus")

    def nodes() -> "list[Node]":
        with session.connect() as client:
            return resources.nodes(client)

    return resources.spots(nodes, rest, noun)

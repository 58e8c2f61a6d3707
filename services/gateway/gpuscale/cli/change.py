"""`gpuscalectl delete` and `scale`: changes to one thing that exists."""

import sys
from typing import Annotated

import typer

from gpuscale.cli.options import Name
from gpuscale.cli.output import Format, write_lines
from gpuscale.cli.session import note, session_of
from gpuscale.cli.terminal import ask
from gpuscale.common.errors import InvalidArgumentError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

delete_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
scale_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@delete_app.command("endpoint")
def delete_endpoint(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Delete an endpoint; its replicas finish their work first."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.common import names

    full = full_name(names.ENDPOINT, name)
    confirm(full, yes=yes)
    with session_of(context).connect() as client:
        client.endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=full))
    deleted(context, full, "is deleted once its replicas have finished")


@delete_app.command("watcher")
def delete_watcher(context: typer.Context, name: Name, yes: Yes = False) -> None:
    """Delete a queue watcher that no endpoint reads."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.common import names

    full = full_name(names.WATCHER, name)
    confirm(full, yes=yes)
    with session_of(context).connect() as client:
        client.queue_watchers.DeleteQueueWatcher(api.DeleteQueueWatcherRequest(name=full))
    deleted(context, full, "deleted")


def confirm(name: str, *, yes: bool) -> None:
    """Ask whether something is to be deleted; ends the program where it is not."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"nobody can be asked whether to delete {name}: pass --yes")
    if not ask(f"Delete {name}?"):
        note("nothing deleted")
        raise typer.Exit(1)


def deleted(context: typer.Context, name: str, what: str) -> None:
    """Say that something is deleted."""
    output = session_of(context).output
    if output.human:
        write_lines([f"{name} {what}"])
    elif output.format is Format.NAME:
        write_lines([name])
    else:
        output.write_data({"name": name})


@scale_app.command("endpoint")
def scale_endpoint(
    context: typer.Context,
    name: Name,
    replicas: Annotated[
        int, typer.Option(min=0, help="How many to aim at; rules go on from there.", show_default=False)
    ],
    current_replicas: Annotated[
        int | None, typer.Option(min=0, help="Only if so many are aimed at now.")
    ] = None,
) -> None:
    """Set how many replicas an endpoint aims at, within its bounds."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.resources import full_name
    from gpuscale.cli.views.autoscaler import ENDPOINTS
    from gpuscale.common import names

    request = api.SetReplicasRequest(
        name=full_name(names.ENDPOINT, name), replicas=replicas, current_replicas=current_replicas
    )
    session = session_of(context)
    with session.connect() as client:
        endpoint = client.endpoints.SetReplicas(request).endpoint
    session.output.write_one(endpoint, ENDPOINTS)

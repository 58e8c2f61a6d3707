"""`gpuscalectl delete` and `scale`: changes to what exists."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.session import note, session_of
from gpuscale.cli.console.several import Done, named, say_each
from gpuscale.cli.console.terminal import ask
from gpuscale.cli.grammar.options import Name, SomeNames
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.client import Client

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

delete_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
scale_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@delete_app.command("endpoint")
def delete_endpoint(context: typer.Context, name: SomeNames, yes: Yes = False) -> None:
    """Delete endpoints; their replicas finish their work first."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names

    def delete(client: "Client", full: str) -> Done:
        client.endpoints.DeleteEndpoint(api.DeleteEndpointRequest(name=full))
        return named(full, "is deleted once its replicas have finished")

    def check(client: "Client", full: str) -> None:
        client.endpoints.GetEndpoint(api.GetEndpointRequest(name=full))

    wanted = [full_name(names.ENDPOINT, one) for one in name]
    confirm(", ".join(wanted), yes=yes)
    say_each(session_of(context), "endpoints", wanted, delete, check)


@delete_app.command("watcher")
def delete_watcher(context: typer.Context, name: SomeNames, yes: Yes = False) -> None:
    """Delete queue watchers that no endpoint reads."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names

    def delete(client: "Client", full: str) -> Done:
        client.queue_watchers.DeleteQueueWatcher(api.DeleteQueueWatcherRequest(name=full))
        return named(full, "deleted")

    def check(client: "Client", full: str) -> None:
        client.queue_watchers.GetQueueWatcher(api.GetQueueWatcherRequest(name=full))

    wanted = [full_name(names.WATCHER, one) for one in name]
    confirm(", ".join(wanted), yes=yes)
    say_each(session_of(context), "queueWatchers", wanted, delete, check)


def confirm(name: str, *, yes: bool) -> None:
    """Ask whether something is to be deleted; ends the program where it is not."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidArgumentError(f"nobody can be asked whether to delete {name}: pass --yes")
    if not ask(f"Delete {name}?"):
        note("nothing deleted")
        raise typer.Exit(1)


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
    capability_set: Annotated[
        str, typer.Option(metavar="ID", help="The capability set that is meant, where there are some.")
    ] = "",
) -> None:
    """Set how many replicas an endpoint aims at, within its bounds; of one with capability sets, how many of one set."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.cli.views.autoscaler import ENDPOINTS
    from gpuscale.common import names

    request = api.SetReplicasRequest(
        name=full_name(names.ENDPOINT, name),
        replicas=replicas,
        current_replicas=current_replicas,
        capability_set=capability_set,
    )
    session = session_of(context)
    with session.connect() as client:
        endpoint = client.endpoints.SetReplicas(request).endpoint
    session.output.write_one(endpoint, ENDPOINTS)

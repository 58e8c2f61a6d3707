"""`gpuscalectl start`, `stop` and `delete recording`: recordings that no command of theirs waits for."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.commands.change import Yes, confirm
from gpuscale.cli.commands.recorded import LONGEST_SECONDS, RECORDING, Wanted, begin, write
from gpuscale.cli.console.session import session_of
from gpuscale.cli.console.several import Done, named, say_each
from gpuscale.cli.grammar.options import Name, SomeNames, duration
from gpuscale.cli.grammar.typed import takes

if TYPE_CHECKING:
    from gpuscale.client import Client

start_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
stop_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@start_app.command("recording")
@takes("wanted", Wanted)
def start_recording(
    context: typer.Context,
    wanted: Wanted,
    name: Annotated[str, typer.Argument(metavar="[NAME]", show_default=False)] = "",
    limit: Annotated[
        float,
        typer.Option(
            "--for",
            parser=duration,
            metavar="DURATION",
            help="It ends by itself after this time.",
            show_default="7d",
        ),
    ] = LONGEST_SECONDS,
) -> None:
    """Begin to record what GPUs do, until `stop recording`.

    Without --gpu, --node and --reservation: the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else those of this host.
    """
    from gpuscale.cli.views.observed import RECORDINGS

    session, key = session_of(context), name.removeprefix("recordings/")
    with session.connect() as client:
        names, uuids = wanted.targets(client)
        recording = begin(client, names, uuids, interval=wanted.interval, longest=limit, key=key)
    session.output.write_one(recording, RECORDINGS)


@stop_app.command("recording")
def stop_recording(context: typer.Context, name: Name) -> None:
    """End a recording and print its figures; one that has ended stays as it is."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import full_name

    session, full = session_of(context), full_name(RECORDING, name)
    with session.connect() as client:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=full)).recording
    write(session, recording)


def delete_recording(context: typer.Context, name: SomeNames, yes: Yes = False) -> None:
    """Delete recordings; one that runs ends."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import full_name

    def delete(client: "Client", full: str) -> Done:
        client.recordings.DeleteRecording(api.DeleteRecordingRequest(name=full))
        return named(full, "deleted")

    def check(client: "Client", full: str) -> None:
        client.recordings.GetRecording(api.GetRecordingRequest(name=full))

    wanted = [full_name(RECORDING, one) for one in name]
    confirm(", ".join(wanted), yes=yes)
    say_each(session_of(context), "recordings", wanted, delete, check)

"""`gpuscalectl record`, `start recording`, `stop recording` and `delete recording`: what GPUs did in a span of time."""

import os
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gpuscale.cli.commands.processes import STDERR, Forwarding, exit_code, start
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import command, names, names_of, one_name
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note
from gpuscale.cli.grammar.formats import Format
from gpuscale.cli.grammar.parameters import DURATION, YES, option, repeated, shared, takes
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client

LONGEST_SECONDS = 604_800.0
"""A recording ends by itself after 7 d."""


@dataclass(frozen=True)
class Wanted:
    """The GPUs to record, as typed."""

    gpu: tuple[str, ...] = shared(
        repeated("--gpu", metavar="UUID", help="This GPU.", shell_complete=names_of("gpus"))
    )
    node: tuple[str, ...] = shared(
        repeated("--node", metavar="NAME", help="All GPUs of this node.", shell_complete=names_of("nodes"))
    )
    reservation: str = shared(
        option(
            "--reservation",
            default="",
            metavar="NAME",
            help="The GPUs of this reservation.",
            shell_complete=names_of("reservations"),
        )
    )
    interval: float | None = shared(
        option("--interval", type=DURATION, help="Time between samples; 1s by default.")
    )

    def targets(self, client: "Client") -> tuple[list[str], list[str]]:
        """(resource names, UUIDs) of what is to be recorded.

        Raises:
            InvalidArgumentError: nothing is named, and this host is not known as a node.
        """
        from gpuscale.cli.console import resources

        names, uuids = resources.named(client, [*self.gpu, *self.node])
        if self.reservation:
            [found] = resources.reservations(client, [self.reservation])
            uuids += [one.uuid for one in found.gpus if one.uuid not in uuids]
        if names or uuids:
            return names, uuids
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        uuids = [one for one in visible if resources.is_uuid(one)]
        return ([], uuids) if uuids else ([_this_node(client)], [])


def _this_node(client: "Client") -> str:
    """The node that this host is; the only node where there is but one."""
    from gpuscale.cli.console import resources
    from gpuscale.common.names import node_name

    here = client.this_node()
    if here is not None:
        return node_name(here)
    nodes = resources.nodes(client)
    if len(nodes) != 1:
        raise InvalidArgumentError(
            f"this host is none of the {len(nodes)} nodes; pass --node, --gpu or --reservation"
        )
    return nodes[0].name


@command("record -- python train.py", context_settings={"allow_interspersed_args": False})
@takes("wanted", Wanted)
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
def record(session: Session, wanted: Wanted, command: tuple[str, ...]) -> None:
    """Run a command and print what GPUs did meanwhile: minimum, mean, maximum and number of samples.

    Without --gpu, --node and --reservation it records the GPUs that CUDA_VISIBLE_DEVICES names by UUID, or else those of
    this host. The exit code is the command's. With -o json or yaml, the standard output of the command goes to standard error.
    """
    with session.connect() as client:
        recording = begin(client, *wanted.targets(client), interval=wanted.interval).name
        try:
            with Forwarding() as signals:
                process = start(command, stdout=None if session.output.human else STDERR)
                if isinstance(process, int):
                    code = process
                else:
                    signals.to(process)
                    code = exit_code(process.wait())
        finally:
            _end(session, client, recording)
    leave(code)


@contextmanager
def recording_of(session: Session, client: "Client", uuids: Sequence[str]) -> Generator[None]:
    """Record GPUs while the block runs, then print it; the block runs even where they cannot be recorded."""
    try:
        name = begin(client, [], uuids).name
    except GpuscaleError as error:
        note(f"cannot record: {error.message}")
        yield
        return
    try:
        yield
    finally:
        _end(session, client, name)


def begin(
    client: "Client",
    names: Sequence[str],
    uuids: Sequence[str],
    *,
    interval: float | None = None,
    longest: float = LONGEST_SECONDS,
    key: str = "",
) -> "monitor_api.Recording":
    """Start a recording."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.common.wire import to_duration

    request = api.StartRecordingRequest(
        request_id=str(uuid.uuid4()),
        recording_id=key,
        names=names,
        uuids=uuids,
        interval=None if interval is None else to_duration(interval),
        max_duration=to_duration(longest),
    )
    return client.recordings.StartRecording(request).recording


def _end(session: Session, client: "Client", name: str) -> None:
    """Stop the recording of a command and print it; where that fails, the exit code stays the command's."""
    from gpuscale.api.monitor import v1 as api

    try:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=name)).recording
    except GpuscaleError as error:
        note(f"{name} is lost: {error.message}")
        return
    write(session, recording)


def write(session: Session, recording: "monitor_api.Recording") -> None:
    """Print the figures of a recording: a table of its GPUs, or data in the structure that scripts know."""
    from gpuscale.cli.views.monitor import RECORDED_GPUS, RECORDINGS
    from gpuscale.client.recording_view import seed_view

    if session.output.human:
        session.output.write_list(recording.gpus, RECORDED_GPUS)
    elif session.output.format is Format.NAME:
        session.output.write_one(recording, RECORDINGS)
    else:
        session.output.write_data(seed_view(recording))


@command("start recording")
@one_name(required=False)
@takes("wanted", Wanted)
@option("--for", "limit", type=DURATION, default="7d", help="Stop by itself after this time.")
def start_recording(session: Session, wanted: Wanted, name: str, limit: float) -> None:
    """Record what GPUs do, until `stop recording`.

    Without --gpu, --node and --reservation it records the GPUs that CUDA_VISIBLE_DEVICES names by UUID, or else those of
    this host.
    """
    from gpuscale.cli.views.monitor import RECORDINGS

    key = name.removeprefix("recordings/")
    with session.connect() as client:
        names, uuids = wanted.targets(client)
        recording = begin(client, names, uuids, interval=wanted.interval, longest=limit, key=key)
    session.output.write_one(recording, RECORDINGS)


@command("stop recording rec-1")
@one_name("recordings")
def stop_recording(session: Session, name: str) -> None:
    """Stop a recording and print its figures; an ended one stays as it is."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import RECORDING, full_name

    full = full_name(RECORDING, name)
    with session.connect() as client:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=full)).recording
    write(session, recording)


@command("delete recording rec-1")
@names("recordings")
@YES
def delete_recording(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete recordings; a running one stops."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.console.resources import RECORDING, full_name

    delete_each(
        session,
        "recordings",
        [full_name(RECORDING, one) for one in name],
        lambda client, full: client.recordings.DeleteRecording(api.DeleteRecordingRequest(name=full)),
        lambda client, full: client.recordings.GetRecording(api.GetRecordingRequest(name=full)),
        yes=yes,
    )

"""`gpuscalectl record`: run a command, and say what GPUs did meanwhile."""

import os
import platform
import subprocess
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.options import duration
from gpuscale.cli.output import Format
from gpuscale.cli.run import NOT_FOUND, NOT_RUN, OF_SIGNAL, forwarding
from gpuscale.cli.session import Session, note, session_of
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client

LONGEST_SECONDS = 604_800.0
"""A recording ends by itself after 7 d."""
_STDERR = 2


def record(
    context: typer.Context,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", show_default=False)],
    gpu: Annotated[list[str] | None, typer.Option(metavar="UUID", help="This GPU; may be repeated.")] = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="All GPUs of this node; may be repeated.")
    ] = None,
    reservation: Annotated[str, typer.Option(metavar="NAME", help="The GPUs of this reservation.")] = "",
    interval: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Time from sample to sample; 1s."),
    ] = None,
) -> None:
    """Run a command and print what GPUs did while it ran: minimum, mean, maximum and count of samples.

    Without --gpu, --node and --reservation: the GPUs that CUDA_VISIBLE_DEVICES names by UUID, else those of this host.
    The exit code is the command's. With -o json or yaml, what the command writes to standard output goes to standard
    error.
    """
    session = session_of(context)
    with session.connect() as client:
        names, uuids = _targets(client, gpu or (), node or (), reservation)
        recording = _start(client, names, uuids, interval)
        try:
            code = _run(session, command)
        finally:
            _stop(session, client, recording)
    raise typer.Exit(code)


def _targets(
    client: "Client", gpus: Sequence[str], nodes: Sequence[str], reservation: str
) -> tuple[list[str], list[str]]:
    """(resource names, UUIDs) of what is to be recorded.

    Raises:
        InvalidArgumentError: nothing is named, and this host is not known as a node.
    """
    from gpuscale.cli import resources
    from gpuscale.cli.observed import is_uuid, named

    names, uuids = named([*gpus, *nodes])
    if reservation:
        [found] = resources.reservations(client, [reservation])
        uuids += [one.uuid for one in found.gpus if one.uuid not in uuids]
    if names or uuids:
        return names, uuids
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    uuids = [one for one in visible.split(",") if is_uuid(one)]
    return ([], uuids) if uuids else ([_this_node(resources.nodes(client))], [])


def _this_node(nodes: "Sequence[monitor_api.Node]") -> str:
    """The node that is this host; the only node where there is but one."""
    from gpuscale.common.names import node_name, to_id

    host = platform.node()
    for node in nodes:
        if node.snapshot.host.hostname == host or node.name == node_name(to_id(host)):
            return node.name
    if len(nodes) != 1:
        raise InvalidArgumentError(
            f"{host} is none of the {len(nodes)} nodes; say --node, --gpu or --reservation"
        )
    return nodes[0].name


def _start(client: "Client", names: Sequence[str], uuids: Sequence[str], interval: float | None) -> str:
    """Begin to record; the name of the recording."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.common.wire import to_duration

    request = api.StartRecordingRequest(
        request_id=str(uuid.uuid4()),
        names=names,
        uuids=uuids,
        interval=None if interval is None else to_duration(interval),
        max_duration=to_duration(LONGEST_SECONDS),
    )
    return client.recordings.StartRecording(request).recording.name


def _run(session: Session, command: Sequence[str]) -> int:
    """Run the command until it ends; its exit code."""
    try:
        process = subprocess.Popen(command, stdout=None if session.output.human else _STDERR)
    except OSError as error:
        note(f"error: {command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
    with forwarding(process):
        code = process.wait()
    return OF_SIGNAL - code if code < 0 else code


def _stop(session: Session, client: "Client", name: str) -> None:
    """End the recording and print it; where that fails, the exit code stays the command's."""
    from gpuscale.api.monitor import v1 as api
    from gpuscale.cli.views.observed import RECORDED_GPUS, RECORDINGS
    from gpuscale.client.recording_view import seed_view

    try:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=name)).recording
    except GpuscaleError as error:
        note(f"gpuscalectl record: {name} is lost: {error.message}")
        return
    if session.output.human:
        session.output.write_list(recording.gpus, RECORDED_GPUS)
    elif session.output.format is Format.NAME:
        session.output.write_one(recording, RECORDINGS)
    else:
        session.output.write_data(seed_view(recording))

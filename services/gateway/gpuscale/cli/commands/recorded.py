"""What `record`, `run --record`, `start recording` and `stop recording` share: which GPUs, from when, and the figures."""

import os
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import Format
from gpuscale.cli.console.session import Session, note
from gpuscale.cli.grammar.options import duration
from gpuscale.common.errors import GpuscaleError, InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.monitor import v1 as monitor_api
    from gpuscale.client import Client

LONGEST_SECONDS = 604_800.0
"""A recording ends by itself after 7 d."""
RECORDING = "recordings/{recording}"


@dataclass(frozen=True)
class Wanted:
    """The options that say what is recorded."""

    gpu: Annotated[list[str] | None, typer.Option(metavar="UUID", help="This GPU; may be repeated.")] = None
    node: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="All GPUs of this node; may be repeated.")
    ] = None
    reservation: Annotated[str, typer.Option(metavar="NAME", help="The GPUs of this reservation.")] = ""
    interval: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="DURATION", help="Time from sample to sample; 1s."),
    ] = None

    def targets(self, client: "Client") -> tuple[list[str], list[str]]:
        """(resource names, UUIDs) of what is to be recorded.

        Raises:
            InvalidArgumentError: nothing is named, and this host is not known as a node.
        """
        from gpuscale.cli.console import resources
        from gpuscale.cli.console.resources import is_uuid, named

        names, uuids = named(client, [*(self.gpu or ()), *(self.node or ())])
        if self.reservation:
            [found] = resources.reservations(client, [self.reservation])
            uuids += [one.uuid for one in found.gpus if one.uuid not in uuids]
        if names or uuids:
            return names, uuids
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        uuids = [one for one in visible.split(",") if is_uuid(one)]
        return ([], uuids) if uuids else ([_this_node(client)], [])


def _this_node(client: "Client") -> str:
    """The node that is this host; the only node where there is but one."""
    from gpuscale.cli.console import resources
    from gpuscale.common.names import node_name

    here = client.this_node()
    if here is not None:
        return node_name(here)
    nodes = resources.nodes(client)
    if len(nodes) != 1:
        raise InvalidArgumentError(
            f"this host is none of the {len(nodes)} nodes; say --node, --gpu or --reservation"
        )
    return nodes[0].name


def begin(
    client: "Client",
    names: Sequence[str],
    uuids: Sequence[str],
    *,
    interval: float | None = None,
    longest: float = LONGEST_SECONDS,
    key: str = "",
) -> "monitor_api.Recording":
    """Begin to record."""
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


@contextmanager
def recording_of(session: Session, client: "Client", uuids: Sequence[str]) -> Generator[None]:
    """Record GPUs while the block runs, then print it. Where that cannot be, the block runs without."""
    try:
        name = begin(client, [], uuids).name
    except GpuscaleError as error:
        note(f"nothing is recorded: {error.message}")
        yield
        return
    try:
        yield
    finally:
        end(session, client, name)


def end(session: Session, client: "Client", name: str) -> None:
    """End the recording of a command and print it; where that fails, the exit code stays the command's."""
    from gpuscale.api.monitor import v1 as api

    try:
        recording = client.recordings.StopRecording(api.StopRecordingRequest(name=name)).recording
    except GpuscaleError as error:
        note(f"{name} is lost: {error.message}")
        return
    write(session, recording)


def write(session: Session, recording: "monitor_api.Recording") -> None:
    """Print the figures of a recording: a table of its GPUs, or data in the structure that scripts know."""
    from gpuscale.cli.views.observed import RECORDED_GPUS, RECORDINGS
    from gpuscale.client.recording_view import seed_view

    if session.output.human:
        session.output.write_list(recording.gpus, RECORDED_GPUS)
    elif session.output.format is Format.NAME:
        session.output.write_one(recording, RECORDINGS)
    else:
        session.output.write_data(seed_view(recording))

"""`gpuscalectl logs replica`: what a replica wrote."""

import re
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpuscale.cli.options import Name
from gpuscale.cli.session import note, session_of

if TYPE_CHECKING:
    from gpuscale.client.client import Client

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

PERIOD: Final = 1.0
"""Seconds from one look of --follow to the next."""
_PART: Final = 262_144
_UNSAFE: Final = re.compile(rb"[\x00-\x08\x0b-\x1f\x7f]")


@app.command("replica")
def logs_replica(
    context: typer.Context,
    name: Name,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on with what it writes; ends with the replica, or Ctrl-C."),
    ] = False,
    last: Annotated[
        int, typer.Option("--bytes", min=1, max=_PART, help="So much of its end, at most.")
    ] = 65_536,
) -> None:
    """Show what a replica wrote, as far as its adapter keeps it. There may be secrets in it."""
    from gpuscale.cli.resources import full_name
    from gpuscale.common.names import REPLICA

    full = full_name(REPLICA, name)
    with session_of(context).connect() as client:
        for part in _parts(client, full, last, follow=follow):
            _write(part)


def _parts(client: "Client", name: str, last: int, *, follow: bool) -> Iterator[bytes]:
    from gpuscale.api.autoscaler import v1 as api

    found = client.endpoints.ReadReplicaLog(api.ReadReplicaLogRequest(name=name, max_bytes=last))
    yield found.content
    while follow and not (found.ended and not found.content):
        if not found.content:
            time.sleep(PERIOD)
        asked = found.next_offset
        request = api.ReadReplicaLogRequest(name=name, offset=asked, max_bytes=_PART)
        found = client.endpoints.ReadReplicaLog(request)
        if found.offset != asked:
            note("what it wrote before was cut off; from the beginning of what is kept:")
        yield found.content


def _write(content: bytes) -> None:
    """Byte for byte; to a terminal without what would steer it."""
    safe = _UNSAFE.sub(b"?", content) if sys.stdout.isatty() else content
    sys.stdout.buffer.write(safe)
    sys.stdout.buffer.flush()

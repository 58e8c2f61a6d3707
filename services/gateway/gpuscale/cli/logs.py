"""`gpuscalectl logs replica`: what a replica wrote."""

import codecs
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpuscale.cli.grammar.options import Name
from gpuscale.cli.console.session import note, session_of

if TYPE_CHECKING:
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.client.client import Client

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

PERIOD: Final = 1.0
"""Seconds from one look of --follow to the next."""
_PART: Final = 262_144
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common.names import REPLICA

    full = full_name(REPLICA, name)
    with session_of(context).connect() as client:
        write = _writer()
        for part in _parts(client, full, last, follow=follow):
            write(part)


def _parts(client: "Client", name: str, last: int, *, follow: bool) -> Iterator[bytes]:
    from gpuscale.api.autoscaler import v1 as api

    found = client.endpoints.ReadReplicaLog(api.ReadReplicaLogRequest(name=name, max_bytes=last))
    yield found.content
    while follow and not (found.ended and not found.content):
        if not found.content:
            time.sleep(PERIOD)
        asked = found.next_offset
        request = api.ReadReplicaLogRequest(name=name, offset=asked, max_bytes=_PART)
        found = _next(client, request)
        if found.offset != asked:
            note("what it wrote before was cut off; from the beginning of what is kept:")
        yield found.content


def _next(client: "Client", request: "api.ReadReplicaLogRequest") -> "api.ReadReplicaLogResponse":
    """A part; while the adapter, or what leads to it, is away or busy it is asked for again."""
    from gpuscale.common.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError

    said = False
    while True:
        try:
            return client.endpoints.ReadReplicaLog(request)
        except (DeadlineExceededError, ResourceExhaustedError, UnavailableError) as error:
            if not said:
                note(f"it cannot be read now, and is asked for again: {error.message}")
            said = True
            time.sleep(PERIOD if error.retry_after is None else error.retry_after)


def _writer() -> Callable[[bytes], None]:
    """Writes byte for byte; to a terminal without what would steer it, in whichever part its bytes come."""
    out, terminal = sys.stdout, sys.stdout.isatty()
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(content: bytes) -> None:
        safe = _UNSAFE.sub("?", decoder.decode(content)).encode() if terminal else content
        out.buffer.write(safe)
        out.buffer.flush()

    return write

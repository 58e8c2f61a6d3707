"""`gpuscalectl logs`: what replicas wrote."""

import codecs
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gpuscale.cli.console.session import note, session_of
from gpuscale.common.errors import (
    DeadlineExceededError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.client.client import Client

PERIOD: Final = 1.0
"""Seconds from one look of --follow to the next."""
_PART: Final = 262_144
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def logs(
    context: typer.Context,
    name: Annotated[list[str], typer.Argument(metavar="[replica|endpoint] NAME...", show_default=False)],
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Go on with what they write; ends with them, or Ctrl-C."),
    ] = False,
    last: Annotated[
        int, typer.Option("--bytes", min=1, max=_PART, help="So much of the end of each, at most.")
    ] = 65_536,
) -> None:
    """Show what replicas wrote, as far as their adapters keep it. There may be secrets in it.

    NAME is ENDPOINT/REPLICA, or ENDPOINT for all replicas that it has now.
    """
    with session_of(context).connect() as client:
        found = [_Tail(client, one, last) for one in _replicas(client, name)]
        writers = {tail.name: _writer() for tail in found}
        shown: _Tail | None = None
        for tail, part in _parts(found, follow=follow):
            if len(found) > 1 and part and tail is not shown:
                writers[tail.name]((b"" if shown is None else b"\n") + f"==> {tail.name} <==\n".encode())
                shown = tail
            writers[tail.name](part)


def _replicas(client: "Client", typed: Sequence[str]) -> list[str]:
    """The resource names of replicas: those that are named, and all of the endpoints that are.

    Raises:
        NotFoundError: an endpoint has no replica, or there is none of that name.
    """
    from gpuscale.cli.console import resources
    from gpuscale.common.names import ENDPOINT, REPLICA, match

    noun, names = resources.without_noun(typed, "replicas", "endpoints")
    found: dict[str, None] = {}
    for one in names:
        full = resources.canonical(one)
        if noun == "replicas" or (not noun and match(ENDPOINT, full) is None and "/" in one):
            found[resources.full_name(REPLICA, one)] = None
            continue
        [endpoint] = resources.endpoints(client, [one])
        replicas = resources.replicas(client, endpoint=endpoint.name)
        if not replicas:
            raise NotFoundError(
                f"{endpoint.name} has no replica now; ended ones: gpuscalectl get replicas -a -e {one}"
            )
        found |= dict.fromkeys(replica.name for replica in replicas)
    return list(found)


class _Tail:
    """What one replica wrote, from where it was last read.

    Attributes:
        name: of the replica.
        ended: whether all of it was read, and no more will come.
    """

    def __init__(self, client: "Client", name: str, last: int) -> None:
        from gpuscale.api.autoscaler import v1 as api

        self.name = name
        self.ended = False
        self._client = client
        self._request = api.ReadReplicaLogRequest(name=name, max_bytes=last)

    def read(self, *, patiently: bool) -> bytes:
        """What it wrote since; empty where that is nothing yet.

        Args:
            patiently: whether to ask again while the adapter, or what leads to it, is away.
        """
        from gpuscale.api.autoscaler import v1 as api

        request = self._request
        found = _next(self._client, request) if patiently else self._client.endpoints.ReadReplicaLog(request)
        if request.HasField("offset") and found.offset != request.offset:
            note("what it wrote before was cut off; from the beginning of what is kept:")
        self.ended = found.ended and not found.content
        self._request = api.ReadReplicaLogRequest(name=self.name, offset=found.next_offset, max_bytes=_PART)
        return found.content


def _parts(tails: Sequence[_Tail], *, follow: bool) -> Iterator[tuple[_Tail, bytes]]:
    """What they wrote, one after the other; with `follow` round after round until all have ended."""
    for tail in tails:
        yield tail, tail.read(patiently=False)
    while follow and (left := [tail for tail in tails if not tail.ended]):
        wrote = False
        for tail in left:
            try:
                part = tail.read(patiently=True)
            except NotFoundError as error:
                if len(tails) == 1:
                    raise
                note(error.message)  # the others go on
                tail.ended = True
                continue
            wrote = wrote or bool(part)
            yield tail, part
        if not wrote and any(not tail.ended for tail in tails):
            time.sleep(PERIOD)


def _next(client: "Client", request: "api.ReadReplicaLogRequest") -> "api.ReadReplicaLogResponse":
    """A part; while the adapter, or what leads to it, is away or busy it is asked for again."""
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

"""`gpuscalectl logs`, `attach` and `stop`: the output of replicas and jobs, and the end of jobs."""

import codecs
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.bulk import Done, say_each
from gpuscale.cli.console.command import Session, command, names, one_name
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import Progress, note
from gpuscale.cli.grammar.nouns import canonical, full_name, without_noun
from gpuscale.cli.grammar.parameters import COUNT, option
from gpuscale.cli.views import allocator as views
from gpuscale.common import errors
from gpuscale.common.names import ENDPOINT, REPLICA, match

if TYPE_CHECKING:
    from gpuscale.api.allocator.v1 import Reservation
    from gpuscale.client.client import Client
    from gpuscale.client.jobs import Job

PERIOD: Final = 1.0
"""Seconds between reads of --follow."""
LAST_BYTES, ATTACHED_BYTES = 65_536, 8192
"""Bytes of earlier output that `logs` and `attach` show."""
STOPPED_TOGETHER: Final = 8
"""Most jobs that `stop` stops at a time: of ten connections that log in at once, sshd turns some away (its MaxStartups)."""
_PART: Final = 262_144
_UNSAFE: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@command("logs jobs --follow")
@names("endpoints", "jobs", metavar="[replica|endpoint|job] NAME")
@option("--follow", "-f", is_flag=True, help="Follow the output until they end.")
@option(
    "--tail",
    "lines",
    type=COUNT,
    metavar="N",
    help="Most lines from the end of each; by default as many as 64 KiB hold.",
)
def logs(session: Session, name: tuple[str, ...], follow: bool, lines: int | None) -> None:
    """Show the output of replicas, as far as their adapters keep it, or of a detached job. It may contain secrets.

    NAME is ENDPOINT/REPLICA, or ENDPOINT for all its current replicas, or the name or title of a job. With several
    replicas, each line begins with the replica's name.
    """
    from gpuscale.client.jobs import Job

    with session.connect() as client:
        if (job := _job(client, name)) is not None:
            with telling() as (tell, end):
                Job(client, job.name).write(
                    1, follow=follow, last=LAST_BYTES, lines=lines, tell=tell, on_start=end
                )
            return
        found = [_Tail(client, one, LAST_BYTES, lines) for one in _replicas(client, name)]
        parts = _parts(found, follow=follow)
        for tail, part in _named_lines(parts) if len(found) > 1 else parts:
            tail.write(part)


@command("attach r3fa7kq2vnb4d")
@one_name("jobs")
def attach(session: Session, name: str) -> None:
    """Follow the output of a detached job until it ends, and exit with its exit code. Ctrl-C leaves it running."""
    from gpuscale.client.jobs import exit_code_of

    with session.connect() as client, telling() as (tell, end):
        job = find(client, name)
        job.write(1, follow=True, last=ATTACHED_BYTES, tell=tell, on_start=end)
        leave(exit_code_of(job.until_ended(None, tell)))


@command("stop job r3fa7kq2vnb4d")
@names("jobs")
def stop(session: Session, name: tuple[str, ...]) -> None:
    """Stop detached jobs, up to 8 at a time, on all their nodes: SIGTERM, and SIGKILL 10 s later; then release their GPUs."""

    def act(client: "Client", typed: str) -> Done:
        found = find(client, typed).stop()
        state = cells.word(found.job, "state")
        said = "stopped" if state == "STOPPED" else f"had ended: {state}"
        return Done(found.name, f"{found.name} {said}", to_dict(found))

    with ThreadPoolExecutor(STOPPED_TOGETHER) as pool:
        say_each(session, views.JOBS.key, name, act, find, each=map if len(name) == 1 else pool.map)


def find(client: "Client", typed: str) -> "Job":
    """The job with a name or title."""
    from gpuscale.client.jobs import Job

    [name] = without_noun([typed], "jobs")[1]
    return Job(client, lookup.job(client, name).name)


@contextmanager
def telling() -> "Generator[tuple[Callable[[str], None], Callable[[object], None]]]":
    """Two functions: one shows why a wait continues, one ends that line before other output."""
    progress = Progress()

    def tell(text: str) -> None:
        reason, about, estimate = text.rpartition(" (") if text.endswith(")") else (text, "", "")
        progress.tell(reason, lambda _: about + estimate)

    try:
        yield tell, lambda _: progress.end()
    finally:
        progress.end()


def _named_lines(parts: "Iterable[tuple[_Tail, bytes]]") -> "Iterator[tuple[_Tail, bytes]]":
    """The lines of several replicas, never split, each after the name of its replica."""
    open_lines = dict[_Tail, bytes]()
    for tail, part in parts:
        *lines, rest = (open_lines.pop(tail, b"") + part).split(b"\n")
        if len(rest) < _PART:
            open_lines[tail] = rest
        else:
            lines.append(rest)
        name = cells.short(tail.name).encode()
        yield tail, b"".join(b"%s  %s\n" % (name, line) for line in lines)
    for tail, rest in open_lines.items():
        if rest:
            yield tail, cells.short(tail.name).encode() + b"  " + rest + b"\n"


def _job(client: "Client", typed: Sequence[str]) -> "Reservation | None":
    """The named job; None if the names are of replicas and endpoints."""
    noun, rest = ("jobs", typed[1:]) if len(typed) == 2 and typed[0] == "job" else ("", typed)
    if len(rest) != 1:
        return None
    if noun or lookup.RESERVATION_ID.fullmatch(rest[0]) or rest[0].startswith(("job/", "reservations/")):
        return lookup.job(client, rest[0])
    if match(ENDPOINT, canonical(rest[0])):
        return None
    try:
        (lookup.replicas if "/" in rest[0] else lookup.endpoints)(client, rest)
    except (errors.InvalidArgumentError, errors.NotFoundError) as error:
        try:
            return lookup.job(client, rest[0])
        except errors.NotFoundError:
            if "/" in rest[0]:
                raise error from None
            raise errors.NotFoundError(f"no endpoint or job {rest[0]}: see gpuscalectl get jobs -a") from None
    return None


def _replicas(client: "Client", typed: Sequence[str]) -> list[str]:
    noun, wanted = without_noun(typed, "replicas", "endpoints")
    found: dict[str, None] = {}
    for one in wanted:
        full = canonical(one)
        if noun == "replicas" or (not noun and match(ENDPOINT, full) is None and "/" in one):
            found[full_name(REPLICA, one)] = None
            continue
        [endpoint] = lookup.endpoints(client, [one])
        replicas = lookup.replicas(client, endpoint=endpoint.name)
        if not replicas:
            raise errors.NotFoundError(
                f"{endpoint.name} has no replicas now; to list ended ones: gpuscalectl get replicas -a -e {one}"
            )
        found |= dict.fromkeys(replica.name for replica in replicas)
    return list(found)


class _Tail:
    """The output of one replica, continued where the last read ended; `ended` once no more will come."""

    def __init__(self, client: "Client", name: str, last: int, lines: int | None = None) -> None:
        self.name = name
        self.ended = False
        self._client = client
        # One byte more, which tells whether what follows begins a line.
        most = _PART if lines is not None else min(last + 1, _PART)
        self._request = api.ReadReplicaLogRequest(name=name, max_bytes=most)
        self._lines = lines
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read(self, *, patiently: bool) -> bytes:
        """Output since the last read; with `patiently`, retries while the adapter or a service is unavailable."""
        request, said = self._request, False
        found: api.ReadReplicaLogResponse | None = None
        while found is None:
            try:
                found = self._client.endpoints.ReadReplicaLog(request)
            except (
                errors.DeadlineExceededError,
                errors.ResourceExhaustedError,
                errors.UnavailableError,
            ) as error:
                if not patiently:
                    raise
                if not said:
                    note(f"cannot read it now, trying again: {error.message}")
                said = True
                time.sleep(PERIOD if error.retry_after is None else error.retry_after)
        if request.HasField("offset") and found.offset != request.offset:
            note("earlier output was dropped; kept output begins here:")
        self.ended = found.ended and not found.content
        content = found.content
        if found.offset and not request.HasField("offset") and len(content) >= request.max_bytes:
            content = content[content.find(b"\n", 0, -1) + 1 or 1 :]
            if self._lines is None:
                note(f"earlier output of {self.name} is left out; --tail shows more")
        self._request = api.ReadReplicaLogRequest(name=self.name, offset=found.next_offset, max_bytes=_PART)
        if self._lines is None:
            return content
        kept = content.splitlines(keepends=True)[-self._lines or len(content) :]
        self._lines = None
        return b"".join(kept)

    def write(self, part: bytes) -> None:
        """Write bytes unchanged; to a terminal without control sequences, even ones split over two parts."""
        if sys.stdout.isatty():
            part = _UNSAFE.sub("?", self._decoder.decode(part)).encode()
        sys.stdout.buffer.write(part)
        sys.stdout.buffer.flush()


def _parts(tails: Sequence[_Tail], *, follow: bool) -> Iterator[tuple[_Tail, bytes]]:
    """The output of each in turn; with `follow`, until all end."""
    for tail in tails:
        yield tail, tail.read(patiently=False)
    while follow and (left := [tail for tail in tails if not tail.ended]):
        wrote = False
        for tail in left:
            try:
                part = tail.read(patiently=True)
            except errors.NotFoundError as error:
                if len(tails) == 1:
                    raise
                note(error.message)  # the others go on
                tail.ended = True
                continue
            wrote = wrote or bool(part)
            yield tail, part
        if not wrote and any(not tail.ended for tail in tails):
            time.sleep(PERIOD)

"""`gpuscalectl logs`, `attach`, `wait` and `stop` of a job, over `gpuscale.client.jobs`."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import Session, command, one_name
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.terminal import Progress, write_lines
from gpuscale.cli.grammar.nouns import without_noun
from gpuscale.cli.views import allocator as views

if TYPE_CHECKING:
    from gpuscale.client import Client
    from gpuscale.client.jobs import Job

ATTACHED_BYTES = 8192
"""Bytes of earlier output that `attach` shows."""


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
@one_name("jobs")
def stop(session: Session, name: str) -> None:
    """Stop a detached job on all its nodes: SIGTERM, and SIGKILL 10 s later; then release its GPUs."""
    with session.connect() as client:
        found = find(client, name).stop()
    if session.output.human:
        write_lines([f"{found.name} stopped"])
    else:
        session.output.write_one(found, views.JOBS)


def wait(session: Session, names: Sequence[str], timeout: float | None) -> NoReturn:
    """Wait for jobs to end; exit with the exit code of the first that failed."""
    from gpuscale.client.jobs import exit_code_of

    with session.connect() as client, telling() as (tell, _):
        ended = [find(client, one).until_ended(timeout, tell) for one in names]
    write_lines([f"{one.name} {one.job.State.Name(one.job.state).removeprefix('STATE_')}" for one in ended])
    failed = (one for one in ended if one.job.exit_code or not one.job.HasField("exit_code"))
    leave(exit_code_of(next(failed, ended[0])))


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
        progress.tell(reason, about + estimate)

    try:
        yield tell, lambda _: progress.end()
    finally:
        progress.end()

"""`gpuscalectl wait`: waits until resources meet a condition, and shows why they do not yet."""

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.commands.logs import find, telling
from gpuscale.cli.console import cells, lookup
from gpuscale.cli.console.command import Session, command, names_of_typed, words
from gpuscale.cli.console.errors import leave
from gpuscale.cli.console.output import cell_of, to_dict
from gpuscale.cli.console.terminal import Progress, pause, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import plural, with_noun
from gpuscale.cli.grammar.parameters import DURATION, option
from gpuscale.cli.grammar.selecting import Condition, amount, leads, near, parse_selector
from gpuscale.cli.views import allocator as allocator_views
from gpuscale.cli.views import autoscaler as autoscaler_views
from gpuscale.cli.views import monitor as monitor_views
from gpuscale.common import errors
from gpuscale.common.filters import compile_filter
from gpuscale.common.sizes import counted

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.client import Client

READY, GONE = "ready", "deleted"
PERIOD = 0.5
"""Seconds between polls."""
READY_STATES: Mapping[str, str] = {
    "nodes": "state=ONLINE",
    "gpus": "state=OK",
    "reservations": "state=ACTIVE",
    "jobs": "",
    "endpoints": "",
    "replicas": "state=READY",
    "watchers": "status.state=OK",
    "adapters": "state=CONNECTED",
}
"""The selector of ready resources by kind; empty for endpoints, which are ready when all desired replicas are."""
_WHY = ("reason", "message", "end_reason")


@command("wait endpoint jobs --for 'ready>=2' --timeout 5m")
@click.argument("kind", metavar="KIND")
@click.argument("name", nargs=-1, metavar="NAME...", shell_complete=names_of_typed("kind", READY_STATES))
@option(
    "--for",
    "until",
    default=READY,
    metavar="CONDITION",
    help="ready, deleted, or a FIELD or column, one of = != >= <= > <, and a VALUE: 'ready>=3'.",
    shell_complete=words(READY, GONE),
)
@option(
    "--timeout", type=DURATION, help="How long to wait before exit code 6; 5m by default, unlimited for jobs."
)
def wait(session: Session, kind: str, name: tuple[str, ...], until: str, timeout: float | None) -> None:
    """Wait until resources are ready, deleted or meet a condition: endpoints, replicas, nodes, GPUs, watchers, reservations, adapters.

    wait JOB waits until jobs end, and exits with the exit code of the first that failed.
    """
    kind, *typed = with_noun([kind, *name], READY_STATES)
    if not typed and plural(kind) in READY_STATES:
        raise click.UsageError("Missing argument 'NAME...'.")
    if not typed:
        kind, typed = "jobs", [kind]
    if kind == "jobs":
        _wait_for_jobs(session, typed, until, timeout)
    if kind not in READY_STATES:
        raise errors.InvalidArgumentError(f"cannot wait for {kind!r}{near(kind, READY_STATES)}")
    awaited, timeout = _Awaited(kind, until), 300.0 if timeout is None else timeout
    progress = Progress()
    with session.connect() as client:
        for resource in typed:
            try:
                reason = awaited.reason(client, resource)
                while reason:
                    left = timeout - progress.elapsed
                    if left <= 0:
                        message = f"{resource} is not {awaited.until} after {timeout:g} s: {reason}"
                        raise errors.DeadlineExceededError(
                            message, reason="NOT_READY", metadata={"name": resource}
                        )
                    progress.tell(f"{resource} for {awaited.until}: {reason}")
                    pause(min(PERIOD, left))
                    try:
                        reason = awaited.reason(client, resource)
                    except errors.UnavailableError as error:
                        reason = error.message  # wait out a restart of the service
            finally:
                progress.end()
    output = session.output
    if output.human:
        write_lines([f"{kind}/{one} {until}" for one in typed])
    elif output.format is Format.NAME:
        write_lines(typed)
    else:
        output.write_data({"deleted": typed} if until == GONE else {kind: awaited.found})


def _wait_for_jobs(session: Session, typed: Sequence[str], until: str, timeout: float | None) -> NoReturn:
    """Wait until jobs end, and exit as they do. Raises InvalidArgumentError: something else of them is to be waited for."""
    from gpuscale.client.jobs import exit_code_of

    if until not in {READY, GONE} and until.casefold() != "state=succeeded":  # else its exit code says so
        other = shlex.join(["wait", "reservation", *typed, "--for", f"job.{until}"])
        raise errors.InvalidArgumentError(f"a job is waited for until it ends: leave out --for, or: {other}")
    began = time.monotonic()
    with session.connect() as client, telling() as (tell, _):
        ended = [find(client, one).until_ended(timeout, tell, began) for one in typed]
    if session.output.human:
        write_lines([f"{one.name} {cells.word(one.job, 'state')}" for one in ended])
    else:
        session.output.write_list(ended, allocator_views.JOBS)
    failed = (one for one in ended if one.job.exit_code or not one.job.HasField("exit_code"))
    leave(exit_code_of(next(failed, ended[0])))


class _Awaited:
    def __init__(self, kind: str, until: str) -> None:
        views: Mapping[str, cells.View[Any]] = {
            "nodes": monitor_views.nodes(),
            "reservations": allocator_views.RESERVATIONS,
            "endpoints": autoscaler_views.ENDPOINTS,
            "replicas": autoscaler_views.REPLICAS,
            "watchers": autoscaler_views.WATCHERS,
            "adapters": autoscaler_views.ADAPTERS,
        }
        self.read = lookup.READERS[kind]
        self.view = views.get(kind)  # no columns for GPUs, whose view needs more
        self.until = until
        self.found: list[dict[str, object]] = []
        text = READY_STATES[kind] if until == READY else until
        try:
            self._conditions = () if until == GONE or not text else parse_selector(text)
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--for") from error

    def reason(self, client: "Client", name: str) -> str:
        """Why the wait continues; empty when it is over.

        Raises NotFoundError: the resource does not exist, and the wait is not for its deletion.
        """
        try:
            [item] = self.read(client, [name])
        except errors.NotFoundError:
            if self.until == GONE:
                return ""
            raise
        if self.until == READY and isinstance(item, api.Endpoint):
            met = item.status.ready_replicas >= item.status.desired_replicas
        else:
            met = all(self._met(one, item) for one in self._conditions)
        if self.until == GONE or not met:
            return standing(item)
        self.found.append(to_dict(item))
        return ""

    def _met(self, condition: Condition, item: "Message") -> bool:
        """Whether an item meets a condition on a field, or on a column; an error if it cannot be compared."""
        column = self.view.column(condition.key) if self.view else None
        if column is None or leads(condition.path, item.DESCRIPTOR):
            asked = condition.to_filter(item.DESCRIPTOR, "--for", (READY, GONE))
            return compile_filter(asked, type(item), "--for")(item)
        values = cell_of(column, item)
        odd = next((one for one in values if condition.compares and amount(one) is None), None)
        if odd is not None:
            raise errors.InvalidArgumentError(
                f"--for: {condition.key} is {odd!r}, not a number, size or duration"
            )
        return condition.holds(values)


def standing(item: "Message") -> str:
    """The state of a resource and the reason for it, in one line."""
    if isinstance(item, api.Endpoint):
        status = item.status
        counts = f"{status.ready_replicas} of {counted(status.desired_replicas, 'replica')} ready"
        return f"{counts}: {status.summary}" if status.summary else counts
    of: Any = item
    holder: Any = getattr(of, "status", of)
    state = cells.word(holder, "state") if "state" in holder.DESCRIPTOR.fields_by_name else "there"
    why = next((str(why) for field in _WHY if (why := getattr(holder, field, ""))), "")
    return f"{state}: {why}" if why else state

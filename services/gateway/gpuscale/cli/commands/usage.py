"""`gpuscalectl report` and `stats`: who used what, and what a reservation or job makes of its GPUs."""

from datetime import datetime

import click

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import command, one_name, words
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import canonical, full_name
from gpuscale.cli.grammar.parameters import MOMENT, local_text, option
from gpuscale.cli.views import allocator as views
from gpuscale.client import pages
from gpuscale.common import wire
from gpuscale.common.names import RESERVATION

KINDS = ("user", "tenant", "label=KEY", "node", "model")
LABEL = "label"


@command("report --by user --since 30d")
@option("--by", metavar="KIND", default="user", help=", ".join(KINDS), shell_complete=words(*KINDS))
@option("--since", type=MOMENT, help="From the UTC day of this time on; 30 days ago by default.")
@option("--until", type=MOMENT, help="Through the UTC day of this time; today by default.")
@option(
    "--filter",
    "chosen",
    metavar="FILTER",
    default="",
    help="Only what meets it: user, tenant, labels.KEY, node, model.",
)
@option(
    "--order-by", metavar="FIELDS", default="granted_gpu_microseconds desc", help="What rows are sorted by."
)
def report(
    session: Session, by: str, since: datetime | None, until: datetime | None, chosen: str, order_by: str
) -> None:
    """Show who used how many GPU hours, and how many of them were idle. Who is no admin sees what is its own.

    Hours are those of whole GPUs: half of a GPU for two hours is one.
    """
    kind, _, key = by.partition("=")
    if kind not in {one.partition("=")[0] for one in KINDS} or bool(key) != (kind == LABEL):
        raise click.UsageError(f"--by: choose from {', '.join(KINDS)}")
    request = api.QueryUsageRequest(
        since=wire.optional_timestamp(since),
        until=wire.optional_timestamp(until),
        group_by=api.QueryUsageRequest.GroupBy.Value(f"GROUP_BY_{kind.upper()}"),
        label_key=key,
        filter=chosen,
        order_by=order_by,
        page_size=1000,
    )
    with session.connect() as client:
        answers = list(pages(client.usage.QueryUsage, request))
    rows = [row for answer in answers for row in answer.rows]
    total, output = answers[0].total, session.output
    if output.human:
        write_lines(output.table([*rows, total], views.usage_rows(key or kind.upper(), key, total)))
        begin, end = (wire.to_datetime(one) for one in (answers[0].start_time, answers[0].end_time))
        note(f"from {local_text(begin)} to {local_text(end)}, in UTC days")
    elif output.format in {Format.JSON, Format.YAML}:
        output.write_data({"rows": [_ordered(row) for row in rows], "total": _ordered(total)})
    else:
        output.write_data({"rows": [_ordered(row) for row in rows]})


def _ordered(row: api.UsageRow) -> dict[str, object]:
    """A row with its fields in one order, whichever it has."""
    found = to_dict(row)
    return {one.json_name: found.get(one.json_name) for one in api.UsageRow.DESCRIPTOR.fields}


@command("stats r7ekx2mqwna4")
@one_name("reservations", metavar="RESERVATION|JOB")
def stats(session: Session, name: str) -> None:
    """Show what a reservation or job makes, or made, of each of its GPUs: time used, memory, energy."""
    with session.connect() as client:
        text = canonical(name).rpartition("/")[2]
        one = text if lookup.RESERVATION_ID.fullmatch(text) else lookup.job(client, name).name
        request = api.GetReservationUsageRequest(name=full_name(RESERVATION, one))
        found = client.usage.GetReservationUsage(request)
    if session.output.human:
        write_lines(session.output.table(found.gpus, views.GPU_STATISTICS))
    else:
        session.output.write_data(to_dict(found))

"""`gpuscalectl report` and `stats`: GPU hours by user and so on, and how a reservation or job uses its GPUs."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import click

from gpuscale.api.allocator import v1 as api
from gpuscale.api.monitor import v1 as monitor_api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.cells import granted, short
from gpuscale.cli.console.command import Session, command, one_name, words
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.parameters import MOMENT, format_duration, local_text, option
from gpuscale.cli.views import allocator as views
from gpuscale.client import pages
from gpuscale.common import wire
from gpuscale.common.errors import NotFoundError

if TYPE_CHECKING:
    from gpuscale.client import Client

LOCAL = "local"
"""Name of all callers of a server without tokens."""
KINDS = ("user", "tenant", "endpoint", "label=KEY", "node", "model")
LABEL = "label"
ENDPOINT_LABEL = "endpoint"
"""Label on the reservations of an endpoint's replicas."""


@command("report --by user --since 30d")
@option("--by", metavar="KIND", default="user", help=", ".join(KINDS), shell_complete=words(*KINDS))
@option(
    "--since",
    type=MOMENT,
    help="From the UTC day of this time, local midnight of a date; 30 days ago by default.",
)
@option("--until", type=MOMENT, help="Through the UTC day of this time; today by default.")
@option(
    "--filter",
    "chosen",
    metavar="FILTER",
    default="",
    help="Filter by user, tenant, labels.KEY, node or model.",
)
@option("--order-by", metavar="FIELDS", default="granted_gpu_microseconds desc", help="Column to sort by.")
def report(
    session: Session, by: str, since: datetime | None, until: datetime | None, chosen: str, order_by: str
) -> None:
    """Show GPU hours by user or other key, and how many were idle. Only admins see the usage of others.

    Hours are of whole GPUs: half a GPU for two hours counts as one.
    """
    kind, _, key = (f"{LABEL}={ENDPOINT_LABEL}" if by == ENDPOINT_LABEL else by).partition("=")
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
        if any(row.user == LOCAL for row in rows):
            note(
                f"{LOCAL} stands for callers on this host without a token; --by endpoint tells endpoints apart"
            )
    elif output.format in {Format.JSON, Format.YAML, Format.JSONPATH}:
        output.write_data({"rows": [_ordered(row) for row in rows], "total": _ordered(total)})
    else:
        output.write_data({"rows": [_ordered(row) for row in rows]})


def _ordered(row: api.UsageRow) -> dict[str, object]:
    found = to_dict(row)
    return {one.json_name: found.get(one.json_name) for one in api.UsageRow.DESCRIPTOR.fields}


@command("stats r7ekx2mqwna4")
@one_name("reservations", metavar="RESERVATION|JOB")
def stats(session: Session, name: str) -> None:
    """Show how a reservation or job uses or used each GPU: utilization, memory, energy, clock, throttling and faults."""
    with session.connect() as client:
        found = Statistics.of(client, lookup.reservation_name(client, name))
    if session.output.human:
        write_lines(session.output.table(found.usage.gpus, views.GPU_STATISTICS))
        write_lines(found.lines())
    else:
        session.output.write_data(found.data())


@dataclass(frozen=True)
class Statistics:
    """A reservation's use of its GPUs, and their XIDs in that time."""

    usage: api.GetReservationUsageResponse
    xids: Sequence[monitor_api.HealthEvent]

    @classmethod
    def of(cls, client: "Client", name: str) -> "Statistics":
        """The statistics of a reservation. Raises NotFoundError: there are none, or no longer."""
        usage = client.usage.GetReservationUsage(api.GetReservationUsageRequest(name=name))
        xids: list[monitor_api.HealthEvent] = []
        with suppress(NotFoundError):  # its length is no longer known
            held = client.allocator.GetReservation(api.GetReservationRequest(name=name)).reservation
            until = wire.to_datetime(held.end_time) if held.HasField("end_time") else None
            span = wire.TimeRange(wire.to_datetime(getattr(held, granted(held))), until)
            xids = [one for one in lookup.health(client, about=lookup.About(time=span)) if one.xid]
        gpus = {gpu.name for gpu in usage.gpus}
        return cls(usage, [one for one in xids if one.gpu in gpus])

    def data(self) -> dict[str, object]:
        """The answer and the XIDs as data."""
        return {**to_dict(self.usage), "xids": [to_dict(one) for one in self.xids]}

    def lines(self) -> list[str]:
        """Per GPU, lines with what does not fit into a table of 80 columns."""
        found: list[str] = []
        for gpu in self.usage.gpus:
            said = [
                f"throttled by {why} for {format_duration(wire.seconds(time))}"
                for why, time in sorted(gpu.throttled.items())
            ]
            if gpu.HasField("mean_sm_clock_mhz"):
                clock = f"SM clock {gpu.mean_sm_clock_mhz:.0f} MHz on average, {gpu.min_sm_clock_mhz:.0f} at least"
                said.insert(0, clock)
            for kind in ("corrected", "uncorrected"):
                count = getattr(gpu, f"ecc_{kind}_count")
                said += [f"{count} {kind} ECC errors"] if count else []
            faults = (one for one in self.xids if one.gpu == gpu.name)
            said += [f"XID {one.xid} at {local_text(wire.to_datetime(one.last_time))}" for one in faults]
            found += [f"{short(gpu.name)}:", *(f"  {one}" for one in said)] if said else []
        return found

"""Usage: GPU hours by user, tenant, node or model, from the allocator's ledger, and how many were idle."""

from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from nicegui import ui

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.wire import to_timestamp
from gpuscale.dashboard import charts, humanize
from gpuscale.dashboard.frame import Chart, DashboardSite, ListTable, PageAddress, Tiles, page, reading
from gpuscale.dashboard.rows import ResourceTable

REFRESH = 60.0
"""Seconds between queries: the ledger is updated once a minute."""
SPANS = {"today": 0, "7 days": 7, "30 days": 30, "1 year": 365}
KINDS = ("user", "tenant", "node", "model")


def usage_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Usage"):
        tiles = Tiles("GPU hours", "busy", "idle", "energy")
        with ui.row():
            address = PageAddress()
            span = address.choice("span", SPANS, "30 days")
            kind = address.choice("by", KINDS, "user")
            names = ("from", "until")
            days = [address.text(name).props(f"type=date stack-label label={name}") for name in names]
        why = ui.label().classes("gs-quiet")
        chart = Chart(charts.hours_used(()), "GPU hours")
        empty = "no usage in this period that you may see"
        table = ListTable(USAGE.columns, key="whose", links=("whose",), empty=empty)

    actions = site.actions()

    async def refresh() -> None:
        by = str(kind.value)
        first, last = (day_of(str(day.value or "")) for day in days)
        now = datetime.now(UTC)  # the browser's day may be ahead
        request = allocator_api.QueryUsageRequest(
            since=to_timestamp(first or min(last or now, now) - timedelta(days=SPANS[str(span.value)])),
            until=None if last is None else to_timestamp(last + timedelta(days=1, seconds=-1)),
            group_by=allocator_api.QueryUsageRequest.GroupBy.Value(f"GROUP_BY_{by.upper()}"),
            order_by="granted_gpu_microseconds desc",
            page_size=1000,
        )
        with reading("the usage", why):
            found = await site.ask(actions, lambda client: client.usage.QueryUsage(request))
            why.text = "UTC days; hours of whole GPUs"
            total = {name: str(cell) for name, cell in USAGE.row(found.total).items()}
            tiles.show(GPU_hours=total["granted"], **{one: total[one] for one in ("busy", "idle", "energy")})
            chart.show(charts.hours_used([(whose(one), one) for one in found.rows]))
            table.show(USAGE.rows(found.rows))

    ui.timer(REFRESH, refresh)
    for choice in (span, kind, *days):
        choice.on_value_change(refresh)


def day_of(text: str) -> datetime | None:
    """A UTC day as browsers write it; None if none was chosen."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


def whose(one: allocator_api.UsageRow) -> str:
    """The user, tenant, node or model of a row."""
    return one.user or one.tenant or one.node.removeprefix("nodes/") or one.model or humanize.UNKNOWN


def found_by(one: allocator_api.UsageRow) -> str:
    """The page with the reservations of a user or tenant, or the GPUs of a node or model."""
    at_node = one.node.removeprefix("nodes/") or one.model
    page, words = ("/", at_node) if at_node else ("/reservations", one.user or one.tenant)
    return f"{page}?{urlencode({'filter': words})}" if words else ""


def energy(joules: float | None) -> str:
    """Watt hours, or kilowatt hours."""
    if joules is None or joules < 3.6e6:
        return humanize.number(None if joules is None else joules / 3600, "Wh", digits=1)
    return humanize.number(joules / 3.6e6, "kWh", digits=1)


def _part(microseconds: float, one: allocator_api.UsageRow) -> str:
    return humanize.number(100 * microseconds / max(1, one.granted_gpu_microseconds), "%")


USAGE = ResourceTable[allocator_api.UsageRow](
    whose=("who or what", whose),
    whose_to=("", found_by),
    granted=("GPU hours", lambda one: f"{charts.hours(one.granted_gpu_microseconds):.1f}"),
    busy=("busy", lambda one: _part(one.busy_gpu_microseconds, one)),
    idle=("idle", lambda one: _part(one.idle_gpu_microseconds, one)),
    unknown=("unknown", lambda one: _part(one.unknown_gpu_microseconds, one)),
    mean=("utilization", lambda one: humanize.number(humanize.known(one, "mean_utilization_percent"), "%")),
    energy=("energy", lambda one: energy(humanize.known(one, "energy_joules"))),
    ended=("reservations ended", lambda one: one.ended_count),
)

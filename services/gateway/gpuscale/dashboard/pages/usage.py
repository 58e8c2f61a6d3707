"""Usage: GPU hours by user, tenant, node or model, from the allocator's ledger, and how many were idle."""

from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from nicegui import ui

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.common.wire import to_timestamp
from gpuscale.dashboard import charts, humanize
from gpuscale.dashboard.frame import Chart, DashboardSite, ListTable, PageAddress, Tiles, page, reading
from gpuscale.dashboard.rows import Columns, Row

REFRESH = 60.0
"""Seconds between queries: the ledger is updated once a minute."""
SPANS = {"today": 0, "7 days": 7, "30 days": 30, "1 year": 365}
KINDS = ("user", "tenant", "node", "model")
USAGE: Columns = {
    "whose": "who or what",
    "granted": "GPU hours",
    "busy": "busy",
    "idle": "idle",
    "unknown": "unknown",
    "mean": "utilization",
    "energy": "energy",
    "ended": "reservations ended",
}


def usage_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Usage"):
        tiles = Tiles("GPU hours", "busy", "idle", "energy")
        with ui.row():
            address = PageAddress()
            span = address.choice("span", SPANS, "30 days")
            kind = address.choice("by", KINDS, "user")
            days = [address.text(name) for name in ("from", "until")]
            for day, label in zip(days, ("from", "until"), strict=True):
                day.props(f"type=date stack-label label={label}")
        why = ui.label().classes("gs-quiet")
        chart = Chart(charts.hours_used(()), "GPU hours", mark="usage")
        table = ListTable(
            USAGE, key="whose", links=("whose",), empty="no usage in this period that you may see"
        )

    async def refresh() -> None:
        by, now = str(kind.value), datetime.now(UTC)
        first, last = (day_of(str(day.value or "")) for day in days)
        request = allocator_api.QueryUsageRequest(
            since=to_timestamp(first or now - timedelta(days=SPANS[str(span.value)])),
            until=None if last is None else to_timestamp(last),
            group_by=allocator_api.QueryUsageRequest.GroupBy.Value(f"GROUP_BY_{by.upper()}"),
            order_by="granted_gpu_microseconds desc",
            page_size=1000,
        )
        with reading("the usage", why):
            found = await site.client.usage.QueryUsage(request)
            why.text = "UTC days; hours of whole GPUs"
            rows = [(one, {**usage_row(one), "whose_to": found_by(one)}) for one in found.rows]
            total = {name: str(cell) for name, cell in usage_row(found.total).items()}
            tiles.show(GPU_hours=total["granted"], **{one: total[one] for one in ("busy", "idle", "energy")})
            chart.show(charts.hours_used([(str(row["whose"]), one) for one, row in rows]))
            table.show([row for _, row in rows])

    ui.timer(REFRESH, refresh)
    for choice in (span, kind, *days):
        choice.on_value_change(refresh)


def day_of(text: str) -> datetime | None:
    """A UTC day as browsers write it; None if none was chosen."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        return None


def found_by(one: allocator_api.UsageRow) -> str:
    """The page with the reservations of a user or tenant, or the GPUs of a node or model."""
    at_node = one.node.removeprefix("nodes/") or one.model
    page, words = ("/", at_node) if at_node else ("/reservations", one.user or one.tenant)
    return f"{page}?{urlencode({'filter': words})}" if words else ""


def usage_row(one: allocator_api.UsageRow) -> Row:
    """The table row of a user, tenant, node or model."""
    whole = max(1, one.granted_gpu_microseconds)
    parts = {name: getattr(one, f"{name}_gpu_microseconds") for name in ("busy", "idle", "unknown")}
    return {
        "whose": one.user or one.tenant or one.node.removeprefix("nodes/") or one.model or humanize.UNKNOWN,
        "granted": f"{charts.hours(one.granted_gpu_microseconds):.1f}",
        **{name: humanize.number(100 * part / whole, "%") for name, part in parts.items()},
        "mean": humanize.number(humanize.known(one, "mean_utilization_percent"), "%"),
        "energy": energy(humanize.known(one, "energy_joules")),
        "ended": one.ended_count,
    }


def energy(joules: float | None) -> str:
    """Watt hours, or kilowatt hours."""
    if joules is None or joules < 3.6e6:
        return humanize.number(None if joules is None else joules / 3600, "Wh", digits=1)
    return humanize.number(joules / 3.6e6, "kWh", digits=1)

"""What the gateway says of itself on `/metrics`: its calls, by method and status."""

from collections.abc import AsyncGenerator, Callable

from gpuscale.common.rpc.calls import CallMeter
from gpuscale.common.runtime.metrics_text import Family, Page, labels

CALLS = Family("gpuscale_gateway_calls_total", "counter", "Calls that have ended, by method and status.")
SECONDS = Family("gpuscale_gateway_call_seconds_total", "counter", "Time that calls took, streams included.")
OPEN = Family("gpuscale_gateway_calls_open", "gauge", "Calls that are under way.")
LIMITED = Family("gpuscale_gateway_rate_limited_total", "counter", "Calls turned away for coming too often.")

CUT = Family("gpuscale_gateway_connections_cut_total", "counter", "Connections cut for showing no identity.")
SHORT = Family(
    "gpuscale_gateway_descriptor_shortages_total",
    "counter",
    "Looks at which no file descriptor was left (EMFILE).",
)


def render(meter: CallMeter) -> Callable[[], AsyncGenerator[bytes]]:
    """What makes the page of one scrape."""

    async def page() -> AsyncGenerator[bytes]:
        for chunk in _page(meter).chunks():
            yield chunk

    return page


def _page(meter: CallMeter) -> Page:
    page = Page()
    page.add(OPEN, "", meter.open)
    page.add(LIMITED, "", meter.limited)
    page.add(CUT, "", meter.connections.cut)
    page.add(SHORT, "", meter.connections.short)
    for (path, code), count in sorted(meter.ended.items()):
        page.add(CALLS, labels({"method": path.removeprefix("/"), "code": code}), count)
    for path, seconds in sorted(meter.seconds.items()):
        page.add(SECONDS, labels({"method": path.removeprefix("/")}), round(seconds, 6))
    return page

"""The dashboard's own metrics: requests by route and status, open sockets, failed calls to the gateway."""

import time
from collections import Counter, defaultdict
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpuscale.common.runtime.metrics_text import Family, Histogram, MetricsPage, labels

SERVICE = "dashboard"
"""Prefix of the series."""
_PREFIX = f"gpuscale_{SERVICE}"
_REQUESTS = Family(f"{_PREFIX}_requests_total", "counter", "HTTP requests answered, by route and status.")
_SECONDS = Family(f"{_PREFIX}_request_seconds", "histogram", "Time that HTTP requests took, by route.")
_SOCKETS = Family(f"{_PREFIX}_sockets", "gauge", "Web sockets of browsers that are open.")
_FAILED = "Failed calls to the gateway, by what was asked and reason."
_ERRORS = Family(f"{_PREFIX}_upstream_errors_total", "counter", _FAILED)
ABORTED = "aborted"
"""Label for the status of a request that got no response."""


class Figures:
    """The metrics of one dashboard: requests and their seconds by route, requests by status too, and open web sockets.

    `errors` counts failed calls to the gateway, by source and reason.
    """

    def __init__(self, errors: Counter[tuple[str, str]]) -> None:
        self.requests: Counter[tuple[str, str]] = Counter()
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.sockets = 0
        self._errors = errors

    async def add(self, page: MetricsPage) -> None:
        """Add them to a metrics page."""
        for (route, code), count in sorted(self.requests.items()):
            page.add(_REQUESTS, labels({"route": route, "code": code}), count)
        for route, histogram in sorted(self.seconds.items()):
            page.add_histogram(_SECONDS, {"route": route}, histogram)
        page.add(_SOCKETS, "", self.sockets)
        for (source, reason), count in sorted(self._errors.items()):
            page.add(_ERRORS, labels({"source": source, "reason": reason}), count)


def counted_requests(app: ASGIApp, figures: Figures, routes: Collection[str]) -> ASGIApp:
    """Count the responses of an application. Paths that begin with none of `routes` share a label, so that labels stay few."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            figures.sockets += 1
            try:
                await app(scope, receive, send)
            finally:
                figures.sockets -= 1
            return
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        first = scope["path"].lstrip("/").partition("/")[0]
        route = f"/{first}" if first in routes else "other"
        code, begun = ABORTED, time.monotonic()

        async def told(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, told)
        finally:
            figures.requests[route, code] += 1
            figures.seconds[route].observe(time.monotonic() - begun)

    return serve

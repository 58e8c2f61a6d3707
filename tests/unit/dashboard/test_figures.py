"""What the dashboard counts of browsers: by route and status, with a bound on routes, and the sockets that are open."""

import asyncio
from collections import Counter

from starlette.types import Message, Receive, Scope, Send

from gpuscale.common.runtime.metrics_text import MetricsPage
from gpuscale.dashboard.figures import Figures, counted_requests
from tests.support.promtool import named, promtool, value


async def nothing() -> Message:
    return {"type": "http.request"}


async def ignored(_: Message) -> None:
    pass


async def page(figures: Figures) -> str:
    made = MetricsPage()
    await figures.add(made)
    return b"".join(made.chunks()).decode()


def test_requests_are_counted_by_route_and_status_and_sockets_while_they_are_open() -> None:
    leave = asyncio.Event()

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await leave.wait()
        elif scope["path"] == "/gpus/broken":
            raise RuntimeError
        else:
            await send({"type": "http.response.start", "status": 404 if "no" in scope["path"] else 200})

    async def visit() -> tuple[str, str]:
        figures = Figures(Counter({("nodes", "UNAVAILABLE"): 2}))
        counted = counted_requests(app, figures, {"", "gpus"})
        for path in ("/", "/gpus/n1/GPU-1", "/gpus/n2/GPU-2", "/no", "/nor-this", "/gpus/broken"):
            try:
                await counted({"type": "http", "path": path}, nothing, ignored)
            except RuntimeError:
                assert path == "/gpus/broken"
        socket = asyncio.ensure_future(counted({"type": "websocket", "path": "/"}, nothing, ignored))
        await asyncio.sleep(0)
        during = await page(figures)
        leave.set()
        await socket
        return during, await page(figures)

    during, after = asyncio.run(visit())
    assert promtool("check", "metrics", stdin=during) == (0, "")
    told = named(during, "gpuscale_dashboard_requests_total")
    requests = {(one.labels["route"], one.labels["code"]): one.value for one in told}
    assert requests == {("/", "200"): 1, ("/gpus", "200"): 2, ("other", "404"): 2, ("/gpus", "aborted"): 1}
    assert value(during, "gpuscale_dashboard_request_seconds_count", route="/gpus") == 3
    assert (
        value(during, "gpuscale_dashboard_upstream_errors_total", source="nodes", reason="UNAVAILABLE") == 2
    )
    assert value(during, "gpuscale_dashboard_sockets") == 1
    assert value(after, "gpuscale_dashboard_sockets") == 0

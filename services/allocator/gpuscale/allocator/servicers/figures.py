"""The allocator's own figures on `/metrics`: leases, their nodes, and the queue."""

from collections import Counter
from pathlib import Path

from gpuscale.allocator.queueing.queue import Queue
from gpuscale.allocator.usecases.accounting import Accounting
from gpuscale.allocator.usecases.powering import Powering
from gpuscale.common.runtime.metrics_text import Family, MetricsPage, labels
from gpuscale.common.store.store import add_store

_PREFIX = "gpuscale_allocator"
_LIVE = Family(f"{_PREFIX}_reservations", "gauge", "Reservations that hold GPUs, by state.")
_KEPT = Family(f"{_PREFIX}_reservations_ended_kept", "gauge", "Ended reservations that are kept in memory.")
_ON_NODE = Family(f"{_PREFIX}_node_reservations", "gauge", "Reservations that hold GPUs of a node.")
_HELD = Family(f"{_PREFIX}_gpus_held", "gauge", "GPUs and MIG instances that are held at least in part.")
_SHARE = Family(
    f"{_PREFIX}_gpu_held_ratio", "gauge", "Share of a GPU that a reservation holds, by who holds it."
)
_LEFT_OUT = Family(
    f"{_PREFIX}_gpus_left_out", "gauge", "GPUs held beyond the maximum number of series by holder."
)
_FENCE = Family(f"{_PREFIX}_grants_total", "counter", "Reservations ever granted: the highest fence.")
_WAITING = Family(f"{_PREFIX}_queue_length", "gauge", "Requests waiting for GPUs, by tenant.")
_LONGEST = Family(
    f"{_PREFIX}_queue_longest_wait_seconds", "gauge", "How long the oldest waiting request has waited."
)
_NODES = Family(f"{_PREFIX}_nodes", "gauge", "Nodes known to placement, by state.")

_MOST_SHARES = 20_000
"""Most shares of GPUs with a series each."""
_GPU_SECONDS = Family(
    f"{_PREFIX}_gpu_seconds_total",
    "counter",
    "GPU time granted, used and unused, by tenant: at most 100 of them, then other.",
)


_BUDGET = Family("gpuscale_power_budget_watts", "gauge", "Watts that the GPUs of a sum may draw.")
_DRAWN = Family(
    "gpuscale_power_budget_drawn_watts", "gauge", "Watts that they draw; unknown draws count as their limits."
)
_CAPS = Family("gpuscale_power_caps", "gauge", "GPUs with a cap.")


async def add_figures(
    accounting: Accounting, queue: Queue, powering: Powering, file: Path | None, page: MetricsPage
) -> None:
    """Add the figures to a page; `file` is the database, if it is a file."""
    ledger, view, clock = accounting.ledger, accounting.view, accounting.clock
    states, on_nodes, shares = Counter[str](), Counter[str](), 0
    for one in ledger.reservations(ended=False):
        states[one.state.name] += 1
        on_nodes.update({gpu.node for gpu in one.gpus})
        shares += len(one.gpus)
        for gpu in one.gpus if shares <= _MOST_SHARES else ():
            whose = {"reservation": one.id, "holder": one.holder, "tenant": one.tenant}
            page.add(_SHARE, labels({"node": gpu.node, "uuid": gpu.uuid} | whose), gpu.milli / 1000)
    page.add(_LEFT_OUT, "", max(0, shares - _MOST_SHARES))
    for name, count in sorted(states.items()):
        page.add(_LIVE, labels({"state": name}), count)
    for node, count in sorted(on_nodes.items()):
        page.add(_ON_NODE, labels({"node": node}), count)
    page.add(_KEPT, "", ledger.ended_count)
    page.add(_HELD, "", len(ledger.use))
    page.add(_FENCE, "", ledger.fence)
    for tenant, count in sorted(queue.waiting().items()) or [("", 0)]:
        page.add(_WAITING, labels({"tenant": tenant}), count)
    page.add(_LONGEST, "", round(queue.longest_wait(clock.now()), 3))
    for state, count in sorted(Counter(node.state.name for node in view.nodes).items()):
        page.add(_NODES, labels({"state": state}), count)
    for tenant, total in sorted(accounting.totals.items()):
        for state in ("granted", "busy", "idle"):
            seconds = getattr(total, state) / 1_000_000
            page.add(_GPU_SECONDS, labels({"tenant": tenant, "state": state}), seconds)
    page.add(_CAPS, "", len(powering.found.caps))
    for found in powering.found.sums:
        of = labels({"budget": found.budget, "sum": found.name})
        page.add(_BUDGET, of, found.watts)
        if found.drawn is not None:
            page.add(_DRAWN, of, found.drawn)
    add_store(page, _PREFIX, file)

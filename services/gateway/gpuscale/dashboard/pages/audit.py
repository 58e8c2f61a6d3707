"""The audit log: who did what, newest first, with a filter."""

import json

from nicegui import ui

from gpuscale.api.audit import v1 as api
from gpuscale.client import AsyncClient, GpuscaleError
from gpuscale.common.errors import UNANSWERED
from gpuscale.common.sizes import counted
from gpuscale.dashboard import humanize
from gpuscale.dashboard.frame import DashboardSite, ListTable, PageAddress, page
from gpuscale.dashboard.rows import ResourceTable

REFRESH = 5.0
MOST_EVENTS = 500
MOST_PIECES = 8
"""Most calls per refresh; each reads a bounded piece of the log."""


def audit_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Audit"):
        with ui.row().classes("items-center"):
            wanted = PageAddress().text("filter", "filter: who, what, of, answer")
            older = ui.button("older").props("dense no-caps flat")
            newest = ui.button("newest").props("dense no-caps flat")
        why = ui.label("sign in as an admin to see the audit log, or run: gpuscalectl get audit")
        why.classes("gs-quiet")
        table = ListTable(EVENTS.columns, key="key", links=("resource",), empty="no call matches")
    actions, token = site.actions(), ""
    table.element.set_visibility(False)
    if actions is None or not actions.may("audit.v1.AuditService/ListAuditEvents"):
        for one in (wanted, older, newest):
            one.disable()
        return

    async def read(client: AsyncClient) -> list[api.AuditEvent]:
        nonlocal token
        found, at = list[api.AuditEvent](), token
        for _ in range(MOST_PIECES):
            answer = await client.audit.ListAuditEvents(
                api.ListAuditEventsRequest(
                    filter=audit_filter(wanted.value or ""),
                    page_size=MOST_EVENTS - len(found),
                    page_token=at,
                )
            )
            found += answer.audit_events
            at = answer.next_page_token
            if not at or len(found) == MOST_EVENTS:
                break
        token = at  # only now: after an error it is read from where it was
        return found

    async def look() -> None:
        try:
            found = await actions.ask(read)
        except GpuscaleError as error:
            timer.active = isinstance(error, UNANSWERED)
            why.text = f"cannot read the audit log: {error.message}"
            table.element.set_visibility(False)
            return
        timer.active = False
        why.text = f"{counted(len(found), 'call')} that may have changed something, or were refused"
        older.set_enabled(bool(token))
        table.element.set_visibility(True)
        table.show(EVENTS.rows(found))

    async def begin() -> None:
        nonlocal token
        token = ""
        await look()

    older.on_click(look)
    newest.on_click(begin)
    wanted.on_value_change(begin)
    timer = ui.timer(REFRESH, look)  # while there is no answer


def audit_filter(text: str) -> str:
    """A filter that matches every word, in any case, against a name, method, resource or status."""

    def somewhere(word: str) -> str:
        places = [(field, word) for field in ("caller", "resource", "reservations", "method")]
        places += [("method", word[:1].upper() + word[1:]), ("code", word.upper())]
        return " OR ".join(f"{field}:{json.dumps(one, ensure_ascii=False)}" for field, one in places)

    return " AND ".join(map(somewhere, text.split()))


EVENTS = ResourceTable[api.AuditEvent](
    key=("", lambda one: f"{one.request_id} {one.end_time.ToNanoseconds()}"),
    time=("time", lambda one: humanize.clock(one.end_time)),
    caller=("who", lambda one: one.caller or humanize.UNKNOWN),
    method=("what", lambda one: one.method.rpartition("/")[2]),
    resource=("of", lambda one: one.resource or ", ".join(one.reservations)),
    resource_to=(
        "",
        lambda one: next(
            (f"/{name}" for name in (one.resource, *one.reservations) if name.startswith("reservations/")), ""
        ),
    ),
    code=("answer", lambda one: one.code.lower().replace("_", " ")),
    took=(
        "took",
        lambda one: (
            humanize.length(one.duration) if one.duration.seconds else f"{one.duration.ToMilliseconds()} ms"
        ),
    ),
    role=("role", lambda one: humanize.word(one, "role")),
    peer=("from", lambda one: f"{one.peer} via {one.via}" if one.via else one.peer),
)

"""Use policies: which there are, and what they did last, or nearly did; and the audit log: what people and programs did."""

import json
from collections.abc import Sequence

from nicegui import ui

from gpuscale.api.allocator import v1 as api
from gpuscale.api.audit import v1 as audit_api
from gpuscale.client import AsyncClient, GpuscaleError
from gpuscale.dashboard import humanize
from gpuscale.dashboard.frame import DashboardSite, ListTable, PageAddress, page
from gpuscale.dashboard.rows import Columns, Row

REFRESH = 5.0
"""Seconds between two questions for what policies did."""
MOST_ACTS = 100
POLICIES: Columns = {
    "name": "policy",
    "condition": "condition",
    "mode": "mode",
    "stages": "stages",
    "description": "description",
}
ACTS: Columns = {
    "key": "act",
    "time": "time",
    "outcome": "outcome",
    "actions": "actions",
    "subject": "of",
    "reason": "why",
}


def policies_page(site: DashboardSite) -> None:
    """Make the page."""
    with page(site, "Policies"):
        why = ui.label().classes("gs-quiet")
        policies = ListTable(POLICIES, key="name", empty="no policies: docs/sharing.md has one to begin with")
        acts = ListTable(ACTS, key="key", links=("subject",), empty="no policy did anything yet")

    async def refresh() -> None:
        try:
            found = await site.client.policies.ListUsePolicies(api.ListUsePoliciesRequest(page_size=1000))
            done = await site.client.policies.ListPolicyActs(api.ListPolicyActsRequest(page_size=MOST_ACTS))
        except GpuscaleError as error:
            why.text = f"the policies cannot be read: {error.message}"
            return
        why.text = f"what they did, and nearly did: the last {MOST_ACTS}"
        policies.show([policy_row(one) for one in found.use_policies])
        acts.show([act_row(one) for one in done.policy_acts])

    ui.timer(REFRESH, refresh)


def policy_row(one: api.UsePolicy) -> Row:
    """What the table shows of a policy."""
    stages = (f"{humanize.length(stage.after)}: {_actions(stage.actions)}" for stage in one.spec.stages)
    return {
        "name": one.name.removeprefix("policies/"),
        "condition": humanize.word(one.spec, "condition"),
        "mode": "active" if one.spec.active else "shadow",
        "stages": "; ".join(stages),
        "description": one.spec.description,
    }


def act_row(one: api.PolicyAct) -> Row:
    """What the table shows of an act."""
    return {
        "key": "/".join(one.name.split("/")[1::2]),
        "time": humanize.clock(one.time),
        "outcome": humanize.word(one, "outcome"),
        "actions": _actions(one.actions),
        "subject": "/".join(one.subject.split("/")[1::2]),
        "subject_to": f"/{one.subject}" if one.subject.startswith("reservations/") else "",
        "reason": one.reason,
    }


def _actions(actions: Sequence[api.PolicyAction.ValueType]) -> str:
    return ", ".join(api.PolicyAction.Name(one).removeprefix("POLICY_ACTION_").lower() for one in actions)


EVENTS: Columns = {
    "time": "time",
    "caller": "who",
    "method": "what",
    "resource": "of",
    "code": "answer",
    "took": "took",
    "role": "role",
    "peer": "from",
}
MOST_EVENTS = 500
MOST_PIECES = 8
"""Calls for one look: each reads a bounded piece of the log."""


def audit_page(site: DashboardSite) -> None:
    """Make the page."""
    with page(site, "Audit"):
        with ui.row().classes("items-center"):
            wanted = PageAddress().text("filter", "filter: who, what, of, answer")
            older = ui.button("older").props("dense no-caps flat")
            newest = ui.button("newest").props("dense no-caps flat")
        why = ui.label().classes("gs-quiet")
        table = ListTable(EVENTS, key="key", links=("resource",), empty="no call matches")
    actions, token = site.actions(), ""

    async def read(client: AsyncClient) -> list[audit_api.AuditEvent]:
        nonlocal token
        found = list[audit_api.AuditEvent]()
        for _ in range(MOST_PIECES):
            answer = await client.audit.ListAuditEvents(
                audit_api.ListAuditEventsRequest(
                    filter=audit_filter(wanted.value or ""),
                    page_size=MOST_EVENTS - len(found),
                    page_token=token,
                )
            )
            found += answer.audit_events
            token = answer.next_page_token
            if not token or len(found) == MOST_EVENTS:
                break
        return found

    async def look() -> None:
        try:
            found = await (read(site.client) if actions is None else actions.ask(read))
        except GpuscaleError as error:
            why.text = f"the audit log cannot be read: {error.message}"
            found = []
        else:
            why.text = f"{len(found)} calls that may have changed something, or were refused"
        older.set_enabled(bool(token))
        table.show([audit_row(one) for one in found])

    async def begin() -> None:
        nonlocal token
        token = ""
        await look()

    older.on_click(look)
    newest.on_click(begin)
    wanted.on_value_change(begin)
    ui.timer(0.0, begin, once=True)


def audit_filter(text: str) -> str:
    """What every word has to be in: a name, a method, a resource or an answer, in whose case it need not be."""

    def somewhere(word: str) -> str:
        places = [(field, word) for field in ("caller", "resource", "reservations", "method")]
        places += [("method", word[:1].upper() + word[1:]), ("code", word.upper())]
        return " OR ".join(f"{field}:{json.dumps(one, ensure_ascii=False)}" for field, one in places)

    return " AND ".join(map(somewhere, text.split()))


def audit_row(one: audit_api.AuditEvent) -> Row:
    """What the table shows of a call."""
    resource = one.resource or ", ".join(one.reservations)
    to = next((name for name in (one.resource, *one.reservations) if name.startswith("reservations/")), "")
    return {
        "key": f"{one.request_id} {one.end_time.ToNanoseconds()}",
        "time": humanize.clock(one.end_time),
        "caller": one.caller or humanize.UNKNOWN,
        "method": one.method.rpartition("/")[2],
        "resource": resource,
        "resource_to": to and f"/{to}",
        "code": one.code.lower().replace("_", " "),
        "took": humanize.length(one.duration)
        if one.duration.seconds
        else f"{one.duration.ToMilliseconds()} ms",
        "role": humanize.word(one, "role"),
        "peer": f"{one.peer} via {one.via}" if one.via else one.peer,
    }

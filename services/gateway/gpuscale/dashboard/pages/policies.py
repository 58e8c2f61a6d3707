"""Use policies, and what they did last or, in shadow mode, would have done."""

from collections.abc import Sequence

from nicegui import ui

from gpuscale.api.allocator import v1 as api
from gpuscale.dashboard import humanize
from gpuscale.dashboard.frame import DashboardSite, ListTable, page, reading
from gpuscale.dashboard.rows import ResourceTable

REFRESH = 5.0
"""Seconds between queries of what policies did."""
MOST_ACTS = 100


def policies_page(site: DashboardSite) -> None:
    """Build the page."""
    with page(site, "Policies"):
        table = ListTable(POLICIES.columns, key="name", empty="no policies: docs/sharing.md has an example")
        why = ui.label().classes("gs-quiet")
        acts = ListTable(ACTS.columns, key="key", links=("subject",), empty="no policy has acted yet")

    async def refresh() -> None:
        with reading("the policies", why):
            found = await site.client.policies.ListUsePolicies(api.ListUsePoliciesRequest(page_size=1000))
            done = await site.client.policies.ListPolicyActs(api.ListPolicyActsRequest(page_size=MOST_ACTS))
            why.text = f"what they did or would have done: the last {MOST_ACTS}"
            table.show(POLICIES.rows(found.use_policies))
            acts.show(ACTS.rows(done.policy_acts))

    ui.timer(REFRESH, refresh)


def _actions(actions: Sequence[api.PolicyAction.ValueType]) -> str:
    return ", ".join(api.PolicyAction.Name(one).removeprefix("POLICY_ACTION_").lower() for one in actions)


POLICIES = ResourceTable[api.UsePolicy](
    name=("policy", lambda one: one.name.removeprefix("policies/")),
    condition=("condition", lambda one: humanize.word(one.spec, "condition")),
    mode=("mode", lambda one: "active" if one.spec.active else "shadow"),
    stages=(
        "stages",
        lambda one: "; ".join(
            f"{humanize.length(each.after)}: {_actions(each.actions)}" for each in one.spec.stages
        ),
    ),
    description=("description", lambda one: one.spec.description),
)
ACTS = ResourceTable[api.PolicyAct](
    key=("act", lambda one: "/".join(one.name.split("/")[1::2])),
    time=("time", lambda one: humanize.clock(one.time)),
    outcome=("outcome", lambda one: humanize.word(one, "outcome")),
    actions=("actions", lambda one: _actions(one.actions)),
    subject=("of", lambda one: "/".join(one.subject.split("/")[1::2])),
    subject_to=("", lambda one: f"/{one.subject}" if one.subject.startswith("reservations/") else ""),
    reason=("why", lambda one: one.reason),
)

"""Use policies, and what they did last or, in shadow mode, would have done."""

from collections.abc import Sequence

from nicegui import ui

from gpuscale.api.allocator import v1 as api
from gpuscale.client import GpuscaleError
from gpuscale.dashboard import humanize
from gpuscale.dashboard.frame import DashboardSite, ListTable, page
from gpuscale.dashboard.rows import Columns, Row

REFRESH = 5.0
"""Seconds between queries of what policies did."""
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
    """Build the page."""
    with page(site, "Policies"):
        why = ui.label().classes("gs-quiet")
        policies = ListTable(POLICIES, key="name", empty="no policies: docs/sharing.md has an example")
        acts = ListTable(ACTS, key="key", links=("subject",), empty="no policy has acted yet")

    async def refresh() -> None:
        try:
            found = await site.client.policies.ListUsePolicies(api.ListUsePoliciesRequest(page_size=1000))
            done = await site.client.policies.ListPolicyActs(api.ListPolicyActsRequest(page_size=MOST_ACTS))
        except GpuscaleError as error:
            why.text = f"cannot read the policies: {error.message}"
            return
        why.text = f"what they did or would have done: the last {MOST_ACTS}"
        policies.show([policy_row(one) for one in found.use_policies])
        acts.show([act_row(one) for one in done.policy_acts])

    ui.timer(REFRESH, refresh)


def policy_row(one: api.UsePolicy) -> Row:
    """The table row of a policy."""
    stages = (f"{humanize.length(stage.after)}: {_actions(stage.actions)}" for stage in one.spec.stages)
    return {
        "name": one.name.removeprefix("policies/"),
        "condition": humanize.word(one.spec, "condition"),
        "mode": "active" if one.spec.active else "shadow",
        "stages": "; ".join(stages),
        "description": one.spec.description,
    }


def act_row(one: api.PolicyAct) -> Row:
    """The table row of an act."""
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

"""`gpuscalectl` for use policies, notifications and power budgets: explain and delete."""

from datetime import datetime
from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import Session, command, names, one_name
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import MOMENT, YES, format_duration, local_text, option
from gpuscale.cli.views import allocator as views
from gpuscale.common import wire
from gpuscale.common.names import BUDGET, POLICY, TARGET
from gpuscale.common.sizes import counted

if TYPE_CHECKING:
    from gpuscale.client import Client

Names = tuple[str, ...]


SINCE = option("--since", type=MOMENT, help="With --dry-run, how far to go back; 7 days by default.")
DRY_RUN_SECONDS = 300.0
"""Time limit of a dry run, which takes seconds for a week of 100 GPUs."""


@command("explain policy idle")
@one_name("policies")
def explain_policy(session: Session, name: str) -> None:
    """Explain a use policy: what it watches, what it does next and when, and what it did last."""
    with session.connect() as client:
        found = client.policies.GetUsePolicy(api.GetUsePolicyRequest(name=full_name(POLICY, name)))
        done = lookup.acts(client, [name], limit=20) if session.output.human else []
    output = session.output
    if not output.human and output.format is not Format.NAME:
        output.write_data(to_dict(found))
        return
    output.write_one(found.use_policy, views.POLICIES)
    if not output.human:
        return
    standing = output.table(found.standings, views.STANDINGS) if found.standings else ["nobody"]
    write_lines(["", "its condition holds for:", *standing])
    write_lines(["", *output.table(done, views.ACTS)] if done else [])


def show_past(session: Session, client: "Client", policy: api.UsePolicy, since: datetime | None) -> None:
    """Show what a policy would have done since a time, and how much of that time is not recorded."""
    request = api.DryRunUsePolicyRequest(use_policy=policy, start_time=wire.optional_timestamp(since))
    found = client.policies.DryRunUsePolicy(request, timeout=DRY_RUN_SECONDS)
    output = session.output
    if not output.human:
        output.write_data(to_dict(found))
        return
    write_lines(
        output.table(found.policy_acts, views.PAST) if found.policy_acts else ["it would have done nothing"]
    )
    begin, end = (local_text(wire.to_datetime(one)) for one in (found.start_time, found.end_time))
    known, unknown = (wire.seconds(one) for one in (found.known, found.unknown))
    share = f"{unknown / (known + unknown):.0%}" if unknown else "none"
    note(
        f"{policy.name} from {begin} to {end}, in steps of {format_duration(wire.seconds(found.step))}: {counted(found.act_count, 'act')},"
        f" {counted(found.subject_count, 'reservation')}; unknown of the time they were held: {share}"
    )
    if found.HasField("complete_since"):
        forgotten = local_text(wire.to_datetime(found.complete_since))
        note(f"not all reservations that ended before {forgotten} are on record")


@command("delete policy idle")
@names("policies")
@YES
def delete_policy(session: Session, name: Names, yes: bool) -> None:
    """Delete use policies; reservations they were about to revoke stay."""
    delete_each(session, "policies", POLICY, name, api.DeleteUsePolicyRequest, yes=yes)


@command("delete notification-target lab")
@names("targets")
@YES
def delete_target(session: Session, name: Names, yes: bool) -> None:
    """Delete notification targets and their undelivered notifications."""
    delete_each(session, "targets", TARGET, name, api.DeleteNotificationTargetRequest, yes=yes)


@command("delete budget rack")
@names("budgets")
@YES
def delete_budget(session: Session, name: Names, yes: bool) -> None:
    """Delete power budgets and restore the limits of their GPUs, unless something else caps them."""
    delete_each(session, "budgets", BUDGET, name, api.DeletePowerBudgetRequest, yes=yes)

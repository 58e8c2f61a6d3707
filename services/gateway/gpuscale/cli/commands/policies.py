"""`gpuscalectl` for use policies and notifications: what policies did, on whom they have an eye, and what targets were not told."""

from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import delete_each, show_each
from gpuscale.cli.console.command import command, names, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import write_lines
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import YES
from gpuscale.cli.views import policies as views
from gpuscale.common.names import NOTIFICATION, POLICY, TARGET

if TYPE_CHECKING:
    from gpuscale.client import Client

Names = tuple[str, ...]


@command("explain policy idle")
@one_name("policies")
def explain_policy(session: Session, name: str) -> None:
    """On whom a use policy has an eye, what comes next and when, and what it did last."""
    with session.connect() as client:
        found = client.policies.GetUsePolicy(api.GetUsePolicyRequest(name=full_name(POLICY, name)))
        done = lookup.acts(client, [name], limit=20) if session.output.human else []
    output = session.output
    if not output.human:
        output.write_one(found, views.STANDINGS_OF)
        return
    output.write_one(found.use_policy, views.VIEWS["policies"])
    standing = output.table(found.standings, views.STANDINGS) if found.standings else ["nobody"]
    write_lines(["", "its condition holds for:", *standing])
    write_lines(["", *output.table(done, views.VIEWS["acts"])] if done else [])


@command("delete policy idle")
@names("policies")
@YES
def delete_policy(session: Session, name: Names, yes: bool) -> None:
    """Delete use policies; what they would take away may stay."""
    wanted = [full_name(POLICY, one) for one in name]
    delete_each(session, "policies", wanted, api.DeleteUsePolicyRequest, yes=yes)


@command("delete notification-target lab")
@names("targets")
@YES
def delete_target(session: Session, name: Names, yes: bool) -> None:
    """Delete notification targets, and what they were not told yet."""
    wanted = [full_name(TARGET, one) for one in name]
    delete_each(session, "targets", wanted, api.DeleteNotificationTargetRequest, yes=yes)


@command("resend lab/12")
@names("notifications")
def resend(session: Session, name: Names) -> None:
    """Send notifications again that a target did not take. A NAME is TARGET/NUMBER."""

    def send(client: "Client", full: str) -> api.Notification:
        return client.notifications.ResendNotification(api.ResendNotificationRequest(name=full)).notification

    show_each(session, views.VIEWS["notifications"], [full_name(NOTIFICATION, one) for one in name], send)

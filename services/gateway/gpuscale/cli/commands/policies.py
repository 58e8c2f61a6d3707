"""`gpuscalectl` for use policies and notifications: what policies did, on whom they have an eye, and what targets were not told."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.commands.get import get, show
from gpuscale.cli.console.bulk import delete_each, show_each
from gpuscale.cli.console.command import command, names, one_name
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import write_lines
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import YES
from gpuscale.common.names import NOTIFICATION, POLICY, TARGET

if TYPE_CHECKING:
    from gpuscale.client import Client

Names = tuple[str, ...]


def _list(noun: str, example: str, says: str) -> Callable[..., object]:
    """`get` of a kind whose table is in `views.policies` under its name."""

    def function(session: Session, name: Names) -> None:
        from gpuscale.cli.console import lookup
        from gpuscale.cli.views.policies import VIEWS

        show(session, name, VIEWS[noun], lookup.READERS[noun])

    function.__doc__ = says
    return get(noun, example)(function)


policies = _list(
    "policies", "policies -o wide", "Use policies: what is done about GPUs that are held and not used."
)
acts = _list(
    "acts",
    "policy-acts idle",
    "What use policies did, and nearly did, newest first. A NAME is that of a policy.",
)
targets = _list("targets", "targets", "Webhooks that are told of what happens to reservations.")
notifications = _list(
    "notifications",
    "notifications -l dead=true",
    "What targets were not told yet, and what they will not be told by itself.",
)


@command("explain policy idle")
@one_name("policies")
def explain_policy(session: Session, name: str) -> None:
    """On whom a use policy has an eye, what comes next and when, and what it did last."""
    from gpuscale.cli.console import lookup
    from gpuscale.cli.views import policies as views

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
    delete_each(
        session,
        "policies",
        [full_name(POLICY, one) for one in name],
        lambda client, full: client.policies.DeleteUsePolicy(api.DeleteUsePolicyRequest(name=full)),
        lambda client, full: client.policies.GetUsePolicy(api.GetUsePolicyRequest(name=full)),
        yes=yes,
    )


@command("delete notification-target lab")
@names("targets")
@YES
def delete_target(session: Session, name: Names, yes: bool) -> None:
    """Delete notification targets, and what they were not told yet."""

    def delete(client: "Client", full: str) -> object:
        return client.notifications.DeleteNotificationTarget(api.DeleteNotificationTargetRequest(name=full))

    def check(client: "Client", full: str) -> object:
        return client.notifications.GetNotificationTarget(api.GetNotificationTargetRequest(name=full))

    delete_each(session, "targets", [full_name(TARGET, one) for one in name], delete, check, yes=yes)


@command("resend lab/12")
@names("notifications")
def resend(session: Session, name: Names) -> None:
    """Send notifications again that a target did not take. A NAME is TARGET/NUMBER."""
    from gpuscale.cli.views.policies import VIEWS

    def send(client: "Client", full: str) -> api.Notification:
        return client.notifications.ResendNotification(api.ResendNotificationRequest(name=full)).notification

    show_each(session, VIEWS["notifications"], [full_name(NOTIFICATION, one) for one in name], send)

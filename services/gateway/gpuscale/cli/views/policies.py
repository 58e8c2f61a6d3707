"""Power budgets and changes; use policies, whom they watch and what they did; notification targets, and what is not delivered."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpuscale.api.allocator import v1 as api
from gpuscale.cli.console.cells import Column, View, duration, moment, short, since, text, word
from gpuscale.cli.console.output import ABSENT
from gpuscale.cli.grammar.parameters import format_duration
from gpuscale.common import wire


def _words(values: Sequence[int], of: Any) -> str:
    prefix = of.Name(0).removesuffix("UNSPECIFIED")
    return ",".join(of.Name(one).removeprefix(prefix).lower() for one in values) or ABSENT


def _stages(policy: api.UsePolicy) -> str:
    """Such as `1h note,notify; 2h revoke`."""
    return "; ".join(
        f"{format_duration(wire.seconds(one.after))} {_words(one.actions, api.PolicyAction)}"
        for one in policy.spec.stages
    )


def _watts(message: Any, field: str) -> str:
    known = not message.DESCRIPTOR.fields_by_name[field].has_presence or message.HasField(field)
    return f"{getattr(message, field):.0f}W" if known else ABSENT


def _of_sums(one: api.PowerBudget, field: str) -> str:
    """Of each sum, the first few."""
    more = len(one.sums) - _MOST_SUMS
    shown = " ".join(_watts(of, field) for of in one.sums[:_MOST_SUMS])
    return f"{shown} and {more} more" if more > 0 else shown or ABSENT


_MOST_SUMS = 3
ACTS = (
    Column[api.PolicyAct]("TIME", lambda one: moment(one, "time"), spare=True),
    Column[api.PolicyAct]("OUTCOME", lambda one: word(one, "outcome").lower()),
    Column[api.PolicyAct]("ACTIONS", lambda one: _words(one.actions, api.PolicyAction)),
    Column[api.PolicyAct]("SUBJECT", lambda one: short(one.subject)),
    Column[api.PolicyAct]("WHY", lambda one: text(one.reason)),
    Column[api.PolicyAct]("STAGE", lambda one: str(one.stage), wide=True),
)
PAST = View[api.PolicyAct]("policyActs", ACTS)
VIEWS: Mapping[str, View[Any]] = {
    "policies": View[api.UsePolicy](
        "usePolicies",
        (
            Column("NAME", lambda one: short(one.name)),
            Column("CONDITION", lambda one: word(one.spec, "condition").lower()),
            Column("MODE", lambda one: "active" if one.spec.active else "shadow"),
            Column("STAGES", _stages),
            Column("EXEMPT", lambda one: str(len(one.spec.exemptions)), spare=True),
            Column("AGE", lambda one: since(one, "create_time"), moving=True, spare=True),
            Column("DESCRIPTION", lambda one: text(one.spec.description), wide=True),
        ),
    ),
    "acts": View[api.PolicyAct](
        "policyActs",
        (
            Column("NAME", lambda one: short(one.name)),
            *ACTS,
        ),
    ),
    "targets": View[api.NotificationTarget](
        "notificationTargets",
        (
            Column("NAME", lambda one: short(one.name)),
            Column("HOST", lambda one: text(one.host)),
            Column("SIGNED", lambda one: "yes" if one.signed else "no"),
            Column(
                "EVENTS", lambda one: _words(one.spec.events, api.NotificationEvent).replace(ABSENT, "all")
            ),
            Column("AGE", lambda one: since(one, "create_time"), moving=True, spare=True),
        ),
    ),
    "budgets": View[api.PowerBudget](
        "powerBudgets",
        (
            Column("NAME", lambda one: short(one.name)),
            Column("WATTS", lambda one: _watts(one.spec, "watts")),
            Column("PER", lambda one: text(one.spec.per or "all")),
            Column("SHARE", lambda one: word(one.spec, "share").lower(), spare=True),
            Column("DRAWN", lambda one: _of_sums(one, "drawn_watts")),
            Column("ROOM", lambda one: _of_sums(one, "room_watts")),
            Column("CAPPED", lambda one: str(sum(of.capped_count for of in one.sums))),
            Column("LOOSE", lambda one: str(sum(of.loose_count for of in one.sums)), spare=True),
            Column("ALARM", lambda one: "yes" if any(of.emergency for of in one.sums) else "no"),
            Column("DESCRIPTION", lambda one: text(one.spec.description), wide=True),
        ),
    ),
    "changes": View[api.PowerChange](
        "powerChanges",
        (
            Column("NAME", lambda one: short(one.name), spare=True),
            Column("TIME", lambda one: moment(one, "time"), spare=True),
            Column("GPU", lambda one: short(one.gpu)),
            Column("BEFORE", lambda one: _watts(one, "before_watts")),
            Column("CAP", lambda one: text(",".join(one.profiles)) if one.profiles else _watts(one, "watts")),
            Column("BUDGET", lambda one: text(short(one.power_budget))),
            Column("WHY", lambda one: text(one.reason)),
        ),
    ),
    "notifications": View[api.Notification](
        "notifications",
        (
            Column("NAME", lambda one: short(one.name)),
            Column("EVENT", lambda one: word(one, "event").lower()),
            Column("STATE", lambda one: "dead" if one.dead else "waiting"),
            Column("TRIED", lambda one: str(one.attempt_count), spare=True),
            Column("PROBLEM", lambda one: text(one.problem)),
            Column("TIME", lambda one: moment(one, "time"), spare=True),
            Column("TEXT", lambda one: text(one.text)),
        ),
    ),
}

STANDINGS_OF = View[api.GetUsePolicyResponse]("policies", (Column("NAME", lambda one: one.use_policy.name),))
STANDINGS = View[api.PolicyStanding](
    "standings",
    (
        Column("SUBJECT", lambda one: short(one.subject)),
        Column("HELD", lambda one: duration(one, "held")),
        Column("STATE", lambda one: "exempt" if one.exempt else "paused" if one.paused else "counting"),
        Column("DONE", lambda one: str(one.done_count)),
        Column("NEXT", lambda one: _words(one.next_actions, api.PolicyAction)),
        Column("AT", lambda one: moment(one, "next_time")),
        Column("SEEN", lambda one: text(one.message)),
    ),
)

"""`gpuscalectl evaluate`: what an evaluation would come to, with what is stated in place of what is seen."""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import to_dict, write_lines
from gpuscale.cli.console.session import session_of
from gpuscale.cli.grammar.options import Name, duration
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import EndpointSpec, EvaluateResponse, StatedRuleChange, StatedSignal

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

MISSING = "?"
Stated = Annotated[
    list[str] | None,
    typer.Option(
        "--signal",
        metavar="ID=VALUE[@AGE]",
        help="What a signal shows, such as depth=50@3s; depth=? is missing.",
    ),
]
Rested = Annotated[
    list[str] | None,
    typer.Option(
        "--changed", metavar="RULE=AGE", help="How long ago a rule changed the count, such as up=250s."
    ),
]


def stated_signal(text: str) -> "StatedSignal":
    """A signal as it was typed; a usage error where it is none."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.common.wire import to_duration

    name, equals, shown = text.partition("=")
    value, at, age = shown.partition("@")
    try:
        number = None if value == MISSING else float(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no signal; write it like depth=50@3s") from error
    if not name or not equals:
        raise typer.BadParameter(f"{text!r} is no signal; write it like depth=50@3s")
    old = to_duration(duration(age)) if at else None
    return api.StatedSignal(signal=name, value=number, age=old)


def stated_change(text: str) -> "StatedRuleChange":
    """When a rule changed the count, as it was typed; a usage error where it is none."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.common.wire import to_duration

    rule, equals, age = text.partition("=")
    if not rule or not equals:
        raise typer.BadParameter(f"{text!r} is no change; write it like up=250s")
    return api.StatedRuleChange(rule=rule, age=to_duration(duration(age)))


@app.command("endpoint")
def evaluate_endpoint(
    context: typer.Context,
    name: Name = "",
    file: Annotated[
        str,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Manifest of an endpoint whose spec is asked about."
        ),
    ] = "",
    signals: Stated = None,
    before: Annotated[int | None, typer.Option(min=0, help="Replicas aimed at.", show_default=False)] = None,
    ready: Annotated[int | None, typer.Option(min=0, help="Replicas that work.", show_default=False)] = None,
    unknown: Annotated[
        int | None, typer.Option(min=0, help="Replicas that are not heard of.", show_default=False)
    ] = None,
    changed: Rested = None,
    at: Annotated[
        datetime | None, typer.Option(help="The time of day, in UTC, for schedules.", show_default=False)
    ] = None,
) -> None:
    """Say what an endpoint would scale to; nothing is changed. What is not stated comes from the live endpoint."""
    from datetime import UTC

    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console.resources import full_name
    from gpuscale.common import names
    from gpuscale.common.wire import to_timestamp

    if not name and not file:
        raise InvalidArgumentError("NAME is missing, or --file")
    changes = [stated_change(one) for one in changed or ()]
    request = api.EvaluateRequest(
        name=full_name(names.ENDPOINT, name) if name else "",
        spec=_spec(file) if file else None,
        signals=[stated_signal(one) for one in signals or ()],
        before=before,
        ready_replicas=ready,
        unknown_replicas=unknown,
        past=api.StatedPast(rule_changes=changes) if changes else None,
        time=None if at is None else to_timestamp(at.replace(tzinfo=UTC)),
    )
    session = session_of(context)
    with session.connect() as client:
        found = client.decisions.Evaluate(request)
    if session.output.human:
        write_lines(lines(found))
    else:
        session.output.write_data(to_dict(found))


def lines(found: "EvaluateResponse") -> list[str]:
    """An evaluation in words: what was seen, what each step made of it, and what would be otherwise."""
    from gpuscale.cli.commands.explain import step_lines
    from gpuscale.cli.views.asking import evaluation_lines

    decision = found.decision
    limited = f", limited by {decision.limited_by}" if decision.limited_by else ""
    head = f"{decision.before} -> {decision.wanted} wanted{limited}: {decision.summary}"
    return [head, *step_lines(decision), *evaluation_lines(found)]


def _spec(name: str) -> "EndpointSpec":
    """The spec of the one endpoint in a file."""
    from gpuscale.cli.commands.apply import read
    from gpuscale.cli.manifests.policies import parse_policies

    policies = [one for text, source in read(name) for one in parse_policies(text, source)]
    if len(policies) != 1 or policies[0].WhichOneof("policy") != "spec":
        raise InvalidArgumentError(f"{name}: one endpoint is asked about, by its spec")
    return policies[0].spec

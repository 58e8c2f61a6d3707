"""`gpuscalectl explain` and `evaluate`: why things are as they are, what a field means, and what an endpoint would scale to."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from gpuscale.api.allocator import v1 as allocator_api
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli import manifests
from gpuscale.cli.commands.apply import read
from gpuscale.cli.console import lookup
from gpuscale.cli.console.command import Session, command, one_name
from gpuscale.cli.console.errors import MEANINGS
from gpuscale.cli.console.output import to_dict
from gpuscale.cli.console.terminal import write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import NOUNS, full_name, plural
from gpuscale.cli.grammar.parameters import (
    COUNT,
    MOMENT,
    POSITIVE,
    Parsed,
    format_duration,
    local_text,
    option,
    pair,
    repeated,
)
from gpuscale.cli.grammar.selecting import near
from gpuscale.cli.views import allocator as allocator_views
from gpuscale.cli.views import autoscaler as autoscaler_views
from gpuscale.cli.views import contract_docs
from gpuscale.common import wire
from gpuscale.common.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from gpuscale.common.names import ENDPOINT, POLICY
from gpuscale.common.sizes import to_seconds

if TYPE_CHECKING:
    from gpuscale.client import Client

VERIFY = option(
    "--verify", is_flag=True, help="Evaluate it again from its stored inputs; fail if the result differs."
)


@command("explain endpoint jobs")
@one_name("endpoints")
@option("--last", type=POSITIVE, default=1, metavar="N", help="Decisions to show, newest first.")
@option("--at", type=MOMENT, help="Explain its replicas at this time: yesterday, 03:00, 2h (ago).")
@VERIFY
def explain_endpoint(session: Session, name: str, last: int, at: datetime | None, verify: bool) -> None:
    """Explain the number of replicas of an endpoint: why, what would change it, and when it may change."""
    from gpuscale.cli.commands.backtest import looked

    with session.connect() as client:
        [endpoint] = lookup.endpoints(client, [name])
        about = lookup.About("", wire.TimeRange(None, at))
        decisions = lookup.decisions(client, endpoint=endpoint.name, limit=last, about=about)
        # Evaluate now: an older decision does not say what has held the count since.
        now = None if at else client.decisions.Evaluate(api.EvaluateRequest(name=endpoint.name))
        verdict = _verified(client, decisions[0]) if verify and decisions else None
        chosen = looked(client, endpoint) if endpoint.spec.HasField("adaptive") and not at else ()
    if not session.output.human:
        session.output.write_list(decisions, autoscaler_views.DECISIONS)
        _require_equal(verdict)
        return
    lines = [f"{endpoint.name} at {local_text(at)}:"] if at else autoscaler_views.endpoint_lines(endpoint)
    for decision in decisions:
        lines += ["", *autoscaler_views.decision_lines(decision)]
    if not decisions:
        lines += ["", "No decision until then." if at else "No decision yet."]
    if now is not None:
        wanted = f"{now.decision.before} -> {now.decision.wanted} wanted"
        lines += [
            "",
            f"evaluated now: {wanted}: {now.decision.summary}",
            *autoscaler_views.outlook_lines(endpoint, now, decisions[:1]),
        ]
    write_lines([*lines, *chosen, *_verdict_lines(verdict)])
    _require_equal(verdict)


@command("explain decision jobs/d1")
@one_name("decisions")
@VERIFY
def explain_decision(session: Session, name: str, verify: bool) -> None:
    """Explain a decision, step by step. NAME is ENDPOINT/DECISION."""
    with session.connect() as client:
        [decision] = lookup.decisions(client, [name])
        verdict = _verified(client, decision) if verify else None
    if session.output.human:
        write_lines([*autoscaler_views.decision_lines(decision), *_verdict_lines(verdict)])
    else:
        session.output.write_one(decision, autoscaler_views.DECISIONS)
    _require_equal(verdict)


def _verified(client: "Client", decision: "api.Decision") -> "api.VerifyDecisionResponse":
    return client.decisions.VerifyDecision(api.VerifyDecisionRequest(name=decision.name))


def _verdict_lines(verdict: "api.VerifyDecisionResponse | None") -> list[str]:
    if verdict is None or verdict.equal:
        return ["verified: evaluating its stored inputs again gives the same decision"] if verdict else []
    differences = (f"  {one}" for one in verdict.differences)
    return ["evaluating its stored inputs again gives another decision:", *differences]


def _require_equal(verdict: "api.VerifyDecisionResponse | None") -> None:
    if verdict is not None and not verdict.equal:
        raise FailedPreconditionError("the decision cannot be reproduced", reason="DECISION_DIFFERS")


@command("explain reservation r3fa7kq2vnb4d")
@one_name("reservations")
def explain_reservation(session: Session, name: str) -> None:
    """Explain why a reservation got its GPUs, with the parts of each score, and why it ended or will end."""
    from gpuscale.client.states import advice, queued, revoked_early

    with session.connect() as client:
        [reservation] = lookup.reservations(client, [name])
    output = session.output
    output.write_one(reservation, allocator_views.RESERVATIONS)
    if not output.human:
        return
    lost = [gpu.uuid for gpu in reservation.gpus if gpu.lost]
    lines = [f"vanished: {', '.join(lost)}"] if lost else []
    if (early := revoked_early(reservation)) is not None:
        left = reservation.remaining.ToTimedelta().total_seconds() - early
        lines.append(f"revoked in {format_duration(left)}: {reservation.end_reason}")
    elif reservation.end_reason:
        lines.append(f"ended: {reservation.end_reason}")
    lines += filter(None, (advice(reservation), *reservation.notes))
    if reservation.job.queue_reason:
        lines += filter(None, (f"waits, {queued(reservation.job)}", reservation.job.queue_order))
    gpus = ["", *output.table(reservation.gpus, allocator_views.RESERVED_GPUS)] if reservation.gpus else []
    write_lines([*gpus, *(["", *lines] if lines else ())])


@command("explain policy idle")
@one_name("policies")
def explain_policy(session: Session, name: str) -> None:
    """Explain a use policy: what it watches, what it does next and when, and what it did last."""
    with session.connect() as client:
        found = client.policies.GetUsePolicy(allocator_api.GetUsePolicyRequest(name=full_name(POLICY, name)))
        done = lookup.acts(client, [name], limit=20) if session.output.human else []
    output = session.output
    if not output.human and output.format is not Format.NAME:
        output.write_data(to_dict(found))
        return
    output.write_one(found.use_policy, allocator_views.POLICIES)
    if not output.human:
        return
    standing = output.table(found.standings, allocator_views.STANDINGS) if found.standings else ["nobody"]
    write_lines(["", "its condition holds for:", *standing])
    write_lines(["", *output.table(done, allocator_views.ACTS)] if done else [])


@command("explain exit-codes")
def explain_exit_codes(session: Session) -> None:
    """List the exit codes of gpuscalectl and their meaning."""
    listed = [{"code": code.value, "meaning": text} for code, text in MEANINGS.items()]
    lines = [f"{code.value:>4}   {meaning}" for code, meaning in MEANINGS.items()]
    session.output.write_said(lines, {"exitCodes": listed})


@command("explain endpoint.spec.min_replicas")
@click.argument("path", metavar="KIND[.FIELD...]")
@option("--recursive", is_flag=True, help="List all fields below it, with their types.")
def explain_field(session: Session, path: str, recursive: bool) -> None:
    """Explain a kind of resource or one of its fields, such as endpoint.spec.min_replicas, or any API message by name."""
    kind, _, rest = path.partition(".")
    root = contract_docs.root_of(plural(kind))
    if not root:
        raise NotFoundError(f"unknown kind {kind!r}{near(kind, (noun.singular for noun in NOUNS))}")
    entry = contract_docs.describe(root, rest, recursive=recursive)
    output = session.output
    if output.human:
        write_lines((contract_docs.tree_lines if recursive else contract_docs.entry_lines)(path, entry))
    elif output.format is Format.NAME:
        write_lines([f"{path}.{part.name}" for part in entry.parts] or [path])
    else:
        output.write_data(contract_docs.entry_data(path, entry))


def _signal(text: str) -> "api.StatedSignal":
    """A signal, ID=VALUE[@AGE]."""
    name, shown = pair(text, "a signal", "depth=50@3s")
    value, at, age = shown.partition("@")
    try:
        number = None if value == "?" else float(value)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a signal; write it like depth=50@3s") from error
    return api.StatedSignal(signal=name, value=number, age=wire.to_duration(to_seconds(age)) if at else None)


def _rule_change(text: str) -> "api.StatedRuleChange":
    """When a rule changed the count, RULE=AGE."""
    rule, age = pair(text, "a rule and an age", "up=250s")
    return api.StatedRuleChange(rule=rule, age=wire.to_duration(to_seconds(age)))


@command("evaluate endpoint jobs --signal depth=50@3s")
@one_name("endpoints", required=False)
@option("--file", "-f", type=click.Path(), default="", help="Manifest of an endpoint to evaluate.")
@repeated(
    "--signal",
    "signals",
    type=Parsed("id=value[@age]", _signal),
    help="The value of a signal, such as depth=50@3s; depth=? is missing.",
)
@option("--before", type=COUNT, metavar="N", help="Replicas desired so far.")
@option("--ready", "ready_replicas", type=COUNT, metavar="N", help="Ready replicas.")
@option("--unknown", "unknown_replicas", type=COUNT, metavar="N", help="Replicas that do not report.")
@repeated(
    "--changed",
    type=Parsed("rule=age", _rule_change),
    help="How long ago a rule changed the count, such as up=250s.",
)
@option("--at", type=MOMENT, help="Time of day, for schedules: 03:00, or 2026-03-01T03:00:00Z.")
def evaluate_endpoint(
    session: Session,
    name: str,
    file: str,
    signals: "tuple[api.StatedSignal, ...]",
    changed: "tuple[api.StatedRuleChange, ...]",
    at: datetime | None,
    **counts: Any,
) -> None:
    """Show how many replicas an endpoint would get, without a change. Values left out come from the live endpoint."""
    if not name and not file:
        raise InvalidArgumentError("pass NAME or --file")
    spec = None
    if file:
        policies = [one for text, source in read(file) for one in manifests.parse_policies(text, source)]
        if len(policies) != 1 or policies[0].WhichOneof("policy") != "spec":
            raise InvalidArgumentError(f"{file}: the file must hold exactly one endpoint")
        spec = policies[0].spec
    request = api.EvaluateRequest(
        name=full_name(ENDPOINT, name) if name else "",
        spec=spec,
        signals=signals,
        past=api.StatedPast(rule_changes=changed) if changed else None,
        time=wire.optional_timestamp(at),
        **counts,
    )
    with session.connect() as client:
        found = client.decisions.Evaluate(request)
    session.output.write_said(autoscaler_views.evaluation_lines(found), found)

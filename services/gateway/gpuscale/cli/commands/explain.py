"""`gpuscalectl explain`: why there are as many replicas as there are, and what exit codes mean."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import write_lines
from gpuscale.cli.console.session import session_of
from gpuscale.cli.grammar.exit_codes import MEANINGS
from gpuscale.cli.grammar.options import Name
from gpuscale.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from gpuscale.api.autoscaler.v1 import (
        Decision,
        DecisionStep,
        Endpoint,
        Observation,
        VerifyDecisionResponse,
    )
    from gpuscale.client import Client

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
Verify = Annotated[
    bool,
    typer.Option(
        "--verify", help="Evaluate it again from what was stored with it; another result is an error."
    ),
]


@app.command("endpoint")
def explain_endpoint(
    context: typer.Context,
    name: Name,
    last: Annotated[int, typer.Option(min=1, help="How many decisions, newest first.")] = 1,
    verify: Verify = False,
) -> None:
    """Why an endpoint has the replicas it has, what would change that, and when it may change."""
    from gpuscale.api.autoscaler import v1 as api
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.asking import outlook_lines
    from gpuscale.cli.views.autoscaler import DECISIONS

    session = session_of(context)
    with session.connect() as client:
        [endpoint] = resources.endpoints(client, [name])
        decisions = resources.decisions(client, endpoint=endpoint.name, limit=last)
        # Asked now, for a decision of a while ago does not say what holds the count back since.
        now = client.decisions.Evaluate(api.EvaluateRequest(name=endpoint.name))
        verdict = verified(client, decisions[0]) if verify and decisions else None
    if not session.output.human:
        session.output.write_list(decisions, DECISIONS)
        _require_equal(verdict)
        return
    lines = _endpoint_lines(endpoint)
    for decision in decisions:
        lines += ["", *decision_lines(decision)]
    if not decisions:
        lines += ["", "No decision yet."]
    asked = f"{now.decision.before} -> {now.decision.wanted} wanted"
    lines += ["", f"evaluated now: {asked}: {now.decision.summary}", *outlook_lines(endpoint, now)]
    write_lines([*lines, *verdict_lines(verdict)])
    _require_equal(verdict)


@app.command("decision")
def explain_decision(context: typer.Context, name: Name, verify: Verify = False) -> None:
    """One decision, step by step. NAME is ENDPOINT/DECISION."""
    from gpuscale.cli.console import resources
    from gpuscale.cli.views.autoscaler import DECISIONS

    session = session_of(context)
    with session.connect() as client:
        [decision] = resources.decisions(client, [name])
        verdict = verified(client, decision) if verify else None
    if session.output.human:
        write_lines([*decision_lines(decision), *verdict_lines(verdict)])
    else:
        session.output.write_one(decision, DECISIONS)
    _require_equal(verdict)


@app.command("exit-codes")
def explain_exit_codes(context: typer.Context) -> None:
    """What each exit code of gpuscalectl means."""
    output = session_of(context).output
    if output.human:
        write_lines([f"{code.value:>4}   {meaning}" for code, meaning in MEANINGS.items()])
    else:
        output.write_data(
            {"exitCodes": [{"code": code.value, "meaning": text} for code, text in MEANINGS.items()]}
        )


def verified(client: "Client", decision: "Decision") -> "VerifyDecisionResponse":
    """What a stored decision comes to when it is evaluated again."""
    from gpuscale.api.autoscaler import v1 as api

    return client.decisions.VerifyDecision(api.VerifyDecisionRequest(name=decision.name))


def verdict_lines(verdict: "VerifyDecisionResponse | None") -> list[str]:
    """Whether it came to the same, and what did not; nothing where nobody asked."""
    if verdict is None:
        return []
    if verdict.equal:
        return ["verified: evaluated again from its stored inputs, it comes to the same"]
    return [
        "evaluated again from its stored inputs, it differs:",
        *(f"  {one}" for one in verdict.differences),
    ]


def _require_equal(verdict: "VerifyDecisionResponse | None") -> None:
    if verdict is not None and not verdict.equal:
        raise FailedPreconditionError("the decision cannot be had again", reason="DECISION_DIFFERS")


def _endpoint_lines(endpoint: "Endpoint") -> list[str]:
    from gpuscale.client.states import capabilities

    status, spec = endpoint.status, endpoint.spec
    paused = ", PAUSED" if spec.paused else ""
    counts = (
        f"{status.desired_replicas} desired, {status.granted_replicas} granted, {status.ready_replicas} ready"
    )
    line = f"{endpoint.name}: {counts}; bounds {spec.min_replicas}-{spec.max_replicas}{paused}"
    sets = [
        f"  {one.id}: {one.desired_replicas} desired, {one.granted_replicas} granted, {one.ready_replicas} ready"
        f" with {one.ready_workers} workers; each {capabilities(asked.capabilities)}"
        for one, asked in zip(status.capability_sets, spec.capability_sets, strict=True)
    ]
    return [line, *sets, *filter(None, (status.summary,))]


def decision_lines(decision: "Decision") -> list[str]:
    """A decision in words: what was seen, what each step made of it, and what held it back."""
    from gpuscale.cli.console.cells import since

    times = (
        f", {decision.count} times since {since(decision, 'create_time')} ago" if decision.count > 1 else ""
    )
    lines = [
        f"{decision.name}, {since(decision, 'last_time')} ago{times}",
        f"  {decision.before} -> {decision.wanted} wanted, {decision.granted} granted"
        + (f", limited by {decision.limited_by}" if decision.limited_by else "")
        + (f": {decision.summary}" if decision.summary else ""),
    ]
    return [*lines, *step_lines(decision)]


def step_lines(decision: "Decision") -> list[str]:
    """What a decision saw, and what each of its steps made of the count."""
    lines = [line for seen in decision.observations for line in _observation(seen)]
    return [*lines, *(f"    {_step(step)}" for step in decision.steps)]


def _observation(seen: "Observation") -> list[str]:
    from gpuscale.cli.console.cells import duration, number, word
    from gpuscale.cli.views.autoscaler import workers
    from gpuscale.client.states import capabilities

    age = duration(seen, "age")
    words = f"{seen.signal} = {number(seen, 'value')} {word(seen, 'status')}"
    words += (f", {age} old" if age != "-" else "") + (f" ({seen.detail})" if seen.detail else "")
    tasks = [f"{one.tasks} that need {capabilities(one.capabilities)}" for one in seen.tasks.demands]
    beside = [f"{workers(one)} that somebody else started" for one in seen.tasks.unmanaged_workers]
    return [f"    saw   {words}", *(f"            {one}" for one in (*tasks, *beside))]


def _step(step: "DecisionStep") -> str:
    from gpuscale.cli.console.cells import word

    stage = f"{word(step, 'stage').lower()} {step.capability_set or step.rule}".rstrip()
    return f"{stage:<16} {step.before} -> {step.after}   {step.code:<16} {step.text}".rstrip()

"""Decisions and evaluations in words: what was observed, what each step made of the count, and what would change it."""

from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.console.cells import duration, number, since, word
from gpuscale.cli.grammar.parameters import format_duration
from gpuscale.cli.grammar.times import local_text
from gpuscale.cli.views.autoscaler import workers
from gpuscale.client.states import capabilities
from gpuscale.common.wire import seconds, to_datetime

DEFAULT_TICK = 15.0
"""Seconds between evaluations of an endpoint that does not say."""


def endpoint_lines(endpoint: api.Endpoint) -> list[str]:
    """How an endpoint stands, with its capability sets."""
    status, spec = endpoint.status, endpoint.spec
    counts = (
        f"{status.desired_replicas} desired, {status.granted_replicas} granted, {status.ready_replicas} ready"
    )
    more = (f"; tenant {endpoint.tenant}" if endpoint.tenant else "") + (", PAUSED" if spec.paused else "")
    line = f"{endpoint.name}: {counts}; bounds {spec.min_replicas}-{spec.max_replicas}{more}"
    sets = [
        f"  {one.id}: {one.desired_replicas} desired, {one.granted_replicas} granted, {one.ready_replicas} ready"
        f" with {one.ready_workers} workers; each {capabilities(asked.capabilities)}"
        for one, asked in zip(status.capability_sets, spec.capability_sets, strict=True)
    ]
    return [line, *sets, *filter(None, (status.summary,))]


def decision_lines(decision: api.Decision) -> list[str]:
    """A decision: what it observed, what each step made of the count, and what limited it."""
    repeated = (
        f", {decision.count} times since {since(decision, 'create_time')} ago" if decision.count > 1 else ""
    )
    return [
        f"{decision.name}, {since(decision, 'last_time')} ago{repeated}, at {_taken(decision)}",
        f"  {decision.before} -> {decision.wanted} wanted, {decision.granted} granted"
        + (f", limited by {word(decision, 'limited_by')}" if decision.limited_by else "")
        + (f": {decision.summary}" if decision.summary else ""),
        *step_lines(decision),
    ]


def _taken(decision: api.Decision) -> str:
    first, last = (local_text(to_datetime(one)) for one in (decision.create_time, decision.last_time))
    return first if first == last else f"{first} to {last}"


def step_lines(decision: api.Decision) -> list[str]:
    """What a decision observed, and what each of its steps made of the count."""
    lines: list[str] = []
    for seen in decision.observations:
        age = duration(seen, "age")
        words = f"{seen.signal} = {number(seen, 'value')} {word(seen, 'status')}"
        words += (f", {age} old" if age != "-" else "") + (f" ({seen.detail})" if seen.detail else "")
        lines.append(f"    saw   {words}")
        lines += [
            f"            {one.tasks} that need {capabilities(one.capabilities)}"
            for one in seen.tasks.demands
        ]
        others = seen.tasks.unmanaged_workers
        lines += [f"            {workers(one)} started by someone else" for one in others]
    for step in decision.steps:
        stage = f"{word(step, 'stage').lower()} {step.capability_set or step.rule}".rstrip()
        lines.append(
            f"    {stage:<16} {step.before} -> {step.after}   {word(step, 'code'):<16} {step.text}".rstrip()
        )
    return lines


def evaluation_lines(found: api.EvaluateResponse) -> list[str]:
    """An evaluation: the count with its reasons, what it would be otherwise, and when it may change."""
    decision = found.decision
    limited = f", limited by {word(decision, 'limited_by')}" if decision.limited_by else ""
    lines = [
        f"{decision.before} -> {decision.wanted} wanted{limited}: {decision.summary}",
        *step_lines(decision),
    ]
    lines += [f"  would be {one.wanted} if {one.text}" for one in found.alternatives]
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        lines.append(f"  may go to {found.next_change.wanted} in {wait} if signals do not change")
    elif not found.alternatives:
        lines.append(f"  stays at {decision.wanted} while signals do not change")
    return lines


def outlook_lines(endpoint: api.Endpoint, found: api.EvaluateResponse) -> list[str]:
    """What would change the count of an endpoint, and when it may change next."""
    seen = found.decision.observations
    absent = [one.signal for one in seen if one.status != api.Observation.STATUS_OK]
    known = [one.signal for one in seen if one.status == api.Observation.STATUS_OK]
    lines = ["what would change it:"]
    lines += [f"  it would be {one.wanted} if {one.text}" for one in found.alternatives]
    if absent:
        lines.append(f"  {', '.join(absent)}: rules that need it hold until it is available again")
    if known and not endpoint.spec.paused:
        lines.append(f"  other values of {', '.join(known)}, as its rules say")
    if len(lines) == 1:
        lines.append("  you: gpuscalectl scale endpoint, or another spec")
    if found.HasField("next_change"):
        wait = format_duration(seconds(found.next_change.wait))
        when = f"to {found.next_change.wanted} in {wait} if signals do not change"
    else:
        tick = seconds(endpoint.spec.tick) or DEFAULT_TICK
        when = f"when signals do: they are read every {format_duration(tick)}"
    return [*lines, f"when it may change next: {when}"]

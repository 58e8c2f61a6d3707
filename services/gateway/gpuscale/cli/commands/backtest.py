"""`gpuscalectl backtest`, `tune`, `stop backtest` and `delete backtest`: run policies on a recorded workload, and find the cheapest for a goal."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale import client as library
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli import manifests
from gpuscale.cli.commands.apply import read
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import FILE, Session, command, names, names_of, one_name
from gpuscale.cli.console.output import dump_yaml, to_dict
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import (
    COUNT,
    DURATION,
    POSITIVE,
    YES,
    Parsed,
    option,
    repeated,
    shared,
    takes,
)
from gpuscale.cli.views import autoscaler as views
from gpuscale.client.tuning import (
    AS_IT_IS,
    POLICY_FIELDS,
    Trial,
    TuningGoal,
    Window,
    candidates,
    choose,
    parse_goal,
)
from gpuscale.common import errors, wire
from gpuscale.common.names import BACKTEST, ENDPOINT, WATCHER
from gpuscale.common.sizes import to_seconds

if TYPE_CHECKING:
    from gpuscale.client import Client

CALL_SECONDS = 125.0
"""Time limit of a call that runs policies itself; the service's own limit is shorter."""
SENDING_SECONDS = 300.0
"""Time limit of the call that sends a workload."""
PART = 100_000
"""Most requests per message."""


def _span(text: str) -> tuple[float, float]:
    """The bounds in seconds of a duration, or of a range such as `10s..60s`."""
    first, dots, second = text.partition("..")
    least, most = to_seconds(first), to_seconds(second if dots else first)
    if most < least:
        raise ValueError(f"{text!r}: the second duration is shorter than the first")
    return least, most


def read_goal(text: str) -> float | TuningGoal:
    """A duration, or a goal to choose a policy by."""
    return parse_goal(text) if "late" in text else to_seconds(text)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload and the replicas, as typed."""

    trace: str = shared(
        default="",
        type=click.Path(allow_dash=True),
        help="CSV of arrival_seconds,service_seconds, or of t_s,context_tokens,generated_tokens; - for standard input.",
    )
    history: str = shared(
        default="",
        metavar="ENDPOINT",
        help="Instead of a trace: the requests to this endpoint in the last day.",
        shell_complete=names_of("endpoints"),
    )
    service_time: float | None = shared(
        type=DURATION, help="With --history: duration of a request; learned by default."
    )
    goals: "tuple[float | TuningGoal, ...]" = shared(
        "--goal",
        "--slo",
        many=True,
        type=Parsed("duration|late<=percent", read_goal),
        help="How long a request may wait (30s); for tune also late<=1%, how many may wait longer, or late:30s,"
        " the GPU time that each late request is worth.",
    )
    slots: int = shared(type=POSITIVE, default=1, help="Concurrent requests per replica.")
    cold_start: tuple[float, float] = shared(
        type=Parsed("duration[..duration]", _span),
        default="30s",
        help="Time from the decision until the replica is ready.",
    )
    max_gpus: int | None = shared(
        type=POSITIVE, metavar="N", help="Number of GPUs; enough for 16 replicas by default."
    )
    kills: bool = shared(is_flag=True, help="A stopping replica drops its requests.")
    seed: int = shared(type=int, default=0, metavar="N", help="The same seed gives the same cold starts.")

    @property
    def wait(self) -> float:
        """Seconds that a request may wait."""
        return next((one for one in reversed(self.goals) if isinstance(one, float)), 30.0)

    @property
    def chosen_by(self) -> TuningGoal | None:
        """The goal to choose a policy by, if given."""
        return next((one for one in reversed(self.goals) if isinstance(one, TuningGoal)), None)

    def asked(self) -> "tuple[api.BacktestSpec, api.Workload]":
        """The backtest to run, without policies, and its workload. Raises InvalidArgumentError: the trace cannot be read."""
        if bool(self.trace) == bool(self.history):
            raise errors.InvalidArgumentError("pass either --trace or --history")
        trace = _read_trace(self.trace) if self.trace else api.Workload()
        least, most = map(wire.to_duration, self.cold_start)
        spec = api.BacktestSpec(
            endpoint=full_name(ENDPOINT, self.history) if self.history else "",
            service_time=None if self.service_time is None else wire.to_duration(self.service_time),
            goal=wire.to_duration(self.wait),
            slots=self.slots,
            min_cold_start=least,
            max_cold_start=most,
            seed=self.seed,
            max_gpus=self.max_gpus,
            kills=self.kills,
        )
        return spec, trace


def _read_trace(name: str) -> "api.Workload":
    from gpuscale.client.traces import ServiceModel, read_trace

    text, _ = next(read(name))
    requests = read_trace(text.splitlines(keepends=True), ServiceModel())
    return api.Workload(
        arrivals=[one.arrival for one in requests], service_seconds=[one.service for one in requests]
    )


def _run(
    session: Session,
    client: "Client",
    spec: "api.BacktestSpec",
    workloads: "Mapping[str, api.Workload]",
    detach: bool,
) -> "api.BacktestResponse | None":
    """The results of a backtest; None with --detach, which writes its name."""
    from gpuscale.client.retries import retrying

    messages = [api.CreateBacktestRequest(spec=spec, request_id=str(uuid.uuid4()))]
    for policy, one in workloads.items():  # in parts; the common one by an empty name
        for begin in range(0, len(one.arrivals), PART):
            arrivals, lengths = one.arrivals[begin : begin + PART], one.service_seconds[begin : begin + PART]
            part = api.Workload(arrivals=arrivals, service_seconds=lengths)
            messages.append(api.CreateBacktestRequest(policy=policy, workload=part))
    try:
        begun = retrying(
            lambda: client.backtests.CreateBacktest(iter(messages), timeout=SENDING_SECONDS)
        ).backtest
    # Older than 1.0, or a viewer, who may not store backtests.
    except (errors.UnimplementedError, errors.PermissionDeniedError):
        if detach:
            raise
        return _run_within_a_call(client, spec, workloads)
    if detach:
        session.output.write_one(begun, views.BACKTESTS)
        note(f"see it with: gpuscalectl get backtest {begun.name}")
        return None
    return finished(client, begun.name, cancels=True)


def _run_within_a_call(
    client: "Client", spec: "api.BacktestSpec", workloads: "Mapping[str, api.Workload]"
) -> "api.BacktestResponse":
    """The results from a service that stores none, a few policies at a time."""
    found = api.BacktestResponse()
    size = len(spec.policies) if spec.shared_gpus else 8
    for begin in range(0, len(spec.policies), size):
        request = api.BacktestRequest.FromString(spec.SerializeToString())  # it has the same fields
        request.arrivals.extend(workloads[""].arrivals)
        request.service_seconds.extend(workloads[""].service_seconds)
        del request.policies[begin + size :], request.policies[:begin]
        for one in request.policies:
            if one.name in workloads:
                one.workload.CopyFrom(workloads[one.name])
        part = client.backtests.Backtest(request, timeout=CALL_SECONDS)  # pyright: ignore[reportDeprecated]
        found.reports.extend(part.reports)
        found.work_gpu_hours = part.work_gpu_hours
    return found


def finished(client: "Client", name: str, *, cancels: bool = False) -> "api.BacktestResponse":
    """Wait for a backtest and return its results; `cancels` says whether to stop it if the wait is interrupted.

    Raises FailedPreconditionError: it was cut short.
    """
    last = api.Backtest()
    try:
        request = api.WatchBacktestsRequest(filter=f'name = "{name}"')
        for update in library.watch(client.backtests.WatchBacktests, request, resume=True):
            if name in update.removed or (update.full and not last.name and not update.backtests):
                raise errors.NotFoundError(f"{name} was deleted")
            for last in update.backtests:
                total = len(last.spec.policies)
                if 0 < last.done_count < total and not last.done_count % 8:
                    note(f"{last.done_count} of {total} policies done")
            if last.HasField("end_time"):
                break
    finally:
        if cancels and not last.HasField("end_time"):
            client.backtests.CancelBacktest(api.CancelBacktestRequest(name=name))
    if last.state != api.Backtest.STATE_SUCCEEDED:
        raise errors.FailedPreconditionError(
            f"{name} was cut short: {last.message or 'cancelled'}", reason="BACKTEST_CUT"
        )
    return figures(client, last)


def figures(client: "Client", of: "api.Backtest") -> "api.BacktestResponse":
    """The results so far."""
    reports = client.backtests.ReadBacktestReports(api.ReadBacktestReportsRequest(name=of.name))
    return api.BacktestResponse(reports=[one.report for one in reports], work_gpu_hours=of.work_gpu_hours)


DETACH = option(
    "--detach", "-d", is_flag=True, help="Print its name and return; it keeps running on the server."
)


@command("backtest --preset all --trace requests.csv --slo 5s")
@takes("workload", Workload)
@repeated("--file", "-f", type=click.Path(allow_dash=True), help="Policies, or endpoints as for apply.")
@repeated("--preset", metavar="NAME", help="A preset, or `all`.", shell_complete=names_of("presets"))
@option(
    "--share-gpus", is_flag=True, help="Run all policies at once on --max-gpus; first come, first served."
)
@repeated("--trace-of", metavar="POLICY=FILE", help="A trace for one policy only.")
@DETACH
def backtest(
    session: Session,
    workload: Workload,
    file: tuple[str, ...],
    preset: tuple[str, ...],
    share_gpus: bool,
    trace_of: tuple[str, ...],
    detach: bool,
) -> None:
    """Run policies on a recorded workload; show late requests, GPU hours and flaps, and the GPU hours of the work itself."""
    if not file and not preset:
        raise errors.InvalidArgumentError("no policy: pass --file or --preset")
    if workload.chosen_by:
        raise errors.InvalidArgumentError(f"--goal {workload.chosen_by} chooses a policy: use tune")
    policies = [
        one for name in file for text, source in read(name) for one in manifests.parse_policies(text, source)
    ]
    spec, trace = workload.asked()
    spec.shared_gpus, workloads = share_gpus, {"": trace}
    with session.connect() as client:
        presets = lookup.short_names(client, "presets") if "all" in preset else preset
        policies += [api.BacktestPolicy(name=one, preset=api.PresetWish(preset=one)) for one in presets]
        known = {policy.name for policy in policies}
        for text in trace_of:
            name, _, file_name = text.partition("=")
            if name not in known or not file_name:
                raise errors.InvalidArgumentError(
                    f"{text!r} does not name a policy and a trace; write it like POLICY=FILE"
                )
            workloads[name] = _read_trace(file_name)
        spec.policies.extend(policies)
        found = _run(session, client, spec, workloads, detach)
    if found is None:
        return
    output = session.output
    if output.human:
        write_lines(views.report_lines(output, found))
    elif output.format is Format.NAME:
        write_lines([one.name for one in found.reports])
    else:
        output.write_data(to_dict(found))


@command('tune jobs --slo 5s --goal "late<=1%" --write policy.yaml')
@one_name("endpoints", metavar="ENDPOINT", required=False)
@takes("workload", Workload)
@option("--watcher", default="jobs", metavar="NAME", help="Queue watcher of the policy's signals.")
@option("--template", default="worker", metavar="NAME", help="Command template of a replica.")
@option("--gpus", type=COUNT, default=1, metavar="N", help="GPUs of each replica.")
@option("--min", "min_replicas", type=COUNT, default=1, metavar="N", help="Fewest replicas.")
@option(
    "--max",
    "max_replicas",
    type=POSITIVE,
    metavar="N",
    help="Most replicas; as many as fit on the GPUs by default.",
)
@option("--name", "called", default="", metavar="NAME", help="Name of the endpoint that is written.")
@option("--write", type=FILE, help="Write the policy to this file, for apply -f.")
@option(
    "--of",
    default="",
    metavar="BACKTEST",
    help="Choose from this backtest, such as one started by tune -d, instead of running one.",
    shell_complete=names_of("backtests"),
)
@DETACH
def tune(
    session: Session,
    name: str,
    workload: Workload,
    watcher: str,
    template: str,
    gpus: int,
    min_replicas: int,
    max_replicas: int | None,
    called: str,
    write: Path | None,
    of: str,
    detach: bool,
) -> None:
    """Search policies and their parameters for the cheapest that meets a goal.

    With an ENDPOINT, it uses the requests of the last day and compares with the present policy; watcher, template and bounds stay.
    """
    from google.protobuf.field_mask_pb2 import FieldMask

    from gpuscale.cli.commands.preset import manifest

    goal = workload.chosen_by or TuningGoal()
    wish = api.PresetWish(
        watcher=full_name(WATCHER, watcher),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        template=api.ReplicaTemplate(template=template, gpu_count=gpus),
    )
    with session.connect() as client:
        now = _endpoint(client, name, wish) if name else None
        if of:
            found: api.BacktestResponse | None = finished(client, full_name(BACKTEST, of))
        else:
            own = replace(workload, history=workload.history or ("" if workload.trace else name))
            spec, trace = own.asked()
            if now is not None:
                spec.policies.add(name=AS_IT_IS, spec=now.spec)
            for one, preset, parameters in candidates(workload.wait, workload.slots):
                spec.policies.add(name=one, preset=wish)
                spec.policies[-1].preset.preset = preset
                spec.policies[-1].preset.parameters.update(parameters)
            found = _run(session, client, spec, {"": trace}, detach)
    if found is None:
        return
    reports = {one.name: one for one in found.reports}
    trials = {name: _trial(one) for name, one in reports.items()}
    choice = choose(list(trials.values()), goal)
    chosen = reports[choice.chosen.name]
    policy = chosen.spec
    if now is not None:
        policy = now.spec
        FieldMask(paths=POLICY_FIELDS).MergeMessage(chosen.spec, policy, True, True)
    made = manifest(called or name or watcher, policy)
    if write is not None:
        try:
            with write.open("w", encoding="utf-8") as file:
                dump_yaml(made, file)
        except OSError as error:
            raise errors.InvalidArgumentError(f"{write}: {error.strerror}") from error
        note(f"{write} written; apply it with: gpuscalectl apply -f {write}")
    output = session.output
    if output.human:
        shown = {AS_IT_IS, *(one.name for one in choice.front)}
        rows = sorted((one for one in found.reports if one.name in shown), key=lambda one: one.gpu_hours)
        table = output.table(rows, views.tuning(trials, choice.chosen.name, found.work_gpu_hours))
        write_lines([*table, views.work_line(found), choice.why(goal)])
    elif output.format is Format.NAME:
        write_lines([chosen.name])
    else:
        pareto = [to_dict(reports[one.name]) for one in choice.front]
        judged = {"violationPercent": choice.judged.late, "gpuHours": choice.judged.hours}
        output.write_data(
            {"goal": str(goal), "met": choice.met, "pareto": pareto, "judged": judged}
            | {"chosen": chosen.name, "why": choice.why(goal), "policy": made}
        )


def _endpoint(client: "Client", name: str, wish: "api.PresetWish") -> "api.Endpoint":
    """The endpoint to tune; copies its watcher, bounds and template to the wish. Raises InvalidArgumentError: it reads no queue."""
    request = api.GetEndpointRequest(name=full_name(ENDPOINT, name))
    found = client.endpoints.GetEndpoint(request).endpoint
    watchers = [one.queue.watcher for one in found.spec.signals if one.HasField("queue")]
    if not watchers:
        raise errors.InvalidArgumentError(f"{found.name} reads no queue, so there is no work to tune it for")
    wish.watcher = watchers[0]
    wish.min_replicas, wish.max_replicas = found.spec.min_replicas, found.spec.max_replicas
    wish.template.CopyFrom(found.spec.template)
    return found


def _trial(report: "api.BacktestReport") -> Trial:
    """The results to choose by; servers older than 1.0 report a single window."""
    windows = [Window(one.request_count, one.late_count, one.gpu_hours) for one in report.windows]
    late = round(report.violation_percent * report.request_count / 100)
    return Trial(report.name, windows or [Window(report.request_count, late, report.gpu_hours)])


@command("stop backtest b-1")
@one_name("backtests")
def stop_backtest(session: Session, name: str) -> None:
    """Stop a backtest, which keeps its results so far; does nothing if it has ended."""
    with session.connect() as client:
        request = api.CancelBacktestRequest(name=full_name(BACKTEST, name))
        found = client.backtests.CancelBacktest(request).backtest
    session.output.write_one(found, views.BACKTESTS)


@command("delete backtest b-1")
@names("backtests")
@YES
def delete_backtest(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete backtests; a running one stops."""
    delete_each(session, "backtests", BACKTEST, name, api.DeleteBacktestRequest, yes=yes)


def looked(client: "Client", endpoint: "api.Endpoint") -> list[str]:
    """The result of an adaptive endpoint's last run to choose its policy."""
    asked = api.ListBacktestsRequest(filter=f'creator = "{endpoint.name}" AND state = SUCCEEDED', page_size=1)
    found = client.backtests.ListBacktests(asked).backtests
    if not found:
        return ["", "adaptive: no run yet: it needs a history, with rates, of 1,000 requests"]
    goal = parse_goal(endpoint.spec.adaptive.goal or str(TuningGoal()))
    trials = [_trial(one) for one in figures(client, found[0]).reports]
    choice = choose(trials, goal)
    now = next((one for one in trials if one.name == AS_IT_IS), choice.chosen)
    if choice.chosen.beats(now, goal):
        verdict = "would save enough: changes if the next run agrees"
    else:
        verdict = "saves too little for a change"
    had = f"{now.late:.2f}% late, {now.hours:.2f} GPU hours at present"
    return ["", f"adaptive, by {found[0].name}: {choice.why(goal)}", f"  {had}; it {verdict}"]

"""`gpuscalectl backtest` and `tune`, `stop` and `delete backtest`: policies on a recorded workload, and the cheapest one that meets a goal."""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuscale import client as library
from gpuscale.api.autoscaler import v1 as api
from gpuscale.cli.commands.apply import read
from gpuscale.cli.console import lookup
from gpuscale.cli.console.bulk import delete_each
from gpuscale.cli.console.command import FILE, command, names, names_of, one_name
from gpuscale.cli.console.output import dump_yaml, to_dict
from gpuscale.cli.console.session import Session
from gpuscale.cli.console.terminal import note, write_lines
from gpuscale.cli.grammar.jsonpath import Format
from gpuscale.cli.grammar.nouns import full_name
from gpuscale.cli.grammar.parameters import (
    COUNT,
    DURATION,
    PERCENT,
    POSITIVE,
    YES,
    Parsed,
    option,
    repeated,
    shared,
    takes,
)
from gpuscale.cli.manifests import documents
from gpuscale.cli.views import backtests as views
from gpuscale.common import wire
from gpuscale.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnimplementedError,
)
from gpuscale.common.names import BACKTEST, ENDPOINT, WATCHER
from gpuscale.common.sizes import to_seconds

if TYPE_CHECKING:
    from gpuscale.client import Client

CALL_SECONDS = 125.0
"""Time limit of a call that runs policies itself; the service gives up before."""
SENDING_SECONDS = 300.0
"""Time limit of the call that sends a workload."""
PART = 100_000
"""Requests of one message."""
BARS = "-"
"""Instead of a file: the picture as bars below the table."""
AS_SHIPPED = (
    "gpuscale",
    "hpa",
    "keda",
    "knative",
    "ray_serve",
    "backend_ai",
    "opengris_vanilla",
    "opengris_capability",
)
"""Presets that `tune` runs unchanged."""


@dataclass(frozen=True)
class PeriodSpan:
    """The bounds of a time that varies, in seconds."""

    least: float
    most: float


def _span(text: str) -> PeriodSpan:
    """A duration, or two of them as `10s..60s`."""
    least, dots, most = text.partition("..")
    found = PeriodSpan(to_seconds(least), to_seconds(most if dots else least))
    if found.most < found.least:
        raise ValueError(f"{text!r}: the second duration is shorter than the first")
    return found


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What there is to do and what replicas are like, as typed."""

    trace: str = shared(
        default="",
        type=click.Path(allow_dash=True),
        help="CSV of arrival_seconds,service_seconds, or of t_s,context_tokens,generated_tokens; - for standard input.",
    )
    history: str = shared(
        default="",
        metavar="ENDPOINT",
        help="Instead of a trace: what arrived at this endpoint in the last day.",
        shell_complete=names_of("endpoints"),
    )
    service_time: float | None = shared(
        type=DURATION, help="With --history: duration of a request; learned by default."
    )
    goal: float = shared("--goal", "--slo", type=DURATION, default="30s", help="How long a request may wait.")
    slots: int = shared(type=POSITIVE, default=1, help="Requests that a replica serves at a time.")
    cold_start: PeriodSpan = shared(
        type=Parsed("duration[..duration]", _span),
        default="30s",
        help="Time from the decision to a working replica.",
    )
    max_gpus: int | None = shared(
        type=POSITIVE, metavar="N", help="GPUs that there are; enough for 16 replicas by default."
    )
    kills: bool = shared(is_flag=True, help="A replica that stops drops its requests.")
    seed: int = shared(type=int, default=0, metavar="N", help="The same seed gives the same cold starts.")

    def asked(self) -> "tuple[api.BacktestSpec, api.Workload]":
        """What to run, without policies, and its workload.

        Raises:
            InvalidArgumentError: the trace cannot be read.
        """
        if bool(self.trace) == bool(self.history):
            raise InvalidArgumentError("pass either --trace or --history")
        trace = _read_trace(self.trace) if self.trace else api.Workload()
        spec = api.BacktestSpec(
            endpoint=full_name(ENDPOINT, self.history) if self.history else "",
            service_time=None if self.service_time is None else wire.to_duration(self.service_time),
            goal=wire.to_duration(self.goal),
            slots=self.slots,
            min_cold_start=wire.to_duration(self.cold_start.least),
            max_cold_start=wire.to_duration(self.cold_start.most),
            seed=self.seed,
            max_gpus=self.max_gpus,
            kills=self.kills,
        )
        return spec, trace


def _read_trace(name: str) -> "api.Workload":
    """The workload in a file."""
    from gpuscale.client.traces import ServiceModel, read_trace

    text, _ = next(read(name))
    requests = read_trace(text.splitlines(keepends=True), ServiceModel())
    return api.Workload(
        arrivals=[one.arrival for one in requests], service_seconds=[one.service for one in requests]
    )


def _messages(
    spec: "api.BacktestSpec", workloads: "Mapping[str, api.Workload]"
) -> "Iterator[api.CreateBacktestRequest]":
    """A request in parts; workloads by policy, that of the run under an empty name."""
    yield api.CreateBacktestRequest(spec=spec, request_id=str(uuid.uuid4()))
    for policy, one in workloads.items():
        for begin in range(0, len(one.arrivals), PART):
            end = begin + PART
            part = api.Workload(
                arrivals=one.arrivals[begin:end], service_seconds=one.service_seconds[begin:end]
            )
            yield api.CreateBacktestRequest(policy=policy, workload=part)


def _run(
    session: Session,
    client: "Client",
    spec: "api.BacktestSpec",
    workloads: "Mapping[str, api.Workload]",
    detach: bool,
) -> "api.BacktestResponse | None":
    """The figures of a backtest; None where it is only begun, which is written then."""
    from gpuscale.client.retries import retrying

    messages = list(_messages(spec, workloads))
    try:
        begun = retrying(
            lambda: client.backtests.CreateBacktest(iter(messages), timeout=SENDING_SECONDS)
        ).backtest
    except (UnimplementedError, PermissionDeniedError):  # of before 1.0, or a viewer, who may store nothing
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
    """The figures from a service that stores nothing, a few policies at a time."""
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
    """The figures of a backtest, once it has ended.

    Args:
        client: where it runs.
        name: its resource name.
        cancels: whether it is ended where nobody waits for it any more.

    Raises:
        FailedPreconditionError: it was cut.
    """
    last = api.Backtest()
    try:
        request = api.WatchBacktestsRequest(filter=f'name = "{name}"')
        for update in library.watch(client.backtests.WatchBacktests, request, resume=True):
            if name in update.removed or (update.full and not last.name and not update.backtests):
                raise NotFoundError(f"{name} was deleted")
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
        raise FailedPreconditionError(f"{name} was cut: {last.message or 'cancelled'}", reason="BACKTEST_CUT")
    return figures(client, last)


def figures(client: "Client", of: "api.Backtest") -> "api.BacktestResponse":
    """The figures that a backtest has."""
    reports = client.backtests.ReadBacktestReports(api.ReadBacktestReportsRequest(name=of.name))
    return api.BacktestResponse(reports=[one.report for one in reports], work_gpu_hours=of.work_gpu_hours)


DETACH = option(
    "--detach", "-d", is_flag=True, help="Do not wait: print its name, and leave it to the server."
)


@command("backtest --preset all --trace requests.csv --slo 5s")
@takes("workload", Workload)
@repeated("--file", "-f", type=click.Path(allow_dash=True), help="Policies, or endpoints as for apply.")
@repeated("--preset", metavar="NAME", help="A preset, or `all` of them.", shell_complete=names_of("presets"))
@option(
    "--share-gpus",
    is_flag=True,
    help="Run all policies side by side on --max-gpus; first come, first served.",
)
@repeated("--trace-of", metavar="POLICY=FILE", help="A trace for one policy alone.")
@option(
    "--plot",
    default="",
    type=click.Path(allow_dash=True),
    help="Draw replicas and queue as SVG; - for bars below the table.",
)
@DETACH
def backtest(
    session: Session,
    workload: Workload,
    file: tuple[str, ...],
    preset: tuple[str, ...],
    share_gpus: bool,
    trace_of: tuple[str, ...],
    plot: str,
    detach: bool,
) -> None:
    """Run policies on a recorded workload: late requests, GPU hours and flaps, beside the work alone."""
    if not file and not preset:
        raise InvalidArgumentError("no policy: pass --file or --preset")
    policies = [
        one for name in file for text, source in read(name) for one in documents.parse_policies(text, source)
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
                raise InvalidArgumentError(
                    f"{text!r} does not name a policy and a trace; write it like POLICY=FILE"
                )
            workloads[name] = _read_trace(file_name)
        spec.policies.extend(policies)
        found = _run(session, client, spec, workloads, detach)
    if found is None:
        return
    if plot and plot != BARS:
        try:
            Path(plot).write_text(views.svg(found), encoding="utf-8")
        except OSError as error:
            raise InvalidArgumentError(f"{plot}: {error.strerror}") from error
        note(f"{plot} written")
    output = session.output
    if output.human:
        write_lines(
            [*views.report_lines(output, found), *(views.picture_lines(found) if plot == BARS else ())]
        )
    elif output.format is Format.NAME:
        write_lines([one.name for one in found.reports])
    else:
        output.write_data(to_dict(found))


@command("tune --slo 5s --trace requests.csv --write policy.yaml")
@takes("workload", Workload)
@option("--late", type=PERCENT, default=1.0, help="Percent of requests that may wait longer.")
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
@option("--name", default="", metavar="NAME", help="Name of the endpoint that is written.")
@option("--write", type=FILE, help="Write the policy to this file, for apply -f.")
@option(
    "--of",
    default="",
    metavar="BACKTEST",
    help="Choose from this one, such as one that tune -d began, instead of running one.",
    shell_complete=names_of("backtests"),
)
@DETACH
def tune(
    session: Session,
    workload: Workload,
    late: float,
    watcher: str,
    template: str,
    gpus: int,
    min_replicas: int,
    max_replicas: int | None,
    name: str,
    write: Path | None,
    of: str,
    detach: bool,
) -> None:
    """Search families of policies and their parameters for the cheapest one that meets the goal."""
    from gpuscale.cli.commands.preset import manifest

    wish = api.PresetWish(
        watcher=full_name(WATCHER, watcher),
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        template=api.ReplicaTemplate(template=template, gpu_count=gpus),
    )
    with session.connect() as client:
        if of:
            found: api.BacktestResponse | None = finished(client, full_name(BACKTEST, of))
        else:
            spec, trace = workload.asked()
            spec.policies.extend(candidates(wish, workload.goal, workload.slots))
            found = _run(session, client, spec, {"": trace}, detach)
    if found is None:
        return
    chosen = choose(found.reports, late)
    made = manifest(name or watcher, chosen.spec)
    best = api.BacktestResponse(reports=pareto(found.reports), work_gpu_hours=found.work_gpu_hours)
    if write is not None:
        try:
            with write.open("w", encoding="utf-8") as file:
                dump_yaml(made, file)
        except OSError as error:
            raise InvalidArgumentError(f"{write}: {error.strerror}") from error
        note(f"{write} written; apply it with: gpuscalectl apply -f {write}")
    output = session.output
    if output.human:
        short = f"none has at most {late:g}% late; the fewest: " if chosen.violation_percent > late else ""
        write_lines([*views.report_lines(output, best), f"{short}{chosen.name}"])
    elif output.format is Format.NAME:
        write_lines([chosen.name])
    else:
        reports = [to_dict(one) for one in best.reports]
        output.write_data({"pareto": reports, "chosen": chosen.name, "policy": made})


@command("stop backtest b-1")
@one_name("backtests")
def stop_backtest(session: Session, name: str) -> None:
    """Stop a backtest, which keeps the figures it has; an ended one stays as it is."""
    with session.connect() as client:
        request = api.CancelBacktestRequest(name=full_name(BACKTEST, name))
        found = client.backtests.CancelBacktest(request).backtest
    session.output.write_one(found, views.BACKTESTS)


@command("delete backtest b-1")
@names("backtests")
@YES
def delete_backtest(session: Session, name: tuple[str, ...], yes: bool) -> None:
    """Delete backtests; a running one stops."""
    wanted = [full_name(BACKTEST, one) for one in name]
    delete_each(session, "backtests", wanted, api.DeleteBacktestRequest, yes=yes)


def grid(goal: float, slots: int) -> Mapping[str, Mapping[str, Sequence[float]]]:
    """The values that are tried of each parameter, by preset."""
    return {
        "gpuscale": {
            "deadline": [goal / 4, goal / 2, goal],
            "utilization": [0.65, 0.8, 0.9],
            "stabilization": [60.0, 200.0, 400.0],
        },
        "hpa": {
            "target_average_value": [slots * share for share in (0.5, 0.65, 0.8, 1.0)],
            "stabilization_window_seconds": [60.0, 300.0],
        },
        "knative": {
            "target_utilization_percentage": [50.0, 70.0, 85.0],
            "scale_down_delay": [0.0, 120.0, 300.0],
        },
        "ray_serve": {
            "target_ongoing_requests": [slots * share for share in (0.5, 0.75, 1.0)],
            "upscale_delay_s": [0.0, 30.0],
            "downscale_delay_s": [120.0, 600.0],
        },
        "keda": {
            "value": [slots * share for share in (0.5, 0.65, 0.8, 1.0)],
            "cooldown_period": [60.0, 300.0],
        },
        "backend_ai": {
            "scale_up_threshold": [1.0, float(slots)],
            "step_size": [1.0, 4.0],
            "cooldown_seconds": [15.0, 60.0],
        },
        "opengris_vanilla": {
            "upper_task_ratio": [slots * share for share in (0.65, 0.8, 1.0)],
            "lower_task_ratio": [slots * share for share in (0.3, 0.5)],
        },
    }


def candidates(wish: "api.PresetWish", goal: float, slots: int) -> "Iterator[api.BacktestPolicy]":
    """The presets as shipped, then each family with every combination of its values; `wish` is what they share."""
    for name in AS_SHIPPED:
        yield _policy(name, wish, name, {})
    for family, values in grid(goal, slots).items():
        for choice in product(*values.values()):
            stated = dict(zip(values, choice, strict=True))
            words = ",".join(f"{name}={value:g}" for name, value in stated.items())
            yield _policy(f"{family}({words})", wish, family, stated)


def _policy(
    name: str, wish: "api.PresetWish", preset: str, stated: Mapping[str, float]
) -> "api.BacktestPolicy":
    policy = api.BacktestPolicy(name=name, preset=wish)
    policy.preset.preset = preset
    for parameter, value in stated.items():
        policy.preset.parameters[parameter] = value
    return policy


def pareto(reports: "Sequence[api.BacktestReport]") -> "list[api.BacktestReport]":
    """The reports that no other beats in both late requests and GPU hours, cheapest first."""
    best: list[api.BacktestReport] = []
    for one in sorted(
        reports, key=lambda one: (one.gpu_hours, one.violation_percent, one.flap_count, one.name)
    ):
        if not best or one.violation_percent < best[-1].violation_percent:
            best.append(one)
    return best


def choose(reports: "Sequence[api.BacktestReport]", late_percent: float) -> "api.BacktestReport":
    """The cheapest with at most so many late requests; if there is none, the one with the fewest.

    Raises:
        ValueError: there are no reports.
    """
    front = pareto(reports)
    if not front:
        raise ValueError("there is nothing to choose from")
    return next((one for one in front if one.violation_percent <= late_percent), front[-1])

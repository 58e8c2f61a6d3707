"""Backtest jobs from the wire, and their figures for the wire."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, pairwise

from gpuscale.api.autoscaler import v1 as api
from gpuscale.autoscaler.backtest import simulate
from gpuscale.autoscaler.backtest.world import Setting
from gpuscale.autoscaler.domain.presets import Wish
from gpuscale.autoscaler.domain.spec import EndpointSpec, ReplicaTemplate
from gpuscale.autoscaler.servicers.preset_servicer import DEFAULT_BOUNDS, render
from gpuscale.autoscaler.wire.specs import spec_from_wire, spec_to_wire, spec_violations
from gpuscale.client.traces import Request
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.wire import optional_seconds, to_datetime


@dataclass(frozen=True, slots=True)
class BacktestJob:
    """Policies to run, each with its workload and setting: one after another, or together on shared GPUs."""

    parts: Sequence[simulate.Part]
    goal: float
    begin: datetime
    shared: bool = False


def run_job(job: BacktestJob, stopped: Callable[[], bool]) -> list[simulate.Report] | None:
    """The reports; None if it was stopped."""
    try:
        if job.shared:
            most = job.parts[0].setting.max_gpus
            return simulate.run_shared(job.parts, goal=job.goal, begin=job.begin, most=most, stopped=stopped)
        return [
            simulate.run(one.spec, one.requests, one.setting, goal=job.goal, begin=job.begin, stopped=stopped)
            for one in job.parts
        ]
    except simulate.StoppedError:
        return None


DEFAULT_GOAL = 30.0
DEFAULT_COLD_START = 30.0
_MONDAY = datetime(2024, 1, 1, tzinfo=UTC)
_TEMPLATE = ReplicaTemplate("worker", gpu_count=1)
_WATCHER = "queue"


def job_from_wire(wire: api.BacktestRequest | api.BacktestSpec, common: Sequence[Request]) -> BacktestJob:
    """The run of a request; `common`: the workload of policies without their own.

    InvalidArgumentError without policies or arrivals, for unordered arrivals, or a policy that contradicts itself.
    """
    workloads = [
        requests_from_wire(one.workload, f"policies[{index}].workload.")
        if one.HasField("workload")
        else common
        for index, one in enumerate(wire.policies)
    ]
    if not all(workloads or [common]):
        raise InvalidArgumentError("arrivals must be set", field="arrivals")
    requests = common or list(chain.from_iterable(workloads))
    stated, longest = optional_seconds(wire, "min_cold_start"), optional_seconds(wire, "max_cold_start")
    least = DEFAULT_COLD_START if stated is None else stated
    most = least if longest is None else longest
    if most < least:
        raise InvalidArgumentError("max_cold_start must be at least min_cold_start", field="max_cold_start")
    even, seed = math.isclose(least, most), wire.seed

    def cold_start(number: int) -> float:  # uniform between the bounds, and repeatable by seed
        if even:
            return least
        return random.Random(seed * 1_000_003 + number).uniform(least, most)  # noqa: S311

    slots = wire.slots if wire.HasField("slots") else 1
    gpus = wire.max_gpus if wire.HasField("max_gpus") else None
    setting, goal = Setting(slots, cold_start, gpus, kills=wire.kills), optional_seconds(wire, "goal")
    low, high = DEFAULT_BOUNDS
    default = Wish(
        _WATCHER,
        low,
        high if gpus is None else gpus,
        _TEMPLATE,
        slots=slots,
        goal=DEFAULT_GOAL if goal is None else goal,
        service_time=statistics.fmean(one.service for one in requests) or None,
    )
    specs = _specs(wire.policies, default)
    last = max(one[-1].arrival for one in workloads)
    for index, spec in enumerate(specs):
        if (last + simulate.LONGEST_TAIL) / spec.period > simulate.MOST_EVALUATIONS:
            field = f"policies[{index}]"
            text = f"would be evaluated more than {simulate.MOST_EVALUATIONS} times: a longer tick, or a shorter trace"
            raise InvalidArgumentError(f"{field} {text}", field=field)
    parts = [
        simulate.Part(spec, one, replace(setting, gpus_each=max(1, spec.template.gpu_count)))
        for spec, one in zip(specs, workloads, strict=True)
    ]
    begin = to_datetime(wire.begin_time) if wire.HasField("begin_time") else _MONDAY
    return BacktestJob(parts, default.goal, begin, shared=wire.shared_gpus)


def least_gpu_hours(job: BacktestJob) -> float:
    """GPU hours of the work alone; the same for all policies that run one after another."""
    worked = job.parts if job.shared else job.parts[:1]
    return sum(
        simulate.oracle_gpu_hours(one.requests, one.setting.slots, one.setting.gpus_each) for one in worked
    )


def report_to_wire(name: str, spec: EndpointSpec, report: simulate.Report) -> api.BacktestReport:
    """The message of a report."""
    return api.BacktestReport(name=name, spec=spec_to_wire(spec), **asdict(report))


def requests_from_wire(wire: api.BacktestRequest | api.Workload, path: str = "") -> list[Request]:
    """The requests of a workload; `path` is its path with a dot at the end."""
    if len(wire.service_seconds) != len(wire.arrivals):
        field = f"{path}service_seconds"
        raise InvalidArgumentError(f"{field} must have as many items as arrivals", field=field)
    if any(later < earlier for earlier, later in pairwise(wire.arrivals)):
        raise InvalidArgumentError(f"{path}arrivals must be in order", field=f"{path}arrivals")
    return [Request(*pair) for pair in zip(wire.arrivals, wire.service_seconds, strict=True)]


def _specs(policies: Sequence[api.BacktestPolicy], default: Wish) -> list[EndpointSpec]:
    if not policies:
        raise InvalidArgumentError("policies must be set", field="policies")
    names: set[str] = set()
    for index, one in enumerate(policies):
        if one.name in names:
            field = f"policies[{index}].name"
            raise InvalidArgumentError(f"{field} must differ from the names before it", field=field)
        names.add(one.name)
    specs: list[EndpointSpec] = []
    for index, one in enumerate(policies):
        path, kind = f"policies[{index}]", one.WhichOneof("policy")
        if kind is None:
            raise InvalidArgumentError(f"{path}.spec must be set, or preset", field=f"{path}.spec")
        if kind == "preset":
            _, spec = render(one.preset, f"{path}.preset", default)
        else:
            spec = spec_from_wire(one.spec, f"{path}.spec")
            if not spec.template.template:
                spec = replace(spec, template=replace(spec.template, template=_TEMPLATE.template))
            if found := spec_violations(spec, f"{path}.spec"):
                raise InvalidArgumentError.of(found)
        if spec.capability_sets:
            field = f"{path}.{kind}.capability_sets"
            text = "cannot be backtested: no workload says what its requests need"
            raise InvalidArgumentError(f"{field} {text}", field=field)
        specs.append(spec)
    return specs

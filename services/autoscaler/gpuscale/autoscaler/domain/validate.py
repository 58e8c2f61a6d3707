"""What is wrong with an endpoint's spec that no single field shows. Pure.

Single fields (bounds, formats, finite numbers) are checked by the server against the rules in the contract.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from gpuscale.autoscaler.domain.rules.rule import BoundMode, Rule
from gpuscale.autoscaler.domain.rules.steps import Comparator, RatioRule, StepRule
from gpuscale.autoscaler.domain.spec import (
    ASKS_FOR_ROOM,
    UNPACED,
    EndpointSpec,
    GpuSignal,
    HostSignal,
    Pace,
    ReplicaTemplate,
    Signal,
    TaskSignal,
)
from gpuscale.common.errors import FieldViolation

DERIVED_GPU_METRICS = frozenset({"memory_used_percent"})
"""Of a GPU: device memory in use as a share of its size, 0-100."""
DERIVED_HOST_METRICS = frozenset({"load_per_core", "memory_used_percent"})
"""Of a host: load average of 1 minute for each core; main memory that is not available as a share of its size, 0-100."""

GPU_METRICS = DERIVED_GPU_METRICS | frozenset(
    [
        "utilization_percent",
        "memory_utilization_percent",
        "encoder_utilization_percent",
        "decoder_utilization_percent",
        "memory_total_bytes",
        "memory_used_bytes",
        "memory_free_bytes",
        "memory_reserved_bytes",
        "temperature_celsius",
        "memory_temperature_celsius",
        "energy_joules",
        "power_watts",
        "power_limit_watts",
        "power_limit_default_watts",
        "power_limit_min_watts",
        "power_limit_max_watts",
        "sm_clock_mhz",
        "memory_clock_mhz",
        "video_clock_mhz",
        "performance_state",
        "throttle_reason_mask",
        "pcie_link_generation",
        "pcie_link_width",
        "pcie_replay_count",
        "pcie_sent_bytes",
        "pcie_received_bytes",
        "nvlink_active_count",
        "nvlink_sent_bytes",
        "nvlink_received_bytes",
        "nvlink_crc_error_count",
        "nvlink_replay_error_count",
        "nvlink_recovery_error_count",
        "ecc_volatile_corrected_count",
        "ecc_volatile_uncorrected_count",
        "ecc_aggregate_corrected_count",
        "ecc_aggregate_uncorrected_count",
        "retired_pages_corrected_count",
        "retired_pages_uncorrected_count",
        "remapped_rows_corrected_count",
        "remapped_rows_uncorrected_count",
    ]
)
"""What a `GpuSignal` may name."""
HOST_METRICS = DERIVED_HOST_METRICS | frozenset(
    [
        "cpu_percent",
        "cpu_smoothed_percent",
        "cpu_count",
        "load_1m",
        "load_5m",
        "load_15m",
        "load_1m_per_core",
        "memory_total_bytes",
        "memory_available_bytes",
        "memory_used_bytes",
        "swap_total_bytes",
        "swap_used_bytes",
        "disk_read_bytes",
        "disk_written_bytes",
        "network_received_bytes",
        "network_sent_bytes",
        "pressure_cpu_some_percent",
        "pressure_memory_some_percent",
        "pressure_memory_full_percent",
        "pressure_io_some_percent",
        "pressure_io_full_percent",
    ]
)
"""What a `HostSignal` may name."""

SPEC = "endpoint.spec"


def violations(spec: EndpointSpec, path: str = SPEC) -> list[FieldViolation]:
    """The fields at fault, by paths that begin with `path`; empty when the spec is sound."""
    found = list(_crossed(path, spec.min_replicas, spec.max_replicas))
    if not spec.template.template and not (
        spec.capability_sets and all(one.template for one in spec.capability_sets)
    ):
        found.append(FieldViolation(f"{path}.template.template", "must be set"))
    found += _tiers(f"{path}.template", spec.template)
    if spec.warm_spares > spec.max_replicas:
        found.append(FieldViolation(f"{path}.warm_spares", "must be at most max_replicas"))
    found += _repeated(f"{path}.signals", [signal.id for signal in spec.signals])
    found += _repeated(f"{path}.rules", [rule.id for rule in spec.rules])
    for index, signal in enumerate(spec.signals):
        found += _metric(f"{path}.signals[{index}]", signal)
    signals = {signal.id for signal in spec.signals}
    for index, rule in enumerate(spec.rules):
        found += _rule(f"{path}.rules[{index}]", rule, signals)
    found += _contradictions(f"{path}.rules", spec.rules)
    if spec.capability_sets:
        found += _sets(path, spec)
    found += [*_pace(f"{path}.up", spec.up), *_pace(f"{path}.down", spec.down)]
    return found


def _crossed(path: str, least: int | None, most: int | None) -> Iterator[FieldViolation]:
    if least is not None and most is not None and least > most:
        yield FieldViolation(f"{path}.max_replicas", "must be at least min_replicas")


def _sets(path: str, spec: EndpointSpec) -> Iterator[FieldViolation]:
    """What is wrong with capability sets: only a ratio of tasks to workers is reckoned for each set by itself."""
    sets = spec.capability_sets
    yield from _repeated(f"{path}.capability_sets", [one.id for one in sets])
    for index, one in enumerate(sets):
        where = f"{path}.capability_sets[{index}]"
        yield from _crossed(where, one.min_replicas, one.max_replicas)
        if one.template is not None:
            if not one.template.template:
                yield FieldViolation(f"{where}.template.template", "must be set")
            yield from _tiers(f"{where}.template", one.template)
    if sum(one.min_replicas for one in sets) > spec.max_replicas:
        yield FieldViolation(
            f"{path}.max_replicas", "must be at least the min_replicas of all capability_sets"
        )
    tasks = {one.id for one in spec.signals if isinstance(one.source, TaskSignal)}
    for index, rule in enumerate(spec.rules):
        if not isinstance(rule.kind, RatioRule) or rule.kind.proportional_down or rule.signal not in tasks:
            text = "must be a ratio on a signal of tasks, one step at a time, beside capability_sets"
            yield FieldViolation(f"{path}.rules[{index}].ratio", text)
    if len(spec.rules) > 1:
        yield FieldViolation(f"{path}.rules[1]", "must be left out: beside capability_sets there is one rule")
    unused = (
        ("warm_spares", spec.warm_spares, "give sets min_replicas"),
        ("up", spec.up != UNPACED, "give the rule a cooldown"),
        ("down", spec.down != UNPACED, "give the rule a cooldown"),
        ("gpu_gate", spec.gpu_gate in ASKS_FOR_ROOM, "give sets max_replicas"),
        ("bound_mode", spec.bound_mode is not BoundMode.CLAMP, "sets keep to their bounds one by one"),
    )
    for name, stated, instead in unused:
        if stated:
            yield FieldViolation(f"{path}.{name}", f"must be left out beside capability_sets: {instead}")


def _tiers(path: str, template: ReplicaTemplate) -> Iterator[FieldViolation]:
    if template.tiers and template.adapter:
        yield FieldViolation(f"{path}.tiers", "must be left out where adapter is set")
    adapters = [tier.adapter for tier in template.tiers]
    for place, adapter in enumerate(adapters):
        if adapter in adapters[:place]:
            text = "must differ from the adapters before it"
            yield FieldViolation(f"{path}.tiers[{place}].adapter", text)


def _repeated(path: str, ids: Sequence[str]) -> Iterator[FieldViolation]:
    counts = Counter(ids)
    for index, one in enumerate(ids):
        if counts[one] > 1 and one in ids[:index]:
            yield FieldViolation(f"{path}[{index}].id", "must differ from the ids before it")


def _metric(path: str, signal: Signal) -> Iterator[FieldViolation]:
    if signal.counts_work and isinstance(signal.source, GpuSignal | HostSignal):
        yield FieldViolation(
            f"{path}.counts_work", "must be left out: readings of GPUs and hosts count no work"
        )
    match signal.source:
        case GpuSignal(metric) if metric not in GPU_METRICS:
            yield FieldViolation(f"{path}.gpu.metric", _unknown_metric("GPUs", metric, GPU_METRICS))
        case GpuSignal(nodes=nodes, own_replicas=True) if nodes:
            yield FieldViolation(f"{path}.gpu.nodes", "must be left out where own_replicas is set")
        case HostSignal(metric) if metric not in HOST_METRICS:
            yield FieldViolation(f"{path}.host.metric", _unknown_metric("hosts", metric, HOST_METRICS))
        case _:
            return


def _unknown_metric(what: str, metric: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(metric, sorted(known), n=1)
    return f"must be a reading of {what}" + (f"; did you mean {near[0]}?" if near else "")


def _rule(path: str, rule: Rule, signals: set[str]) -> Iterator[FieldViolation]:
    if (rule.kind.reads_signal or rule.signal) and rule.signal not in signals:
        yield FieldViolation(f"{path}.signal", "must be the id of a signal of this endpoint")
    for field, problem in rule.kind.problems(signals):
        yield FieldViolation(f"{path}.{rule.kind.field()}.{field}", problem)
    yield from _crossed(path, rule.min_replicas, rule.max_replicas)


def _pace(path: str, pace: Pace) -> Iterator[FieldViolation]:
    for index, limit in enumerate(pace.limits):
        if limit.replicas is None and limit.percent is None:
            yield FieldViolation(f"{path}.limits[{index}].replicas", "must be set, or percent")


def _contradictions(path: str, rules: Sequence[Rule]) -> Iterator[FieldViolation]:
    """Pairs that read one signal, step in opposite directions and can be true at once (up at > 5, down at < 8)."""
    steps = [
        (index, rule, rule.kind)
        for index, rule in enumerate(rules)
        if isinstance(rule.kind, StepRule) and not rule.disabled
    ]
    for (first, one, kind), (second, other, opposite) in combinations(steps, 2):
        if one.signal != other.signal or kind.step * opposite.step >= 0:
            continue
        if _region(kind).meets(_region(opposite)):
            text = f"can be true together with rules[{first}], which steps the other way"
            yield FieldViolation(f"{path}[{second}].step.threshold", text)


@dataclass(frozen=True, slots=True)
class _Region:
    """The values for which a rule is true: an interval that may include its ends."""

    low: float
    high: float
    closed: bool

    def meets(self, other: _Region) -> bool:
        low, high = max(self.low, other.low), min(self.high, other.high)
        return low < high or (low == high and self.closed and other.closed)


def _region(kind: StepRule) -> _Region:
    comparator, threshold = kind.comparator, kind.threshold
    closed = comparator in {Comparator.LESS_THAN_OR_EQUAL, Comparator.GREATER_THAN_OR_EQUAL}
    if comparator in {Comparator.LESS_THAN, Comparator.LESS_THAN_OR_EQUAL}:
        return _Region(-math.inf, threshold, closed)
    return _Region(threshold, math.inf, closed)

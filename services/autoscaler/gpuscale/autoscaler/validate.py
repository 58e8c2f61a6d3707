"""What is wrong with an endpoint's spec that no single field shows. Pure.

Single fields (bounds, formats, finite numbers) are checked by the server against the rules in the contract.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from gpuscale.autoscaler.model import Comparator, EndpointSpec, Rule
from gpuscale.common.errors import FieldViolation

SPEC = "endpoint.spec"


def violations(spec: EndpointSpec, path: str = SPEC) -> list[FieldViolation]:
    """The fields at fault, by paths that begin with `path`; empty when the spec is sound."""
    found = list(_crossed(path, spec.min_replicas, spec.max_replicas))
    if not spec.template.template:
        found.append(FieldViolation(f"{path}.template.template", "must be set"))
    found += _repeated(f"{path}.signals", [signal.id for signal in spec.signals])
    found += _repeated(f"{path}.rules", [rule.id for rule in spec.rules])
    signals = {signal.id for signal in spec.signals}
    for index, rule in enumerate(spec.rules):
        found += _rule(f"{path}.rules[{index}]", rule, signals)
    found += _contradictions(f"{path}.rules", spec.rules)
    return found


def _crossed(path: str, least: int | None, most: int | None) -> Iterator[FieldViolation]:
    if least is not None and most is not None and least > most:
        yield FieldViolation(f"{path}.max_replicas", "must be at least min_replicas")


def _repeated(path: str, ids: Sequence[str]) -> Iterator[FieldViolation]:
    counts = Counter(ids)
    for index, one in enumerate(ids):
        if counts[one] > 1 and one in ids[:index]:
            yield FieldViolation(f"{path}[{index}].id", "must differ from the ids before it")


def _rule(path: str, rule: Rule, signals: set[str]) -> Iterator[FieldViolation]:
    if rule.signal not in signals:
        yield FieldViolation(f"{path}.signal", "must be the id of a signal of this endpoint")
    if rule.kind.step == 0:
        yield FieldViolation(f"{path}.step.step", "must not be 0")
    yield from _crossed(path, rule.min_replicas, rule.max_replicas)


def _contradictions(path: str, rules: Sequence[Rule]) -> Iterator[FieldViolation]:
    """Pairs that read one signal, step in opposite directions and can be true at once (up at > 5, down at < 8)."""
    for (first, one), (second, other) in combinations(enumerate(rules), 2):
        if (
            one.disabled
            or other.disabled
            or one.signal != other.signal
            or one.kind.step * other.kind.step >= 0
        ):
            continue
        if _region(one).meets(_region(other)):
            text = f"can be true together with rules[{first}], which steps the other way"
            yield FieldViolation(f"{path}[{second}].step.threshold", text)


@dataclass(frozen=True, slots=True)
class _Region:
    """The values for which a rule is true: an interval that may include its ends."""

    low: float
    high: float
    closed: bool

    def meets(self, other: "_Region") -> bool:
        low, high = max(self.low, other.low), min(self.high, other.high)
        return low < high or (low == high and self.closed and other.closed)


def _region(rule: Rule) -> _Region:
    comparator, threshold = rule.kind.comparator, rule.kind.threshold
    closed = comparator in {Comparator.LESS_THAN_OR_EQUAL, Comparator.GREATER_THAN_OR_EQUAL}
    if comparator in {Comparator.LESS_THAN, Comparator.LESS_THAN_OR_EQUAL}:
        return _Region(-math.inf, threshold, closed)
    return _Region(threshold, math.inf, closed)

"""A rule with a formula over signals. Pure.

Formulas are evaluated by simpleeval, with numbers only: no attributes, no texts, only the functions named here, bounded in
length and depth. If the result is not a finite number, the rule holds.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from simpleeval import DEFAULT_OPERATORS, InvalidExpression, SimpleEval

from gpuscale.autoscaler.domain.decisions import Code
from gpuscale.autoscaler.domain.inputs import Inputs
from gpuscale.autoscaler.domain.rules.rule import LARGEST_COUNT, Kind, Proposal, Rule, ceiling

DEEPEST = 20
"""Most levels of a formula's tree."""
LARGEST_EXPONENT = 100.0
OWN_NAMES = frozenset({"replicas", "ready"})
"""Names that are not signals."""

_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "abs": abs,
}
_NODES = (
    ast.Expression,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.BoolOp,
    ast.IfExp,
    ast.Call,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.boolop,
)


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > LARGEST_EXPONENT:
        raise InvalidExpression(f"an exponent of {exponent:g} is too large")
    return math.pow(base, exponent)


_OPERATORS = {**DEFAULT_OPERATORS, ast.Pow: _power}


def name_of(signal: str) -> str:
    """The id of a signal as written in a formula."""
    return signal.replace("-", "_").replace(".", "_")


@lru_cache(maxsize=1024)
def _tree(expression: str) -> ast.Expression:
    try:
        return ast.parse(expression.strip(), mode="eval")
    except SystemError:
        # Python 3.11 counts the depth of all trees in one place (gh-106905): it loses count where the garbage collector
        # meanwhile ends something that also parses, such as writing a traceback. The next attempt counts correctly.
        return ast.parse(expression.strip(), mode="eval")


@lru_cache(maxsize=1024)
def problem(expression: str) -> str:
    """What is wrong with a formula; empty if nothing is."""
    try:
        tree = _tree(expression)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "is not a formula"
    level: list[ast.AST] = [tree]  # by level, as recursion could overflow
    for _ in range(DEEPEST):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
    if level:
        return f"is nested deeper than {DEEPEST} levels"
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            return f"may not contain {type(node).__name__}"
        if isinstance(node, ast.Constant) and (
            isinstance(node.value, bool) or not isinstance(node.value, int | float)
        ):
            return "may only contain numbers"
        if isinstance(node, ast.Call):
            function = node.func
            if node.keywords or not isinstance(function, ast.Name) or function.id not in _FUNCTIONS:
                return f"may call {', '.join(sorted(_FUNCTIONS))} only"
    return ""


@lru_cache(maxsize=1024)
def names(expression: str) -> frozenset[str]:
    """The names in a valid formula, except those of functions."""
    found = {node.id for node in ast.walk(_tree(expression)) if isinstance(node, ast.Name)}
    return frozenset(found - _FUNCTIONS.keys())


@dataclass(frozen=True, slots=True)
class FormulaRule(Kind):
    """The count that a formula over signals gives."""

    expression: str
    proportional: ClassVar[bool] = True
    reads_signal: ClassVar[bool] = False

    def also_reads(self, signals: Iterable[str]) -> frozenset[str]:
        """The signals in the formula."""
        used = names(self.expression)
        return frozenset(signal for signal in signals if name_of(signal) in used)

    def propose(self, rule: Rule, value: float, inputs: Inputs) -> Proposal:
        """The result of the formula, rounded up; an unknown signal in it holds."""
        before, used = inputs.before, names(self.expression)
        values: dict[str, float] = {"replicas": before, "ready": inputs.serving}
        for signal in inputs.observations:
            if (known := inputs.value(signal)) is not None:
                values[name_of(signal)] = known
            else:  # a signal with one of these names hides their usual meaning
                values.pop(name_of(signal), None)
        if missing := sorted(used - values.keys()):
            return Proposal(before, f"{', '.join(missing)} is not available", code=Code.SIGNAL_MISSING)
        shown = ", ".join(f"{name} = {values[name]:g}" for name in sorted(used))
        try:
            result = _evaluate(self.expression, {name: values[name] for name in used})
        except (InvalidExpression, ArithmeticError, ValueError, TypeError) as error:
            return Proposal(before, f"{self.expression} with {shown}: {error}", code=Code.SIGNAL_INVALID)
        if not math.isfinite(result) or abs(result) > LARGEST_COUNT:
            return Proposal(before, f"{self.expression} with {shown} is {result:g}", code=Code.SIGNAL_INVALID)
        count = ceiling(result)
        text = f"{self.expression} with {shown or 'no signal'} is {result:g}"
        return Proposal(count, text, fired=count != before)

    def problems(self, signals: Collection[str]) -> Iterator[tuple[str, str]]:
        """What is wrong with the formula, and names in it that match no signal, or several."""
        if wrong := problem(self.expression):
            yield "expression", wrong
            return
        used, meant = names(self.expression), Counter(name_of(signal) for signal in signals)
        if unknown := sorted(used - meant.keys() - OWN_NAMES):
            yield "expression", f"names {', '.join(unknown)}, which is not a signal of this endpoint"
        if unclear := sorted(name for name in used if meant[name] > 1):
            yield "expression", f"names {', '.join(unclear)}, which may be one of several signals"


def _evaluate(expression: str, values: Mapping[str, float]) -> float:
    evaluator = SimpleEval(operators=_OPERATORS, functions=dict(_FUNCTIONS), names=dict(values))
    result = evaluator.eval(expression, _tree(expression).body)
    if not isinstance(result, int | float):
        raise TypeError(f"gives {type(result).__name__}, not a number")
    return float(result)

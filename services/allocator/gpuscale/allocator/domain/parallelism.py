"""Parallelism: how many GPUs the parameters of an inference server ask for. Pure.

The rule and the spellings are those of the GPU tracking seed (seeds/001): world size = tp x pp x max(dp, dcp, cp), each
the largest value given, under `tensor-parallel-size`, `tp-size`, `tp_size`, `tp` and the like. Unlike there, what cannot
be right is refused and never guessed: the seed made 0 GPUs of a 0, and of two spellings took whichever it knew first.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpuscale.common.errors import FieldViolation, InvalidArgumentError

Json: TypeAlias = "bool | float | str | Sequence[Json] | Mapping[str, Json] | None"
"""A value as JSON has it."""
MOST_GPUS = 4096
"""Most GPUs that one ask may name (the contract's bound of `Ask.gpu_count`)."""

_KINDS: Mapping[str, str] = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "dcp": "decode-context",
}
_ALIASES: Mapping[str, str] = {
    alias: kind for kind, long in _KINDS.items() for alias in (f"{long}-parallel-size", f"{kind}-size", kind)
}
_DIGITS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Parallelism:
    """The largest value of each kind, 1 where it was not given, and the names that mean nothing here."""

    tp: int
    pp: int
    dp: int
    cp: int
    dcp: int
    ignored: tuple[str, ...]

    @property
    def world_size(self) -> int:
        """How many GPUs."""
        return self.tp * self.pp * max(self.dp, self.dcp, self.cp)

    @property
    def note(self) -> str:
        """How the world size was found, in words."""
        return f"{self.world_size} = tp {self.tp} x pp {self.pp} x max(dp {self.dp}, dcp {self.dcp}, cp {self.cp})"


def parallelism(parameters: "Mapping[str, Json]") -> Parallelism:
    """Read the parameters: numbers, lists of numbers, or `{"values": [...]}`, as JSON has them.

    Raises:
        InvalidArgumentError: a value is no whole number from 1 to 4,096, a list is empty, two spellings of one
            parameter differ, or all of it is more than one ask may name. Each parameter at fault is a violation.
    """
    found: dict[str, tuple[str, frozenset[int]]] = {}
    wrong: list[FieldViolation] = []
    for name in sorted(parameters):
        kind = _kind(name)
        if kind is None:
            continue
        values, problem = _values(parameters[name])
        before = found.setdefault(kind, (name, values))
        if not problem and before[1] != values:
            problem = f"contradicts {before[0]}: both name one parameter, with different values"
        if problem:
            wrong.append(FieldViolation(f'parameters["{name}"]', problem))
    _refuse(wrong)
    largest = {kind: max(values) for kind, (_, values) in found.items()}
    ignored = tuple(sorted(name for name in parameters if _kind(name) is None))
    return _bounded(Parallelism(**{kind: largest.get(kind, 1) for kind in _KINDS}, ignored=ignored))


def _kind(name: str) -> str | None:
    """Which kind of parallelism a name means; None where it means something else."""
    return _ALIASES.get(name.lower().replace("_", "-"))


def _values(given: "Json") -> tuple[frozenset[int], str]:
    """The values that were given, and what is wrong with them, empty where nothing is."""
    if isinstance(given, Mapping):
        if set(given) != {"values"}:
            return frozenset(), 'must be a number, a list of numbers, or {"values": [...]}'
        given = given["values"]
    items: Sequence[Json] = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    values = [_whole(item) for item in items]
    if not values:
        return frozenset(), "must not be an empty list"
    known = frozenset(value for value in values if value is not None)
    if None in values:
        return known, f"must hold whole numbers from 1 to {MOST_GPUS}, and nothing else"
    return known, ""


def _whole(item: "Json") -> int | None:
    """A whole number of 1 to `MOST_GPUS`, as a number or as digits; None for anything else."""
    if isinstance(item, str):
        item = int(item) if _DIGITS.fullmatch(item) else None
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return None
    return int(item) if 1 <= item <= MOST_GPUS and item % 1 == 0 else None


def _refuse(wrong: Sequence[FieldViolation]) -> None:
    if wrong:
        first = wrong[0]
        raise InvalidArgumentError(f"{first.field} {first.description}", violations=wrong)


def _bounded(found: Parallelism) -> Parallelism:
    if found.world_size > MOST_GPUS:
        raise InvalidArgumentError(
            f"the parameters ask for {found.note} GPUs; {MOST_GPUS} is the most that one request may name",
            field="parameters",
        )
    return found

"""Selectors and orders: `-l state=READY,!zone,fence>=3` and `--sort-by=-.fence`. Pure.

A key is a label, or else a field of the resource's JSON form. Enum values match without their prefix (`state=online` fits
NODE_STATE_ONLINE); `>=`, `<=`, `>` and `<` compare numbers, sizes and durations by amount. A missing value fits nothing and
sorts last.
"""

import difflib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuscale.cli.grammar.jsonpath import Field, Path, as_text, find, parse_path
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.sizes import parse_duration, parse_size

_CONDITION = re.compile(r"(?P<not>!)?(?P<key>[^=!<>\s]+)(?:\s*(?P<is>==|=|!=|>=|<=|>|<)\s*(?P<value>.*))?")
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?)[A-Za-z%]*")
_COMPARE: Final[Mapping[str, Callable[[float, float], bool]]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Condition:
    """One condition of a selector."""

    key: str  # the text before the sign
    path: Path  # the key as a path
    sign: str  # one of = != >= <= > <; empty where only the presence of the key counts
    value: str  # the text behind the sign
    negated: bool  # whether the rest must not hold

    @property
    def compares(self) -> bool:
        """Whether it compares amounts."""
        return self.sign in _COMPARE

    def fits(self, labels: Labels, data: object) -> bool:
        """Whether a resource with these labels and this JSON form meets it."""
        return self.holds([labels[self.key]] if self.key in labels else self.values(data))

    def values(self, data: object) -> list[str]:
        """What a resource with this JSON form has at the path."""
        return list(map(as_text, find(self.path, data)))

    def holds(self, values: Sequence[str]) -> bool:
        """Whether one of these values meets it."""
        if not self.sign:
            found = bool(values)
        elif self.compares:
            compare, right = _COMPARE[self.sign], amount(self.value)
            amounts = [left for value in values if (left := amount(value)) is not None]
            found = right is not None and any(compare(left, right) for left in amounts)
        else:  # an enum value fits with or without its prefix, in any case
            ending = f"_{self.value.upper()}"
            found = self.value in values or any(
                value.isupper() and f"_{value}".endswith(ending) for value in values
            )
        return found is not self.negated


def parse_selector(text: str) -> tuple[Condition, ...]:
    """The conditions of a selector, all of which must be met.

    Raises:
        ValueError: one of them cannot be read.
    """
    conditions: list[Condition] = []
    for part in text.split(","):
        found = _CONDITION.fullmatch(part.strip())
        if found is None or (found["not"] and found["is"]):
            raise ValueError(
                f"{part!r} is not a condition; write it like zone=a, zone!=a, zone, !zone or fence>=3"
            )
        key = found["key"]
        # A label may have a name that no path has.
        path = parse_path(key) if re.fullmatch(r"[\w.\[\]-]+", key) else ()
        sign, value = found["is"] or "", found["value"] or ""
        if sign in _COMPARE and amount(value) is None:
            raise ValueError(f"{part!r}: {value!r} is not a number, size or duration")
        negated = bool(found["not"]) or sign == "!="
        conditions.append(Condition(key, path or parse_path(f"['{key}']"), sign, value, negated))
    return tuple(conditions)


def order(value: object) -> tuple[int, float, str]:
    """A key to sort by: numbers, sizes, durations and percentages by how much they are, then texts, then nothing."""
    if value is None or value in {"", "-"}:
        return 2, 0.0, ""
    if isinstance(value, (bool, int, float)):
        return 0, float(value), ""
    text = as_text(value)
    number = amount(text.partition(" ")[0].partition("/")[0])
    return (1, 0.0, text) if number is None else (0, number, text)


def amount(text: str) -> float | None:
    """How much a number, size, duration or percentage is; None for what is none of them."""
    if _PLAIN.fullmatch(text):
        return float(text)
    for read in (parse_size, parse_duration):
        try:
            return float(read(text))
        except ValueError:
            continue
    found = _NUMBER.fullmatch(text)
    return float(found[1]) if found else None


def near(typed: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest known word; else the choices; empty where there are none."""
    words = list(known)
    folded = {word.casefold(): word for word in words}
    found = difflib.get_close_matches(typed.casefold(), list(folded), n=1)
    if found:
        return f"; did you mean {folded[found[0]]}?"
    return f"; choose from {', '.join(words)}" if words else ""


def check_path(path: Path, descriptor: Any, where: str, also: Iterable[str] = ()) -> None:
    """Check that a path leads through fields of a message; maps may have any key.

    Args:
        path: the path.
        descriptor: of the message; to the stubs one of two classes, by implementation.
        where: the option that has the path, for the error.
        also: other words that may have been meant.

    Raises:
        InvalidArgumentError: there is no such field.
    """
    for step in path:
        if descriptor is None or not isinstance(step, Field):
            continue
        found = next((one for one in descriptor.fields if step.name in {one.name, one.json_name}), None)
        if found is None:
            known = [*also, *(one.json_name for one in descriptor.fields)]
            raise InvalidArgumentError(f"{where}: unknown field {step.name!r}{near(step.name, known)}")
        also = ()
        of = found.message_type
        descriptor = None if of is None or of.GetOptions().map_entry else of

"""Selectors and sort keys: `-l state=READY,!zone,fence>=3` and `--sort-by=-.fence`. Pure.

Conditions on fields and labels become a filter of the API (docs/api.md); those on columns, which only this program knows, are
evaluated here. `>=`, `<=`, `>` and `<` compare numbers, sizes and durations; a missing value meets no condition.
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpuscale.cli.grammar.jsonpath import COMPARE, Field, Path, as_text, parse_path
from gpuscale.common.errors import InvalidArgumentError
from gpuscale.common.sizes import parse_duration, parse_size

_CONDITION = r"(?P<not>!)?(?P<key>[^=!<>\s]+)(?:\s*(?P<is>==|=|!=|>=|<=|>|<)\s*(?P<value>.*))?"
_PLAIN = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_NUMBER = r"([-+]?\d+(?:\.\d+)?)[A-Za-z%]*"
_ORDERING: Final = (">=", "<=", ">", "<")
_BARE = r"[\w-]+"
_TEXT = 9  # of FieldDescriptor.TYPE_STRING, whose module takes long to import


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
        return self.sign in _ORDERING

    def fits(self, descriptor: Any) -> bool:
        """Whether there is such a field, and its value may be one of it."""
        try:
            return bool(self.to_filter(descriptor, ""))
        except InvalidArgumentError:
            return False

    def to_filter(self, descriptor: Any, where: str, also: Iterable[str] = ()) -> str:
        """The API's filter for messages of a type; the arguments are those of `check_path`.

        Raises InvalidArgumentError: there is no such field, or it has no amount to compare.
        """
        leaf, several = check_path(self.path, descriptor, where, also)
        if self.compares and (several or leaf.type == _TEXT):
            raise InvalidArgumentError(f"{where}: {self.key} has no amount: compare it with = or !=")
        if leaf.enum_type is not None and self.sign:
            prefix = leaf.enum_type.values[0].name.removesuffix("UNSPECIFIED")
            words = [one.name.removeprefix(prefix) for one in leaf.enum_type.values]
            if self.value.upper().removeprefix(prefix) not in words:
                raise InvalidArgumentError(
                    f"{where}: {self.key}: unknown value {self.value!r}{near(self.value, words[1:])}"
                )
        names = [step.name for step in self.path if isinstance(step, Field)]
        field = ".".join(name if re.fullmatch(_BARE, name) else _quoted(name) for name in names)
        asked = ":*"
        if self.sign:
            of_number = leaf.type != _TEXT and leaf.message_type is None and leaf.enum_type is None
            number = amount(self.value) if of_number else None
            value = self.value if number is None else f"{number:.17g}"
            asked = (self.sign if self.compares else ":" if several else "=") + _quoted(value)
        return f"{'NOT ' if self.negated else ''}{field}{asked}"

    def holds(self, values: Sequence[str]) -> bool:
        """Whether one of the values meets it."""
        if not self.sign:
            found = bool(values)
        elif self.compares:
            compare, right = COMPARE[self.sign], amount(self.value)
            amounts = [left for value in values if (left := amount(value)) is not None]
            found = right is not None and any(compare(left, right) for left in amounts)
        else:
            found = self.value.casefold() in map(str.casefold, values)
        return found is not self.negated


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def parse_selector(text: str) -> tuple[Condition, ...]:
    """The conditions of a selector. Raises ValueError: one is invalid."""
    conditions: list[Condition] = []
    for part in text.split(","):
        found = re.fullmatch(_CONDITION, part.strip())
        if found is None or (found["not"] and found["is"]):
            raise ValueError(
                f"{part!r} is not a condition; write it like zone=a, zone!=a, zone, !zone or fence>=3"
            )
        key = found["key"]
        # A label's name may not be a valid path.
        path = parse_path(key) if re.fullmatch(r"[\w.\[\]-]+", key) else ()
        sign, value = found["is"] or "", found["value"] or ""
        if sign in _ORDERING and amount(value) is None:
            raise ValueError(f"{part!r}: {value!r} is not a number, size or duration")
        negated = bool(found["not"]) or sign == "!="
        conditions.append(Condition(key, path or parse_path(f"['{key}']"), sign, value, negated))
    return tuple(conditions)


def order(value: object) -> tuple[int, float, str]:
    """A sort key: amounts first, then text, then missing values."""
    if value is None or value in {"", "-"}:
        return 2, 0.0, ""
    if isinstance(value, (bool, int, float)):
        return 0, float(value), ""
    text = as_text(value)
    number = amount(text.partition(" ")[0].partition("/")[0])
    return (1, 0.0, text) if number is None else (0, number, text)


def amount(text: str) -> float | None:
    """The amount of a number, size, duration or percentage; None for other text."""
    if re.fullmatch(_PLAIN, text):
        return float(text)
    for read in (parse_size, parse_duration):
        try:
            return float(read(text))
        except ValueError:
            continue
    found = re.fullmatch(_NUMBER, text)
    return float(found[1]) if found else None


def near(typed: str, known: Iterable[str]) -> str:
    """`; did you mean x?` for the nearest known word, else all known words."""
    words = list(known)
    folded = {word.casefold(): word for word in words}
    found = difflib.get_close_matches(typed.casefold(), list(folded), n=1)
    if found:
        return f"; did you mean {folded[found[0]]}?"
    return f"; choose from {', '.join(words)}" if words else ""


def check_path(path: Path, descriptor: Any, where: str, also: Iterable[str] = ()) -> tuple[Any, bool]:
    """The field at a path of a message, and whether it may have several values; maps have any key.

    The stubs have two classes for a `descriptor`. `where` is the option, for errors; `also` are more words to suggest.

    Raises InvalidArgumentError: there is no such field.
    """
    leaf, several = None, False
    for step in path:
        if descriptor is None or not isinstance(step, Field):
            continue
        if descriptor.GetOptions().map_entry:
            leaf = descriptor.fields_by_name["value"]
        else:
            leaf = next((one for one in descriptor.fields if step.name in {one.name, one.json_name}), None)
            if leaf is None:
                known = [*also, *(one.json_name for one in descriptor.fields)]
                raise InvalidArgumentError(f"{where}: unknown field {step.name!r}{near(step.name, known)}")
        also, descriptor = (), leaf.message_type
        several = several or (leaf.is_repeated and not (descriptor and descriptor.GetOptions().map_entry))
    if leaf is None:
        raise InvalidArgumentError(f"{where}: no field is named")
    return leaf, several


def leads(path: Path, descriptor: Any) -> bool:
    """Whether a message has a field at this path."""
    try:
        return bool(check_path(path, descriptor, ""))
    except InvalidArgumentError:
        return False

"""Which of several resources are shown, and in which order: `-l state=READY,!zone` and `--sort-by=-.fence`.

Pure. A key of a selector is a label, or else a field of the resource in its JSON form; words of enums may lose their prefix
(`state=online` fits NODE_STATE_ONLINE). What is not there comes last in every order.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gpuscale.cli.jsonpath import Path, as_text, find, parse_path
from gpuscale.cli.quantities import parse_duration, parse_size

_CONDITION = re.compile(r"(?P<not>!)?(?P<key>[^=!\s]+)(?:\s*(?P<is>==|=|!=)\s*(?P<value>.*))?")
_NUMBER = re.compile(r"([-+]?\d+(?:\.\d+)?)[A-Za-z%]*")
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Condition:
    """One condition of a selector; without a value: whether the key is there."""

    key: str
    path: Path
    value: str | None
    negated: bool

    def fits(self, labels: Labels, data: object) -> bool:
        """Whether a resource with these labels and this JSON form meets it."""
        found = [labels[self.key]] if self.key in labels else list(map(as_text, find(self.path, data)))
        wanted = self.value
        holds = bool(found) if wanted is None else any(_same(one, wanted) for one in found)
        return holds is not self.negated


def parse_selector(text: str) -> tuple[Condition, ...]:
    """The conditions of a selector, all of which must be met.

    Raises:
        ValueError: one of them cannot be read.
    """
    return tuple(map(_condition, text.split(",")))


def _condition(text: str) -> Condition:
    found = _CONDITION.fullmatch(text.strip())
    if found is None or (found["not"] and found["is"]):
        raise ValueError(f"{text!r} is no condition; write it like zone=a, zone!=a, zone or !zone")
    key = found["key"]
    # A label may have a name that no path has.
    path = parse_path(key) if re.fullmatch(r"[\w.\[\]-]+", key) else ()
    negated = bool(found["not"]) or found["is"] == "!="
    return Condition(key, path or parse_path(f"['{key}']"), found["value"], negated)


def _same(value: str, wanted: str) -> bool:
    if value == wanted:
        return True
    # A word of an enum, with or without its prefix, in any case.
    return value.isupper() and f"_{value}".endswith(f"_{wanted.upper()}")


def order(value: object) -> tuple[int, float, str]:
    """A key to sort by: numbers, sizes, durations and percentages by how much they are, then texts, then nothing."""
    if value is None or value in {"", "-"}:
        return 2, 0.0, ""
    if isinstance(value, (bool, int, float)):
        return 0, float(value), ""
    text = as_text(value)
    amount = _amount(text.partition(" ")[0].partition("/")[0])
    return (1, 0.0, text) if amount is None else (0, amount, text)


def _amount(text: str) -> float | None:
    for read in (parse_size, parse_duration):
        try:
            return float(read(text))
        except ValueError:
            continue
    found = _NUMBER.fullmatch(text)
    return float(found[1]) if found else None

"""Which items of a list are written, in which order, and while it is watched only those that changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from gpuscale.cli.grammar.field_names import check
from gpuscale.cli.grammar.jsonpath import Path, find, is_mapping, parse_path
from gpuscale.cli.grammar.selecting import Condition, order
from gpuscale.cli.console.wire_json import name_of, to_dict
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import Column, View

    M = TypeVar("M", bound=Message)

DESCENDING = "-"
"""In front of what is sorted by."""


class Changes(NamedTuple):
    """What a reading of a watched list shows that the one before did not."""

    names: set[str]
    gone: list[str]


@dataclass
class Watched:
    """What was written of a list that is read again and again."""

    every: float
    """Seconds from one reading to the next."""
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    widths: list[int] = field(default_factory=list[int])
    headed: bool = False
    """Whether the headings are written."""

    def changes(self, shown: dict[str, tuple[str, ...]]) -> Changes:
        """Take note of a reading: by name, what is shown of each item."""
        before, self.seen = self.seen, shown
        changed = {name for name, cells in shown.items() if before.get(name) != cells}
        return Changes(changed, [name for name in before if name not in shown])


@dataclass(frozen=True)
class Chosen:
    """What `-l`, `--sort-by` and `--watch` say."""

    conditions: tuple[Condition, ...] = ()
    sort_by: str = ""
    watched: Watched | None = None

    def pick(self, items: "Sequence[M]", view: "View[M]") -> "tuple[list[M], list[str]]":
        """(the items to write, the names of those that are gone since they were written).

        Raises:
            InvalidArgumentError: there is nothing of that name to sort by.
        """
        kept = [item for item in items if self._fits(item, view)]
        if self.sort_by:
            kept = self._sorted(kept, view)
        if self.watched is None:
            return kept, []
        still = [column for column in view.columns if not column.moving]
        shown = {
            _key(item, index): tuple(column.cell(item) for column in still) for index, item in enumerate(kept)
        }
        changed, gone = self.watched.changes(shown)
        return [item for index, item in enumerate(kept) if _key(item, index) in changed], gone

    def _fits(self, item: "M", view: "View[M]") -> bool:
        if not self.conditions:
            return True
        data = to_dict(item)
        labels = {
            key: str(value)
            for found in find(view.labels, data)
            if is_mapping(found)
            for key, value in found.items()
        }
        return all(condition.fits(labels, data) for condition in self.conditions)

    def _sorted(self, items: "list[M]", view: "View[M]") -> "list[M]":
        descending = self.sort_by.startswith(DESCENDING)
        wanted = self.sort_by.removeprefix(DESCENDING)
        column = next((one for one in view.columns if one.heading.casefold() == wanted.casefold()), None)
        keys = [(_sort_key(item, column, wanted), item) for item in items]
        if column is None and keys and all(key[0] == _NOWHERE for key, _ in keys):
            check(_path(wanted), items[0].DESCRIPTOR, "--sort-by", [one.heading for one in view.columns])
        known = [pair for pair in keys if pair[0][0] != _NOWHERE]
        known.sort(key=lambda pair: pair[0], reverse=descending)
        return [item for _, item in known] + [item for key, item in keys if key[0] == _NOWHERE]


_NOWHERE = order(None)[0]


def _key(item: "Message", index: int) -> str:
    return name_of(item) or f"#{index}"


def _sort_key(item: "M", column: "Column[M] | None", wanted: str) -> tuple[int, float, str]:
    if column is not None:
        return order(column.cell(item))
    found = find(_path(wanted), to_dict(item))
    return order(found[0] if found else None)


def _path(text: str) -> Path:
    try:
        return parse_path(text)
    except ValueError as error:
        raise InvalidArgumentError(f"--sort-by: {error}") from error

"""Which items of a list are written, in which order, and while it is watched only those that changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from gpuscale.cli.console.wire_json import name_of, to_dict
from gpuscale.cli.grammar.field_names import check
from gpuscale.cli.grammar.jsonpath import Path, find, is_mapping, parse_path
from gpuscale.cli.grammar.selecting import Condition, order
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
            InvalidArgumentError: there is nothing of that name to select or to sort by.
        """
        kept = self._fitting(items, view)
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

    def _fitting(self, items: "Sequence[M]", view: "View[M]") -> "list[M]":
        """The items that meet all conditions. A key is a label, else a field, else the heading of a column."""
        if not self.conditions or not items:
            return list(items)
        data = [to_dict(item) for item in items]
        labels = [_labels(view.labels, one) for one in data]
        known = {key for one in labels for key in one}
        columns = [_column(condition, known, items[0].DESCRIPTOR, view) for condition in self.conditions]
        return [
            item
            for item, fields, own in zip(items, data, labels, strict=True)
            if all(
                condition.fits(own, fields) if column is None else condition.holds(_cell(column, item))
                for condition, column in zip(self.conditions, columns, strict=True)
            )
        ]

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


def _labels(path: Path, data: object) -> dict[str, str]:
    return {
        key: str(value) for found in find(path, data) if is_mapping(found) for key, value in found.items()
    }


def _column(condition: Condition, labels: set[str], descriptor: Any, view: "View[M]") -> "Column[M] | None":
    """The column that a condition is about; None where it is about a label or a field.

    Raises:
        InvalidArgumentError: its key is none of these.
    """
    if condition.key in labels:
        return None
    headings = {column.heading.casefold(): column for column in view.columns}
    try:
        check(condition.path, descriptor, "--selector", [*labels, *(one.heading for one in view.columns)])
    except InvalidArgumentError:
        if condition.key.casefold() in headings:
            return headings[condition.key.casefold()]
        if condition.negated and _has_labels(view.labels, descriptor):
            return None  # a label that nothing bears
        raise
    return None


def _has_labels(path: Path, descriptor: Any) -> bool:
    try:
        check(path, descriptor, "--selector")
    except InvalidArgumentError:
        return False
    return True


def _cell(column: "Column[M]", item: "M") -> list[str]:
    from gpuscale.cli.console.cells import ABSENT

    text = column.cell(item)
    return [] if text == ABSENT else [text]


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

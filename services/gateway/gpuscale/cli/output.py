"""Standard output: the payload, and nothing else, in the format that was asked for."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.views.cells import View

    M = TypeVar("M", bound=Message)

_UNPRINTABLE = r"[\x00-\x1f\x7f-\x9f]"
_GREEN, _YELLOW, _RED = "32", "33", "31"
_STATES: Mapping[str, str] = {
    _GREEN: "ONLINE OK ACTIVE READY CONNECTED",
    _YELLOW: "SIMULATED STALE SLOW DEGRADED PENDING STARTING DRAINING PAUSED NO_CAPACITY",
    _RED: "OFFLINE LOST HUNG FAILED UNKNOWN UNREACHABLE AUTH_FAILED NOT_FOUND TIMEOUT ERROR DISCONNECTED EXPIRED",
}
_COLOURS = {state: colour for colour, states in _STATES.items() for state in states.split()}
_WORD = r"[A-Z][A-Z_]+"
_GAP = "   "


class Format(StrEnum):
    """What standard output is written as."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def coloured() -> bool:
    """Whether standard output is a terminal that wants colour (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


@dataclass(frozen=True)
class Output:
    """How results are written."""

    format: Format = Format.TABLE
    headers: bool = True

    @property
    def human(self) -> bool:
        """Whether a person reads it: tables, and the notes that go with them."""
        return self.format in {Format.TABLE, Format.WIDE}

    def write_list(self, items: "Sequence[M]", view: "View[M]") -> None:
        """Write a list: a table, `{"nodes": [...]}`, or one name a line."""
        if self.human:
            write_lines(self.table(items, view))
        elif self.format is Format.NAME:
            write_lines([_name(item) for item in items])
        else:
            self.write_data({view.key: [to_dict(item) for item in items]})

    def write_one(self, item: "M", view: "View[M]") -> None:
        """Write one resource: a table of one row, the object itself, or its name."""
        if self.human or self.format is Format.NAME:
            self.write_list([item], view)
        else:
            self.write_data(to_dict(item))

    def table(self, items: "Sequence[M]", view: "View[M]") -> list[str]:
        """The lines of a table, without colour; none for an empty list without headings."""
        columns = [column for column in view.columns if self.format is Format.WIDE or not column.wide]
        rows = [[re.sub(_UNPRINTABLE, "?", column.cell(item)) for column in columns] for item in items]
        if self.headers:
            rows.insert(0, [column.heading for column in columns])
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        return [_GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]

    def write_data(self, data: object) -> None:
        """Write data as JSON or YAML."""
        if self.format is Format.JSON:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
            return
        dump_yaml(data, sys.stdout)


def dump_yaml(data: object, file: TextIO) -> None:
    """Write data as YAML, in its own order."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)  # its own annotations are incomplete
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    yaml.dump(data, file)


def write_lines(lines: Sequence[str]) -> None:
    """Write lines for a person, words of state in colour where the terminal wants it."""
    text = "".join(f"{line}\n" for line in lines)
    if coloured():
        text = re.sub(_WORD, lambda found: _paint(found[0]), text)
    sys.stdout.write(text)


def _paint(word: str) -> str:
    return f"\x1b[{_COLOURS[word]}m{word}\x1b[0m" if word in _COLOURS else word


def to_dict(item: "Message") -> dict[str, object]:
    """The protobuf JSON mapping; a field that has no presence is there with its zero, an absent one is not."""
    from google.protobuf.json_format import MessageToDict

    data: dict[str, object] = MessageToDict(item, always_print_fields_with_no_presence=True)
    return data


def _name(item: "Message") -> str:
    name: object = getattr(item, "name", "")
    return str(name)

"""Standard output: the payload, and nothing else, in the format that was asked for."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from gpuscale.cli.console.choosing import Chosen
from gpuscale.cli.console.terminal import coloured, note, write_lines
from gpuscale.cli.console.wire_json import name_of, to_dict
from gpuscale.cli.grammar.formats import Form, Format
from gpuscale.cli.grammar.jsonpath import Field, Path, as_text, find, is_list, is_mapping, render

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import View

    M = TypeVar("M", bound=Message)

__all__ = ["Format", "Output", "coloured", "dump_yaml", "to_dict", "write_lines"]

_UNPRINTABLE = r"[\x00-\x1f\x7f-\x9f]"
_GAP = "   "
_ABSENT = "-"
_NAME: Path = (Field("name"),)


@dataclass(frozen=True)
class Output:
    """How results are written, and which of them."""

    format: Format = Format.TABLE
    headers: bool = True
    form: Form = field(default_factory=Form)
    """The expression of a format that has one."""
    chosen: Chosen = field(default_factory=Chosen)
    """Which items of lists, in which order, and whether only those that changed."""

    @property
    def human(self) -> bool:
        """Whether a person reads it: tables, and the notes that go with them."""
        return self.format in {Format.TABLE, Format.WIDE}

    def write_list(self, items: "Sequence[M]", view: "View[M]") -> None:
        """Write a list: a table, `{"nodes": [...]}`, or one name a line."""
        kept, gone = self.chosen.pick(items, view)
        if self.human:
            write_lines([*self.table(kept, view), *(f"{name} is gone" for name in gone)])
        elif self.format is Format.NAME:
            write_lines([*map(name_of, kept), *gone])
        elif self.chosen.watched is None:
            self.write_data({view.key: [to_dict(item) for item in kept]})
        else:
            self._write_each([*map(to_dict, kept), *({"name": name, "deleted": True} for name in gone)])

    def note_none(self, items: Sequence[object], text: str = "none") -> None:
        """Say that a list is empty, to a person who would see nothing."""
        if not items and self.human and self.chosen.watched is None:
            note(text)

    def write_one(self, item: "M", view: "View[M]") -> None:
        """Write one resource: a table of one row, the object itself, or its name."""
        if self.human or self.format is Format.NAME or self.chosen.watched is not None:
            self.write_list([item], view)
        else:
            self.write_data(to_dict(item))

    def write_records(
        self, key: str, records: Sequence[Mapping[str, object]], columns: Sequence[tuple[str, str]]
    ) -> None:
        """Write what is no message of the contract: a table of (heading, key) columns, or data under its key."""
        if self.human:
            rows = [[as_text(record.get(name, "")) or _ABSENT for _, name in columns] for record in records]
            write_lines(self._aligned([heading for heading, _ in columns], rows))
        else:
            self.write_data({key: [dict(record) for record in records]})

    def table(self, items: "Sequence[M]", view: "View[M]") -> list[str]:
        """The lines of a table, without colour; none for an empty list without headings."""
        columns = [column for column in view.columns if self.format is Format.WIDE or not column.wide]
        rows = [[column.cell(item) for column in columns] for item in items]
        return self._aligned([column.heading for column in columns], rows)

    def _aligned(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
        """The lines of a table; while it is watched headings are written once, and columns only grow."""
        watched = self.chosen.watched
        with_headings = self.headers and not (watched and watched.headed)
        lines = [[re.sub(_UNPRINTABLE, "?", cell) for cell in row] for row in rows]
        if with_headings:
            lines.insert(0, list(headings))
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        if watched is not None and lines:
            widths = list(map(max, widths, watched.widths or widths))
            watched.widths, watched.headed = widths, True
        return [_GAP.join(map(str.ljust, line, widths)).rstrip() for line in lines]

    def write_data(self, data: object) -> None:
        """Write data in the format that was asked for; YAML for a person, where there is no table."""
        if self.format is Format.JSON:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
        elif self.format in {Format.TABLE, Format.WIDE, Format.YAML}:
            dump_yaml(data, sys.stdout)
        elif self.format is Format.JSONPATH:
            text = render(self.form.template, data)
            sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        else:
            self._write_each(_listed(data))

    def _write_each(self, items: Sequence[object]) -> None:
        """Write data one by one: a line of JSON, a document of YAML, a name, or a row of custom columns."""
        if self.format is Format.CUSTOM_COLUMNS:
            rows = [[_cell(one, path) for _, path in self.form.columns] for one in items]
            write_lines(self._aligned([heading for heading, _ in self.form.columns], rows))
            return
        for one in items:
            if self.format is Format.NAME:
                write_lines([" ".join(map(as_text, find(_NAME, one)))])
            elif self.format is Format.YAML:
                sys.stdout.write("---\n")
                dump_yaml(one, sys.stdout)
            elif self.format is Format.JSONPATH:
                self.write_data(one)
            else:
                sys.stdout.write(json.dumps(one) + "\n")


def _listed(data: object) -> Sequence[object]:
    """The items of a mapping that is one list under its key; else the data itself."""
    if is_mapping(data) and len(data) == 1:
        [only] = data.values()
        if is_list(only):
            return only
    return [data]


def _cell(data: object, path: Path) -> str:
    return ",".join(map(as_text, find(path, data))) or _ABSENT


def dump_yaml(data: object, file: TextIO) -> None:
    """Write data as YAML, in its own order."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)  # its own annotations are incomplete
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    # What another encoding cannot write is written with escapes, which are the same data.
    yaml.allow_unicode = (file.encoding or "utf-8").lower().startswith("utf")
    yaml.dump(data, file)

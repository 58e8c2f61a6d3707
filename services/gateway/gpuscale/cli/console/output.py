"""Results on standard output: selects, sorts and formats them.

Items are messages of the contract, in tables by a `View` of `cells`, else in the protobuf JSON mapping.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import product
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from gpuscale.cli.console.terminal import TERMINAL, note, printable, terminal_width, width_of, write_lines
from gpuscale.cli.grammar.jsonpath import (
    Field,
    Form,
    Format,
    Path,
    as_text,
    find,
    is_list,
    is_mapping,
    parse_path,
    render,
)
from gpuscale.cli.grammar.parameters import local_text, utc_text
from gpuscale.cli.grammar.selecting import Condition, check_path, leads, order
from gpuscale.common.errors import InvalidArgumentError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from gpuscale.cli.console.cells import Column, View
    from gpuscale.cli.console.lookup import Streams

    M = TypeVar("M", bound=Message)

_UUID = r"\b((?i:GPU|MIG|SIM)-[0-9A-Fa-f]{8})((?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12})\b"
_MOMENT = r"\d{4}-\d\d-\d\d \d\d:"
_GAP = "   "
_NARROW_GAP = "  "
_LEAST_TEXT, _LEAST_CELL = 16, 8
"""Least widths of a cut column: at first, and if that is not enough."""
_HEADINGS: Mapping[str, str] = {"identity": "CALLS AS"}
"""Headings other than their keys."""
ABSENT = "-"
_DESCENDING = "-"
_NAME: Path = (Field("name"),)
_NOWHERE = order(None)[0]


def to_dict(item: "Message") -> dict[str, object]:
    """The protobuf JSON mapping, with zeros of fields without presence."""
    from google.protobuf.json_format import MessageToDict

    data: dict[str, object] = MessageToDict(item, always_print_fields_with_no_presence=True)
    return data


def name_of(item: "Message") -> str:
    """The name, tenant or request id of an item; empty if it has none."""
    return next(filter(None, (str(getattr(item, one, "")) for one in ("name", "tenant", "request_id"))), "")


@dataclass
class Watched:
    """What has been written of a watched list; one without a stream is polled `every` so many seconds."""

    every: float
    streams: "Streams | None" = None
    seen: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    widths: list[int] = field(default_factory=list[int])
    headed: bool = False

    def changes(self, shown: dict[str, tuple[str, ...]]) -> tuple[set[str], list[str]]:
        """Take in a list, cells by name; returns the names that are new or changed, and those that are gone."""
        before, self.seen = self.seen, shown
        changed = {name for name, cells in shown.items() if before.get(name) != cells}
        return changed, [name for name in before if name not in shown]


@dataclass(frozen=True)
class Chosen:
    """The selection and order that the options of `get` ask for."""

    conditions: tuple[Condition, ...] = ()
    filter: str = ""
    order_by: str = ""
    sort_by: str = ""
    watched: Watched | None = None

    def to_filter(self, descriptor: Any, view: "View[M]") -> str:
        """The API's filter, for all conditions but those on columns. A key is a field, else a column, else a label.

        Raises InvalidArgumentError: a key is none of them.
        """
        texts, also = [self.filter] if self.filter else [], [one.heading for one in view.columns]
        asked = (_asked(one, descriptor, view) for one in self.conditions)
        texts += [one.to_filter(descriptor, "--selector", also) for one in asked if one is not None]
        return " AND ".join(texts)  # OR binds tighter

    def pick(self, items: "Sequence[M]", view: "View[M]") -> "tuple[list[M], list[str]]":
        """The items to write, and the names of those that are gone. Raises InvalidArgumentError: the key to sort by is unknown."""
        kept = list(items)
        for one in self.conditions if items else ():
            if (column := view.column(one.key)) and _asked(one, items[0].DESCRIPTOR, view) is None:
                kept = [item for item in kept if one.holds(cell_of(column, item, one.path))]
        if self.sort_by:
            wanted = self.sort_by.removeprefix(_DESCENDING)
            column = view.column(wanted)
            try:
                path = () if column else parse_path(wanted)
            except ValueError as error:
                raise InvalidArgumentError(f"--sort-by: {error}") from error
            values = [
                column.cell(one) if column else next(iter(find(path, to_dict(one))), None) for one in kept
            ]
            ranked = [(order(value), item) for value, item in zip(values, kept, strict=True)]
            known = [pair for pair in ranked if pair[0][0] != _NOWHERE]
            if column is None and ranked and not known:
                check_path(path, kept[0].DESCRIPTOR, "--sort-by", [one.heading for one in view.columns])
            known.sort(key=lambda pair: pair[0], reverse=self.sort_by.startswith(_DESCENDING))
            kept = [item for _, item in known] + [item for key, item in ranked if key[0] == _NOWHERE]
        if self.watched is None:
            return kept, []
        still = [column for column in view.columns if not column.moving]
        keys = [name_of(item) or f"#{index}" for index, item in enumerate(kept)]
        cells = [tuple(column.cell(item) for column in still) for item in kept]
        changed, gone = self.watched.changes(dict(zip(keys, cells, strict=True)))
        return [item for key, item in zip(keys, kept, strict=True) if key in changed], gone


def _asked(one: Condition, descriptor: Any, view: "View[Any]") -> Condition | None:
    """A condition with the path of the field or label that it is about; None for one on a column."""
    column = view.column(one.key)
    if column and not one.compares and (column.own is None or one.value.upper() in column.own):
        return None
    about = [replace(one, path=path) for path in (view.paths.get(one.key, ()), one.path)]
    if fields := [asked for asked in about if leads(asked.path, descriptor)]:
        return next((asked for asked in fields if asked.fits(descriptor)), fields[0])
    if column:
        return None
    return replace(one, path=(*view.labels, Field(one.key))) if leads(view.labels, descriptor) else one


def heading_of(key: str) -> str:
    """The heading of a key: `CA-FILE` of `ca_file`, `USES LEFT` of `usesLeft`."""
    return _HEADINGS.get(key) or re.sub("(?=[A-Z])", " ", key).replace("_", "-").upper()


def cell_of(column: "Column[Any]", item: "Message", path: Path = ()) -> list[str]:
    """The text of a cell, its parts as of `ONLINE,CORDONED`, and the field at a path that it shortens; none if it is absent."""
    text = column.cell(item)
    whole = find(path, to_dict(item)) if path and column.own is None else ()
    return [] if text == ABSENT else [text, *text.split(","), *map(as_text, whole)]


@dataclass(frozen=True)
class Output:
    """Writes results: in a format, with the expression of its `form` if it has one."""

    format: Format = Format.TABLE
    headers: bool = True
    form: Form = field(default_factory=Form)
    chosen: Chosen = field(default_factory=Chosen)

    @property
    def human(self) -> bool:
        """Whether output is a table, with notes, for a person."""
        return self.format in {Format.TABLE, Format.WIDE}

    def watch(self, every: float) -> Watched:
        """What has been written of a list that is about to be watched. Raises InvalidArgumentError: the format cannot be streamed."""
        if self.format in {Format.JSON, Format.CSV}:
            raise InvalidArgumentError(
                f"--watch writes one object after the other: use -o jsonl instead of -o {self.format}"
            )
        return Watched(every)

    def write_list(self, items: "Sequence[M]", view: "View[M]") -> None:
        """Write a list: a table, `{"nodes": [...]}`, or one name a line."""
        kept, gone = self.chosen.pick(items, view)
        if self.human:
            write_lines([*self.table(kept, view), *(f"{name} is gone" for name in gone)])
        elif self.format is Format.NAME:
            write_lines([*filter(None, map(name_of, kept)), *gone])
        elif self.chosen.watched is None:
            self.write_data({view.key: [to_dict(item) for item in kept]})
        else:
            self._write_each([*map(to_dict, kept), *({"name": name, "deleted": True} for name in gone)])

    def note_none(self, items: Sequence[object], text: str = "none") -> None:
        """Note for a person that a list is empty."""
        if not items and self.human and self.chosen.watched is None:
            note(text)

    def write_one(self, item: "M", view: "View[M]") -> None:
        """Write one resource: a table of one row, the object itself, or its name."""
        if self.human or self.format is Format.NAME or self.chosen.watched is not None:
            self.write_list([item], view)
        else:
            self.write_data(to_dict(item))

    def write_records(
        self,
        key: str,
        records: Sequence[Mapping[str, object]],
        columns: Sequence[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        """Write records: a table of these columns, or of all keys, some of them `spare`, with local times; or a list under `key`."""
        show = local_text if self.human else utc_text
        records = [
            {name: show(one) if isinstance(one, datetime) else one for name, one in record.items()}
            for record in records
        ]
        if self.human:
            columns = columns or [*next(iter(records), ())]
            cells = ([record.get(name, "") for name in columns] for record in records)
            rows = [
                [",".join(map(as_text, cell if is_list(cell) else [cell])) or ABSENT for cell in row]
                for row in cells
            ]
            write_lines(self._aligned([*map(heading_of, columns)], rows, [one in spare for one in columns]))
        else:
            self.write_data({key: records})

    def write_findings(
        self, key: str, records: Sequence[Mapping[str, object]], subject: Sequence[str]
    ) -> None:
        """Write findings: a paragraph for each with its state, the fields of `subject`, `found` and `advice`; or data."""
        if not self.human:
            self.write_data({key: [dict(record) for record in records]})
            return
        width = max((len(str(record["state"])) for record in records), default=0) + len(_GAP)
        lines = list[str]()
        for record in records:
            head = " ".join(str(record[name]) for name in subject)
            found = f"{record['state']!s:{width}}{head}{_GAP}{record['found']}"
            texts = [found, f"{'':{width}}do: {record['advice']}"] if record["advice"] else [found]
            most = terminal_width() or max(map(len, texts))
            for text in texts:
                lines += wrap(text, most, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
        write_lines(lines)

    def write_said(
        self, lines: str | Sequence[str], data: "Mapping[str, object] | Message", name: str = ""
    ) -> None:
        """Write a result: a line or lines for a person, the name with `-o name`, else data."""
        if self.human:
            write_lines([lines] if isinstance(lines, str) else lines)
        elif self.format is Format.NAME and name:
            write_lines([name])
        else:
            self.write_data(data if isinstance(data, Mapping) else to_dict(data))

    def table(self, items: "Sequence[M]", view: "View[M]") -> list[str]:
        """The lines of a table, without colour."""
        columns = [column for column in view.columns if self.format is Format.WIDE or not column.wide]
        rows = [[column.cell(item) for column in columns] for item in items]
        spare = [column.spare for column in columns]
        return self._aligned([column.heading for column in columns], rows, spare)

    def _aligned(
        self, headings: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[bool] = ()
    ) -> list[str]:
        """The lines of a table. A watched one has headings once, and its columns only grow.

        A plain table fits the terminal: it leaves out spare columns, then cuts the last column, then the widest ones. A time is
        not cut: the part that tells one line from the next would go.
        """
        watched = self.chosen.watched
        with_headings = self.headers and not (watched and watched.headed)
        most = terminal_width() if self.format is Format.TABLE else None
        lines = [list(map(printable, row)) for row in rows]
        if most is not None:
            lines = with_short_uuids(lines)
        if with_headings:
            lines.insert(0, list(headings))
        widths = [max(map(width_of, cells)) for cells in zip(*lines, strict=True)]
        if watched is not None and lines:
            widths = list(map(max, widths, watched.widths or widths))
            watched.widths, watched.headed = widths, True
        gap, shown = _GAP, list(range(len(widths)))
        if most is not None and sum(widths) + len(gap) * (len(widths) - 1) > most:
            gap = _NARROW_GAP
            shown = fitting(widths, spare, most, len(gap))
            *others, last = shown
            times = {at for at in others if any(re.match(_MOMENT, line[at]) for line in lines)}
            others = sorted({*others} - times, key=widths.__getitem__, reverse=True)
            steps = product((_LEAST_TEXT, _LEAST_CELL), others)
            for least, at in ((_LEAST_TEXT, last), *steps, (_LEAST_CELL, last)):
                over = sum(widths[one] + len(gap) for one in shown) - len(gap) - most
                widths[at] = min(widths[at], max(least, widths[at] - over))
            for line in lines:
                line[:] = map(shortened, line, widths)
        return [
            gap.join(line[at] + " " * (widths[at] - width_of(line[at])) for at in shown).rstrip()
            for line in lines
        ]

    def write_data(self, data: object) -> None:
        """Write data in the format asked for; YAML instead of a table."""
        if self.format is Format.JSON:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
        elif self.format in {Format.TABLE, Format.WIDE, Format.YAML}:
            sys.stdout.write("" if self.chosen.watched is None else "---\n")
            dump_yaml(data, sys.stdout)
        elif self.format is Format.JSONPATH:
            text = render(self.form.template, data)
            sys.stdout.write(text if text[-1:] in {"", "\n"} else f"{text}\n")
        else:
            only = next(iter(data.values())) if is_mapping(data) and len(data) == 1 else None
            self._write_each(only if is_list(only) else [data])

    def _write_each(self, items: Sequence[object]) -> None:
        """Write each as a line of JSON, a document of YAML, a name, or a row."""
        if self.format is Format.CUSTOM_COLUMNS:
            rows = [
                [",".join(map(as_text, find(path, one))) or ABSENT for _, path in self.form.columns]
                for one in items
            ]
            write_lines(self._aligned([heading for heading, _ in self.form.columns], rows))
            return
        if self.format is Format.CSV:
            import csv

            # A row for each, with a column for every field; values other than text are JSON.
            tables = [one if is_mapping(one) else {"value": one} for one in items]
            names = list(dict.fromkeys(name for row in tables for name in row))
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerows([names] if self.headers and names else [])
            for row in tables:
                cells = (row.get(name, "") for name in names)
                writer.writerow("" if cell is None else as_text(cell) for cell in cells)
            return
        for one in items:
            if self.format is Format.NAME:
                write_lines([as_text(name) for name in find(_NAME, one)])
            elif self.format in {Format.YAML, Format.JSONPATH}:
                self.write_data(one)
            else:
                sys.stdout.write(json.dumps(one) + "\n")


def with_short_uuids(rows: Sequence[Sequence[str]]) -> list[list[str]]:
    """The cells with UUIDs of GPUs cut to their first part, which commands accept, unless it is ambiguous."""
    found = {one for row in rows for cell in row for one in re.findall(_UUID, cell)}
    counts = Counter(one[0] for one in found)
    return [
        [re.sub(_UUID, lambda one: one[1] if counts[one[1]] == 1 else one[0], cell) for cell in row]
        for row in rows
    ]


def fitting(widths: Sequence[int], spare: Sequence[bool], most: int, gap: int) -> list[int]:
    """The columns shown in `most` characters; leaves out spare ones, the last first."""
    shown = list(range(len(widths)))
    for at in reversed([at for at, is_spare in enumerate(spare) if is_spare]):
        if sum(widths[one] + gap for one in shown) - gap <= most:
            break
        shown.remove(at)
    return shown


def shortened(text: str, most: int) -> str:
    """The text, cut to `most` columns with an ellipsis."""
    if width_of(text) <= most:
        return text
    end = "..." if TERMINAL.ascii else "…"
    text = text[: most - len(end)]
    while width_of(text) > most - len(end):
        text = text[:-1]
    return text + end


def dump_yaml(data: object, file: TextIO) -> None:
    """Write data as YAML, in its own order."""
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)  # its own annotations are incomplete
    yaml.default_flow_style = False
    yaml.representer.sort_base_mapping_type_on_output = False
    # Escapes are the same data in other encodings.
    yaml.allow_unicode = (file.encoding or "utf-8").lower().startswith("utf")
    yaml.dump(data, file)

r"""Output formats, and paths into JSON data: the part of kubectl's JSONPath that scripts use.

    .status.readyReplicas    a field, under its JSON or its contract name      [0]  [-1]  [1:3]  [*]    items of a list
    ['a.b']                  a field whose name has dots                       [?(@.state=="READY")]    items that fit
    {range .nodes[*]}{.name}{"\t"}{.state}{"\n"}{end}      text, once for each item

Written by hand (docs/adr/0019) since 64-bit numbers, which are text in JSON, compare as numbers, and fields have two names.
Pure. A missing value gives nothing; an invalid path is a ValueError that shows the unread rest.
"""

import difflib
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

_STEP = r"""(?x)\.?\[\s*(?:(?P<all>\*)|(?P<index>-?\d+)|(?P<from>-?\d*):(?P<to>-?\d*)|(?P<quoted>'[^']*'|"[^"]*")
        |\?\(\s*@(?P<of>[^=!<>]*?)\s*(?P<is>==|!=|<=|>=|<|>)\s*(?P<than>'[^']*'|"[^"]*"|[^\s)]+)\s*\))\s*\]
    |\.(?P<every>\*)|\.?(?P<field>[A-Za-z_][\w-]*)"""
_PART = r"\{([^{}]*)\}|([^{}]+)"


@dataclass(frozen=True)
class Field:
    """A field of a mapping."""

    name: str


@dataclass(frozen=True)
class Slice:
    """Items of a list; a full slice also gives the values of a mapping."""

    of: slice


@dataclass(frozen=True)
class Where:
    """Items of a list whose value at a path meets a comparison."""

    path: "Path"
    sign: str
    value: str


Path = tuple[Field | Slice | Where, ...]


@dataclass(frozen=True)
class Each:
    """Parts written for each value at a path."""

    path: Path
    parts: "Template"


Template = tuple["str | Path | Each", ...]


def parse_path(text: str) -> Path:
    """The steps of a path; braces, `$` and a leading dot are optional. Raises ValueError: it is invalid."""
    rest = text.strip().removeprefix("{").removesuffix("}").strip().removeprefix("$").removeprefix("@")
    steps: list[Field | Slice | Where] = []
    while rest not in {"", "."}:
        found = re.match(_STEP, rest)
        if found is None:
            raise ValueError(f"{text!r} is not a path: cannot read {rest!r}; write it like .status.state")
        rest = rest[found.end() :]
        if found["is"]:
            steps.append(Where(parse_path(found["of"]), found["is"], found["than"].strip("'\"")))
        elif found["all"] or found["every"]:
            steps.append(Slice(slice(None)))
        elif found["index"]:
            index = int(found["index"])
            steps.append(Slice(slice(index, index + 1 or None)))
        elif found["quoted"]:
            steps.append(Field(found["quoted"][1:-1]))
        elif found["field"]:
            steps.append(Field(found["field"]))
        else:
            start, end = (int(found[one]) if found[one] else None for one in ("from", "to"))
            steps.append(Slice(slice(start, end)))
    return tuple(steps)


def parse_template(text: str) -> Template:
    """The parts of a text with paths in braces; a text without braces is a path.

    Raises ValueError: a path is invalid, or `range` and `end` do not match.
    """
    if not {"{", "}"} & set(text):
        return (parse_path(text),)
    open_parts: list[tuple[Path, list[str | Path | Each]]] = [((), [])]
    end = 0
    for found in re.finditer(_PART, text):
        if found.start() != end:
            break
        end = found.end()
        inner = (found[1] or "").strip()
        if found[1] is None:
            open_parts[-1][1].append(found[2])
        elif inner.startswith("range "):
            open_parts.append((parse_path(inner.removeprefix("range ")), []))
        elif inner == "end":
            if len(open_parts) == 1:
                raise ValueError("'{end}' without '{range}'")
            path, parts = open_parts.pop()
            open_parts[-1][1].append(Each(path, tuple(parts)))
        elif inner[:1] in {"'", '"'} and inner:
            open_parts[-1][1].append(inner[1:-1].replace("\\n", "\n").replace("\\t", "\t"))
        else:
            open_parts[-1][1].append(parse_path(inner))
    if end != len(text):
        raise ValueError(f"{text!r}: unclosed brace at {text[end:]!r}")
    if len(open_parts) > 1:
        raise ValueError(f"{text!r}: {{range}} without {{end}}")
    return tuple(open_parts[0][1])


def find(path: Path, data: object) -> list[object]:
    """All values at a path."""
    values = [data]
    for step in path:
        values = [found for value in values for found in _follow(step, value)]
    return values


def _follow(step: Field | Slice | Where, value: object) -> Iterator[object]:
    if isinstance(step, Field):
        if is_mapping(value):
            names = (step.name, camel(step.name))
            yield from (value[name] for name in dict.fromkeys(names) if name in value)
    elif isinstance(step, Slice):
        if is_list(value):
            yield from value[step.of]
        elif is_mapping(value) and step.of == slice(None):
            yield from value.values()
    elif is_list(value):
        compare = COMPARE[step.sign]
        for item in value:
            if any(compare(*_alike(found, step.value)) for found in find(step.path, item)):
                yield item


COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _alike(value: object, other: str) -> tuple[float, float] | tuple[str, str]:
    """Both values as numbers if possible (64-bit ones are text in JSON), else as text."""
    try:
        return float(str(value)), float(other)
    except ValueError:
        return as_text(value), other


def render(template: Template, data: object) -> str:
    """The text of a template; several values at a path are separated by spaces."""
    parts: list[str] = []
    for part in template:
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, Each):
            parts += [render(part.parts, item) for item in find(part.path, data)]
        else:
            parts.append(" ".join(map(as_text, find(part, data))))
    return "".join(parts)


def as_text(value: object) -> str:
    """The value if it is text, else its JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def camel(name: str) -> str:
    """The JSON name of a field, `readyReplicas` of `ready_replicas`."""
    first, *others = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether data is a JSON object."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether data is a JSON array."""
    return isinstance(value, list)


class Format(StrEnum):
    """The format of standard output."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    JSONL = "jsonl"
    CSV = "csv"
    JSONPATH = "jsonpath"
    CUSTOM_COLUMNS = "custom-columns"


WITH_EXPRESSION = {Format.JSONPATH: "jsonpath={.name}", Format.CUSTOM_COLUMNS: "custom-columns=NAME:.name"}
"""The formats with an expression, and an example."""


@dataclass(frozen=True)
class Form:
    """A format with its expression: the template of a jsonpath, or headings and paths of columns."""

    format: Format = Format.TABLE
    template: Template = ()
    columns: tuple[tuple[str, Path], ...] = ()


def parse_form(text: str) -> Form:
    """The value of `-o`. Raises ValueError: the format is unknown, or its expression invalid."""
    word, equals, expression = text.partition("=")
    if word not in set(Format):
        near = difflib.get_close_matches(word, list(Format), n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(Format)}"
        raise ValueError(f"{word!r} is not a format; {hint}")
    wanted = Format(word)
    if wanted not in WITH_EXPRESSION:
        if equals:
            raise ValueError(f"{word} takes no expression")
        return Form(wanted)
    if not expression:
        raise ValueError(f"write it like {WITH_EXPRESSION[wanted]}")
    if wanted is Format.JSONPATH:
        return Form(wanted, template=parse_template(expression))
    columns: list[tuple[str, Path]] = []
    for column in expression.split(","):
        heading, _, path = column.partition(":")
        if not heading or not path:
            raise ValueError(f"{column!r} is not a column; write it like NAME:.name")
        columns.append((heading, parse_path(path)))
    return Form(wanted, columns=tuple(columns))

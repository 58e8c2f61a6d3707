r"""Output formats, and the paths into JSON data that they are written with: the part of kubectl's JSONPath that scripts use.

    .status.readyReplicas    a field, under its JSON or its contract name      [0]  [-1]  [1:3]  [*]    items of a list
    ['a.b']                  a field whose name has dots                       [?(@.state=="READY")]    items that fit
    {range .nodes[*]}{.name}{"\t"}{.state}{"\n"}{end}      text, once for each item

By hand for two reasons (docs/adr/0019): 64-bit numbers, which JSON has as texts, compare as numbers, and fields have two
names. Pure. What does not exist gives nothing; a path that cannot be read is a ValueError that shows the rest of it.
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
    """Items of a list, or all values of a mapping where the slice is whole."""

    of: slice


@dataclass(frozen=True)
class Where:
    """Items of a list for which the value at a path compares as stated."""

    path: "Path"
    sign: str
    value: str


Path = tuple[Field | Slice | Where, ...]


@dataclass(frozen=True)
class Each:
    """Parts that are written once for each value at a path."""

    path: Path
    parts: "Template"


Template = tuple["str | Path | Each", ...]


def parse_path(text: str) -> Path:
    """The steps of a path; braces, `$` and a leading dot may be left out.

    Raises:
        ValueError: it cannot be read.
    """
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
    """The parts of a text with paths in braces; a text without braces is one path.

    Raises:
        ValueError: a path cannot be read, or `range` and `end` do not pair.
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
    """All values at a path; none where there is none."""
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
        compare = _COMPARE[step.sign]
        for item in value:
            if any(compare(*_alike(found, step.value)) for found in find(step.path, item)):
                yield item


_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _alike(value: object, other: str) -> tuple[float, float] | tuple[str, str]:
    """Two values as numbers where both are (JSON has 64-bit numbers as texts), else as texts."""
    try:
        return float(str(value)), float(other)
    except ValueError:
        return as_text(value), other


def render(template: Template, data: object) -> str:
    """The text of a template: values at a path stand side by side with a space between."""
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
    """A value as it is written: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def camel(name: str) -> str:
    """`readyReplicas` of `ready_replicas`: the name in JSON of a field of the contract."""
    first, *others = name.split("_")
    return first + "".join(word[:1].upper() + word[1:] for word in others)


def is_mapping(value: object) -> TypeGuard[Mapping[str, object]]:
    """Whether data is a mapping; keys of JSON are texts."""
    return isinstance(value, Mapping)


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether data is a list."""
    return isinstance(value, list)


class Format(StrEnum):
    """How standard output is written."""

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
"""The forms that take an expression, and how one is written."""


@dataclass(frozen=True)
class Form:
    """A format, and what it needs: the template of a jsonpath, or headings and paths of custom columns."""

    format: Format = Format.TABLE
    template: Template = ()
    columns: tuple[tuple[str, Path], ...] = ()


def parse_form(text: str) -> Form:
    """The form that `-o` names.

    Raises:
        ValueError: there is no such format, or its expression cannot be read; suggests the nearest one.
    """
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

"""Output formats: `-o table`, `-o jsonpath={.nodes[*].name}`, `-o custom-columns=NAME:.name`, as kubectl has them. Pure."""

import difflib
from dataclasses import dataclass
from enum import StrEnum

from gpuscale.cli.grammar.jsonpath import Path, Template, parse_path, parse_template


class Format(StrEnum):
    """How standard output is written."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    JSONL = "jsonl"
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
    return Form(wanted, columns=tuple(map(_column, expression.split(","))))


def _column(text: str) -> tuple[str, Path]:
    heading, colon, path = text.partition(":")
    if not heading or not colon or not path:
        raise ValueError(f"{text!r} is not a column; write it like NAME:.name")
    return heading, parse_path(path)

"""The page of all settings, from the classes that read them: their fields, defaults, bounds and descriptions."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpuscale.common.config.settings import (
    DatabaseSettings,
    ListenerSettings,
    MetricsPageSettings,
    ProgramSettings,
    ServerSettings,
    UpstreamSettings,
)
from gpuscale.common.config.sources import Settings
from gpuscale.common.secrets import SecretUrl

SERVICES = Path(__file__).resolve().parent.parent / "services"
ADDONS = SERVICES.parent / "addons"
sys.path += map(str, ADDONS.iterdir())  # they need not be installed
HEAD = """# Every setting

Written by `make docs` from the code. [How settings are given](../settings.md): the flag `--period-seconds` of section
`agent` is the variable `GPUSCALE_AGENT_PERIOD_SECONDS`, and the key `period_seconds` of the table `[agent]` of a file. Tables such as
`[brokers.NAME]` are in the file only.
"""
SHARED: Mapping[type[Settings], str] = {
    ProgramSettings: "Settings of every program",
    ListenerSettings: "Settings of a listener",
    MetricsPageSettings: "Settings of metrics",
    ServerSettings: "Settings of a server",
    UpstreamSettings: "Settings of a caller",
    DatabaseSettings: "Settings of a database",
}
BY_HOST = {"node": "the host's name", "adapter": "the host's name", "data_dir": "see there"}
"""Defaults that are found out on the host, so that no page can state them."""
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for shared, title in SHARED.items():
        parts.append(f"## {title}\n\n{_text(shared.__doc__)}\n")
        bases = [base for base in SHARED if base is not shared and issubclass(shared, base)]
        fields = {
            k: field
            for k, field in shared.model_fields.items()
            if not any(k in b.model_fields for b in bases)
        }
        parts.append(_table(shared, fields, flags=True))
    tables: dict[str, type[BaseModel]] = {}
    for program in programs():
        parts += _program(program, tables)
    for name, model in sorted(tables.items(), key=lambda item: item[0].rstrip("]")):
        parts.append(f"## Table {name}\n\n{_text(model.__doc__)}\n")
        parts.append(_table(model, model.model_fields, flags=False))
    return "\n".join(parts)


def programs() -> list[type[Settings]]:
    """The settings of every program: each class in a module of settings, or of an engine, that names its own section."""
    inside = [*SERVICES.rglob("*settings.py"), *SERVICES.rglob("engines/*/engine.py")]
    files = [path.relative_to(SERVICES) for path in sorted(inside)]
    files += [path.relative_to(ADDONS) for path in sorted(ADDONS.glob("*/*/engine.py"))]
    modules = [importlib.import_module(".".join(path.with_suffix("").parts[1:])) for path in files]
    found = {value for module in modules for _, value in inspect.getmembers(module, inspect.isclass)}
    own = [kind for kind in found if issubclass(kind, Settings) and "section" in vars(kind)]
    return sorted(own, key=lambda kind: kind.section)


def _program(program: type[Settings], tables: dict[str, type[BaseModel]]) -> Iterator[str]:
    """The section of a program; the tables of its file are added to `tables`."""
    name = "gpuscalectl up" if program.section == "up" else f"gpuscale-{program.section.replace('_', '-')}"
    taken = [shared for shared in SHARED if issubclass(program, shared)]
    inherited = {key: field for shared in taken for key, field in shared.model_fields.items()}
    own: dict[str, FieldInfo] = {}
    files: list[str] = []
    for key, field in program.model_fields.items():
        if model := _model(field.annotation, of_mapping=True):
            tables.update(_tables(f"[{key}.NAME]", model))
            files.append(f"[`[{key}.NAME]`](#table-{key}name)")
        elif key not in inherited or field.default != inherited[key].default:
            own[key] = field
    also = [f"[{SHARED[shared].lower()}](#{SHARED[shared].lower().replace(' ', '-')})" for shared in taken]
    yield f"## `{name}`: [{program.section}]\n"
    yield f"{_text(program.__doc__)}\n\nIt also takes the {', the '.join(also)}.\n"
    if files:
        yield f"Tables: {', '.join(files)}.\n"
    yield _table(program, own, flags=True)


def _tables(name: str, model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """A table of the file, and the tables within it."""
    yield name, model
    for key, field in model.model_fields.items():
        if inner := _model(field.annotation, of_mapping=False):
            yield from _tables(f"{name[:-1]}.{key}]", inner)


def _model(annotation: object, *, of_mapping: bool) -> type[BaseModel] | None:
    """The model of a table in an annotation: of a mapping of names to tables, or of one table or a list of them."""
    if (get_origin(annotation) is dict) is not of_mapping:
        return None
    arguments = get_args(annotation)
    return next((kind for kind in arguments if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _table(owner: type[BaseModel], fields: Mapping[str, FieldInfo], *, flags: bool) -> str:
    lines = [f"| {'flag' if flags else 'key'} | default | meaning |", "| --- | --- | --- |"]
    said = _docstrings(owner)
    for name, field in fields.items():
        secret = SecretUrl in get_args(field.annotation)
        shown = f"--{name.replace('_', '-')}" if flags and not secret else name
        text = field.description or said.get(name, "")
        no_flag = "; no flag" if flags and secret else ""
        lines.append(f"| `{shown}` | {_default(name, field)} | {_cell(text)}{_limits(field)}{no_flag} |")
    return "\n".join([*lines, ""])


def _default(name: str, field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if name in BY_HOST and field.default:
        return BY_HOST[name]
    if field.default_factory is not None or field.default in (None, "", ()):
        return "none"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _limits(field: FieldInfo) -> str:
    """What a value may be: the words of a choice, the bounds of a number."""
    kinds = (
        [field.annotation, *get_args(field.annotation)] if _is_union(field.annotation) else [field.annotation]
    )
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
    choices = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    limits = {key: getattr(limit, key) for limit in field.metadata for key in _BOUNDS if hasattr(limit, key)}
    shown = {
        key: f"{value:,g}" if isinstance(value, float) else f"{value:,}" for key, value in limits.items()
    }
    if shown.keys() == {"ge", "le"}:
        bounds = [f"{shown['ge']} to {shown['le']}"]
    else:
        bounds = [f"{_BOUNDS[key]} {text}" for key, text in shown.items() if (key, text) != ("ge", "0")]
    if len(choices) > 1 and not all(word in (field.description or "") for word in choices):
        bounds.append(" | ".join(f"`{word}`" for word in choices).replace("|", "\\|"))
    return f" ({', '.join(bounds)})" if bounds else ""


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in {Union, UnionType}


def _docstrings(owner: type[BaseModel]) -> dict[str, str]:
    """The texts that stand below fields of a class, and of those that it is derived from."""
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__[: owner.__mro__.index(BaseModel)]):
        found.update(_own_docstrings(base))
    return found


def _own_docstrings(owner: type[object]) -> dict[str, str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    found: dict[str, str] = {}
    for field, text in pairwise(body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = str(text.value.value)
    return found


def _text(text: str | None) -> str:
    """The first paragraph, on one line."""
    first = (text or "").strip().partition("\n\n")[0]
    return _escaped(first)


def _cell(text: str) -> str:
    """Text that stands in a table, where sentences of one line end without a full stop."""
    return _escaped(text).removesuffix(".")


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")

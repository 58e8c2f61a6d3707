"""`gpuscalectl explain endpoint.spec.min_replicas`: what a field of a resource means, by the contract's own comments."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuscale.cli.console.output import Format, write_lines
from gpuscale.cli.console.session import session_of
from gpuscale.cli.grammar.arguments import NOUNS, plural
from gpuscale.cli.grammar.field_names import near
from gpuscale.common.errors import NotFoundError

if TYPE_CHECKING:
    from gpuscale.cli.manifests.contract_docs import Entry

_WIDTH = 100
"""Characters of a line of text."""


def explain_field(
    context: typer.Context,
    path: Annotated[str, typer.Argument(metavar="KIND[.FIELD...]", show_default=False)],
) -> None:
    """What a kind of resource or a field of it means, such as endpoint.spec.min_replicas; also any message's name."""
    from gpuscale.cli.manifests import contract_docs

    kind, _, rest = path.partition(".")
    root = contract_docs.roots(plural(kind))
    if not root:
        raise NotFoundError(f"there is no kind {kind!r}{near(kind, (noun.singular for noun in NOUNS))}")
    entry = contract_docs.describe(root, rest)
    output = session_of(context).output
    if output.human:
        write_lines(_lines(path, entry))
    elif output.format is Format.NAME:
        write_lines([f"{path}.{part.name}" for part in entry.parts] or [path])
    else:
        output.write_data(_data(path, entry))


def _data(name: str, entry: "Entry") -> dict[str, object]:
    data: dict[str, object] = {"name": name, "type": entry.type, "description": entry.text}
    if entry.json_name:
        data["jsonName"] = entry.json_name
    if entry.bounds:
        data["bounds"] = entry.bounds
    if entry.parts:
        data["parts"] = [_data(part.name, part) for part in entry.parts]
    return data


def _lines(path: str, entry: "Entry") -> list[str]:
    import textwrap

    json_name = f"   in JSON: {entry.json_name}" if entry.json_name not in {"", entry.name} else ""
    lines = [f"{path}   {entry.type}{json_name}", *textwrap.wrap(entry.text, _WIDTH)]
    if entry.bounds:
        lines.append(f"Bounds: {entry.bounds}.")
    for part in entry.parts:
        bounds = f" ({part.bounds})" if part.bounds else ""
        lines += ["", f"  {part.name}   {part.type}".rstrip()]
        indent = "    "
        lines += textwrap.wrap(part.text + bounds, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    return lines
